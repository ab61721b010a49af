"""`merge_into_copies`: an inference engine gets merged weights, and the model that is trained is not touched."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.language_models import in_shards
from parity.fixes.override import replaced
from parity.fixes.patch import Patch

NAME = "merge_into_copies"
MERGED = "_parity_merged"
Held = tuple[Any, nn.Module, str]
"""A layer with an adapter, the module below it, and the name of a parameter of that."""


def merge_into_copies(trainer: Any) -> Patch:
    """Between `model.merge_adapter()` and `model.unmerge_adapter()` the model lists merged copies: W + s·B·A, each a new tensor.

    Trainers that generate with vLLM (trl up to 1.16.0) merge a LoRA in place before they send the weights, and take it out
    behind. Two things go wrong. W + Δ - Δ is not W: a base in bf16 drifts by up to 2^-9 of a weight at each step, one in 4 bits
    loses more, and so does the reference, which is the base. And in `vllm_mode="server"` (1.11 to 1.16.0) the adapter is taken
    out before the last buffer of weights is read, of up to 1 GiB: the engine gets these without it.

    Exchanges `merge_adapter`, `unmerge_adapter` and `named_parameters` of the trainer's PeftModel. One layer is copied at a
    time. Nothing is done without a LoRA that can be merged, in 8 bits, where no engine gets weights, and under FSDP
    and ZeRO-3.
    """
    model = getattr(trainer, "model", None)
    model = trainer.accelerator.unwrap_model(model) if hasattr(trainer, "accelerator") else model
    if not _is_peft(model) or not (held := list(_held(model))):
        return Patch(NAME, reason="there is no adapter that can be merged")
    if not getattr(trainer, "use_vllm", hasattr(trainer, "weight_transfer")):
        return Patch(NAME, reason="no inference engine gets the weights")
    if in_shards(model) or getattr(trainer, "is_fsdp_enabled", False):
        return Patch(NAME, reason="FSDP or ZeRO-3 holds the weights in shards")
    from peft.tuners.lora import LoraLayer

    if not all(isinstance(layer, LoraLayer) for layer, _, _ in held):
        return Patch(NAME, reason="an adapter is no LoRA")
    kinds = {type(p).__name__ for _, base, _ in held for p in base.parameters(recurse=False)}
    if not kinds <= {"Parameter", "Params4bit"}:
        return Patch(NAME, reason=f"weights are {', '.join(sorted(kinds - {'Parameter', 'Params4bit'}))}")
    weights = [id(base._parameters[name]) for _, base, name in held]
    if len({*weights}) < len(weights):
        return Patch(NAME, reason="two adapters share a weight")

    def merge(self: Any, original: Any, adapter_names: Sequence[str] | None = None, safe_merge: bool = False) -> None:
        setattr(self, MERGED, {"adapter_names": adapter_names, "safe_merge": safe_merge})

    def unmerge(self: Any, original: Any) -> None:
        vars(self).pop(MERGED, None)

    def listed(self: Any, original: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        asked = vars(self).get(MERGED)
        held = {} if asked is None else {id(base._parameters[n]): (layer, n) for layer, base, n in _held(self)}
        last, merged = None, dict[str, Tensor]()
        for name, parameter in original(*args, **kwargs):
            layer, own = held.get(id(parameter), (None, ""))
            if layer is not None and layer is not last:
                last, merged = layer, _copies(layer, asked)
            yield name, parameter if layer is None else nn.Parameter(merged[own], requires_grad=False)

    return replaced(
        trainer, NAME, model, "model", merge_adapter=merge, unmerge_adapter=unmerge, named_parameters=listed
    )


def _is_peft(model: Any) -> bool:
    """Whether it is a PeftModel itself, not a compiled one, which TRL does not take for one."""
    return hasattr(model, "merge_adapter") and hasattr(type(model), "add_adapter")


def _held(model: Any) -> Iterator[Held]:
    """What an adapter is merged into."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "merge") and not layer.merged:
            base = layer.get_base_layer()
            for name in dict.fromkeys(("weight", "bias", getattr(layer, "parameter_name", "weight"))):
                if base._parameters.get(name) is not None:
                    yield layer, base, name


def _copies(layer: Any, asked: Any) -> dict[str, Tensor]:
    """The merged parameters. The layer is merged into copies, which then make room for what was there."""
    base = layer.get_base_layer()
    before = dict(base._parameters)
    try:
        with torch.no_grad():
            for n, p in before.items():
                if type(p) is nn.Parameter:  # a quantised one is made anew by its layer
                    base._parameters[n] = nn.Parameter(p.detach().clone(), requires_grad=False)
            layer.merge(**asked)
        return {n: p.detach() for n, p in base._parameters.items() if p is not None}
    finally:
        base._parameters.update(before)
        layer.merged_adapters.clear()
        getattr(layer, "_caches", {}).clear()
