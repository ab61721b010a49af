"""`merge_into_copies`: an inference engine gets merged weights, and the model that is trained is not touched."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parity.fixes.logits import in_shards
from parity.fixes.override import replaced
from parity.fixes.patch import Patch

NAME = "merge_into_copies"
Held = tuple[Any, nn.Module, str]
"""A layer with an adapter, the module below it, and the name of a parameter of that."""


def merge_into_copies(trainer: Any) -> Patch:
    """Between `model.merge_adapter()` and `model.unmerge_adapter()` the model lists merged copies: W + s·B·A, each a new tensor.

    Trainers that generate with vLLM (trl up to 1.16.0) merge a LoRA in place before they send the weights, and take it out
    behind. Two things go wrong. W + Δ - Δ is not W: a base in bf16 drifts by up to 2^-9 of a weight at each step, one in 4 bits
    loses more, and so does the reference, which is the base. And in `vllm_mode="server"` (1.11 to 1.16.0) the adapter is taken
    out before the last buffer of weights is read, of up to 1 GiB: the engine gets these without it.

    Exchanges `merge_adapter`, `unmerge_adapter` and `named_parameters` of the trainer's PeftModel. One layer is copied at a
    time. Nothing is done without an adapter that can be merged, where no engine gets weights, and under FSDP and ZeRO-3.
    """
    model = getattr(trainer, "model", None)
    model = trainer.accelerator.unwrap_model(model) if hasattr(trainer, "accelerator") else model
    if not hasattr(model, "merge_adapter") or not _held(model):
        return Patch(NAME, reason="there is no adapter that can be merged")
    if not getattr(trainer, "use_vllm", hasattr(trainer, "weight_transfer")):
        return Patch(NAME, reason="no inference engine gets the weights")
    if in_shards(model) or getattr(trainer, "is_fsdp_enabled", False):
        return Patch(NAME, reason="FSDP or ZeRO-3 holds the weights in shards")
    asked: list[Sequence[str] | None] = []  # which adapters, while they are merged

    def merge(self: Any, original: Any, adapter_names: Sequence[str] | None = None, safe_merge: bool = False) -> None:
        asked[:] = [adapter_names]

    def unmerge(self: Any, original: Any) -> None:
        asked.clear()

    def listed(self: Any, original: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        names, held = (asked[0], _held(self)) if asked else (None, {})
        for name, parameter in original(*args, **kwargs):
            one = held.get(id(parameter))
            yield name, parameter if one is None else nn.Parameter(_copy(*one, names), requires_grad=False)

    return replaced(
        trainer, NAME, model, "model", merge_adapter=merge, unmerge_adapter=unmerge, named_parameters=listed
    )


def _held(model: Any) -> dict[int, Held]:
    """By the identity of the parameter: what an adapter is merged into."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer) and hasattr(m, "merge")]
    below = [(layer, layer.get_base_layer()) for layer in layers if not layer.merged]
    names = [("weight", "bias", getattr(layer, "parameter_name", "")) for layer, _ in below]
    every = ((layer, base, name) for (layer, base), own in zip(below, names, strict=True) for name in own)
    return {id(base._parameters[name]): (layer, base, name) for layer, base, name in every if _there(base, name)}


def _there(base: nn.Module, name: str) -> bool:
    return base._parameters.get(name) is not None


def _copy(layer: Any, base: nn.Module, name: str, adapters: Sequence[str] | None) -> Tensor:
    """The merged parameter. The layer is merged into copies, which then make room for what was there."""
    before = dict(base._parameters)
    try:
        with torch.no_grad():
            for n, p in before.items():
                if type(p) is nn.Parameter:  # a quantised one is made anew by its layer
                    base._parameters[n] = nn.Parameter(p.detach().clone(), requires_grad=False)
            layer.merge(adapter_names=adapters)
        found = base._parameters[name]
        assert found is not None
        return found.detach()
    finally:
        base._parameters.update(before)
        layer.merged_adapters.clear()
