"""`use_selective_log_probs`: TRL's fused LM head takes log-probs and entropies from ours, in the trainer that asked."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from parity.fixes.language_models import in_shards
from parity.fixes.logits import fused_models, scored_by_its_own_logits
from parity.fixes.logprobs import selective_log_probs
from parity.fixes.override import chain, closed_over, overridden, override, rebind
from parity.fixes.patch import ALREADY, ORIGINAL, Change, Patch

NAME = "use_selective_log_probs"
KERNEL = "_ChunkedLogProbFunction"
_ENTROPY = "entropy"
_ASKED: ContextVar[bool] = ContextVar("parity_fixes_selective_log_probs", default=False)


class _Kernel:
    """In the place of `ChunkedLogProbFunction`: TRL's, except within a forward that asked for ours."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.change = Change(lambda: rebind(self, original))
        self.signature = inspect.signature(original.forward)  # bias since 1.13, outputs since 1.15
        self.optional = getattr(sys.modules[original.__module__], "OPTIONAL_OUTPUTS", (_ENTROPY,))
        setattr(self, ORIGINAL, original)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def apply(self, *args: Any) -> Any:
        if not _ASKED.get():
            return self.original.apply(*args)
        call = self.signature.bind(None, *args)
        call.apply_defaults()
        _, hidden, weight = call.args[:3]
        given = call.arguments
        wanted = given.get("outputs", self.optional)
        if set(wanted) - {"log_probs", _ENTROPY} or hasattr(weight, "ds_id"):
            return self.original.apply(*args)
        found = selective_log_probs(
            hidden,
            weight,
            given["targets"],
            bias=given.get("bias"),
            temperature=given["temperature"],
            softcap=given.get("final_logit_softcapping"),
            logit_scale=given.get("logit_scale", 1.0),
            entropy=_ENTROPY in wanted,
        )
        logps, entropies = found if isinstance(found, tuple) else (found, None)
        return logps, *(entropies if name == _ENTROPY else None for name in self.optional)


def use_selective_log_probs(trainer_or_model: Any) -> Patch:
    """TRL's fused LM head (GRPO: 1.14 on) takes log-probs and entropies from `selective_log_probs`.

    TRL's kernel keeps tiles of logits and their gradient in the dtype of the hidden states, and its entropy is NaN as
    soon as one logit is -inf; with the entropy bonus on, so are loss and gradients (1.16.0). Policy and reference of
    this trainer alone: any other keeps TRL's kernel for both of its models. Nothing is done where one of the trainer's
    models is asked for an output that we do not have (SFT's accuracy, DPO's mean logits). Heads that ZeRO-3 partitions
    keep TRL's kernel.
    """
    try:
        utils = importlib.import_module("trl.trainer.utils")
    except ImportError as error:
        return Patch(NAME, reason=f"trl cannot be imported ({error})")
    kernel = getattr(utils, KERNEL, None)
    if kernel is None:
        return Patch(NAME, reason="this TRL has no fused LM head: its log-probs come from full logits")
    places = list(_places(trainer_or_model))
    if not places:
        return Patch(NAME, reason="no model of the trainer has a fused LM head")
    asked = [fused_outputs(owner) for owner, _ in places if isinstance(owner, nn.Module)]
    other = sorted({field for fields in asked for field in fields} - {"log_probs", _ENTROPY})
    if other:  # policy and reference from two kernels would differ by rounding where they must not
        return Patch(NAME, reason=f"the trainer also takes {', '.join(other)} of TRL's kernel")
    if any(in_shards(owner) for owner, _ in places if isinstance(owner, nn.Module)):
        return Patch(NAME, reason="ZeRO-3 holds the LM head in shards: TRL's kernel stays")
    places = [(owner, name) for owner, name in places if not scored_by_its_own_logits(owner)]
    if not places:
        return Patch(NAME, reason="the trainer's models are scored by their own logits")
    changed: list[str] = []
    undo: list[Callable[[], object]] = []
    for owner, name in places:
        change = overridden(owner, name, NAME)
        if change is None:
            if not isinstance(kernel, _Kernel):
                kernel = _Kernel(kernel)
                rebind(kernel.original, kernel, called=KERNEL)
            change = override(owner, name, NAME, _asking)
            change.back += kernel.change.hold(owner)
            changed.append(f"{type(owner).__name__}.{name}")
        undo += change.hold(trainer_or_model)
    return Patch(NAME, tuple(changed), reason=None if changed else ALREADY, _undo=undo)


def _asking(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _ASKED.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _ASKED.reset(token)


def _places(trainer_or_model: Any) -> Iterator[tuple[Any, str]]:
    """What calls the kernel: forwards of the models since 1.15, methods of the trainer in 1.14."""
    for model in fused_models(trainer_or_model):
        yield model, "forward"
    if isinstance(trainer_or_model, nn.Module):
        return
    for name in {name for kind in type(trainer_or_model).__mro__ for name in vars(kind)}:
        method = inspect.getattr_static(type(trainer_or_model), name)
        if inspect.isfunction(method) and KERNEL in inspect.unwrap(method).__code__.co_names:
            yield trainer_or_model, name


def fused_outputs(model: nn.Module) -> tuple[str, ...]:
    """The per-token fields that a fused LM head was asked for at construction; none where that cannot be read."""
    found = (closed_over(function, "outputs") for function in chain(vars(model)["forward"]))
    return next((tuple(outputs) for outputs in found if outputs is not None), ())
