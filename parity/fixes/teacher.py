"""`mask_teacher_padding`: leave padding out of the divergence to a teacher server."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parity.fixes.override import overridden, override
from parity.fixes.patch import ALREADY, Patch

NAME = "mask_teacher_padding"
SERVER_LOSS = "_compute_server_sparse_top_1_divergence_loss"
_DISTILLERS = (
    ("trl.experimental.distillation.distillation_trainer", "DistillationTrainer"),
    ("trl.experimental.server_distillation.server_distillation_trainer", "ServerDistillationTrainer"),
    ("trl.experimental.iw_opd.iw_opd_trainer", "IWOPDTrainer"),
)


def mask_teacher_padding(trainer: Any = None) -> Patch:
    """Distillation from a teacher server has finite gradients when completions are ragged, zero at padding.

    The server path pads shorter completions with log-probs of -inf, and the reverse-KL and generalised-JSD losses
    (beta > 0) of trl 1.1.0 to 1.3.0 take them in: the loss is finite, its gradient NaN at the first step. Here the
    sentinel becomes 0 where `labels == -100` before the divergence is formed, so those positions get no gradient. A
    value missing at a position that is required still raises, as before. Nothing is done where a ragged batch already
    has finite gradients (trl 1.4.0 on): tried on two tokens.

    For this trainer alone; without one, for every trainer of the classes that TRL has.
    """
    changed: list[str] = []
    reasons: list[str] = []
    undo: list[Callable[[], object]] = []
    for place, owner in _distillers() if trainer is None else [(type(trainer).__name__, trainer)]:
        kind = owner if isinstance(owner, type) else type(owner)
        if not hasattr(owner, SERVER_LOSS):
            continue
        change = overridden(owner, SERVER_LOSS, NAME)
        if change is not None:
            reasons.append(ALREADY)
            undo += change.hold(trainer)
            continue
        try:
            finite = _ragged_gradient_is_finite(kind)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reasons.append(f"{kind.__name__} could not be tried ({type(error).__name__}: {error})")
            continue
        if finite:
            reasons.append(f"{kind.__name__} masks the padding itself")
            continue
        change = override(owner, SERVER_LOSS, NAME, _masking(inspect.signature(getattr(kind, SERVER_LOSS))))
        changed.append(f"{place}.{SERVER_LOSS}")
        undo += change.hold(trainer)
    reason = None if changed else "; ".join(reasons) or "there is no teacher-server loss"
    return Patch(NAME, tuple(changed), reason=reason, _undo=undo)


def _distillers() -> Iterator[tuple[str, type]]:
    """The trainers of the installed TRL that may have such a loss, each with its full name."""
    for module_name, class_name in _DISTILLERS:
        try:
            yield f"{module_name}.{class_name}", getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError):
            continue


def _masking(signature: inspect.Signature) -> Callable[..., Tensor]:
    def masked(self: Any, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(self, *args, **kwargs)
        padding = call.arguments["labels"] == -100
        teacher = dict(call.arguments["teacher_result"])
        teacher["actual_logprobs"] = teacher["actual_logprobs"].masked_fill(padding, 0.0)
        teacher["topk_logprobs"] = teacher["topk_logprobs"].masked_fill(padding.unsqueeze(-1), 0.0)
        call.arguments["teacher_result"] = teacher
        return original(*call.args[1:], **call.kwargs)

    return masked


def _ragged_gradient_is_finite(trainer: type) -> bool:
    """The gradient of one real and one padded position, reverse KL, on an instance that was never constructed."""
    instance: Any = object.__new__(trainer)
    instance.beta, instance.loss_add_tail, instance.loss_top_k = 1.0, True, 1
    instance.reverse_kl_top_1_mode, instance.temperature = "sampled", 1.0
    logits = torch.tensor([[[0.5, 0.0, -0.5]] * 2], requires_grad=True)
    ids = torch.tensor([[1, 0]])
    teacher = {
        "actual_logprobs": torch.tensor([[-1.0, -torch.inf]]),
        "topk_logprobs": torch.tensor([[[-0.5], [-torch.inf]]]),
        "topk_token_ids": torch.tensor([[[0], [0]]]),
    }
    loss = getattr(instance, SERVER_LOSS)(
        teacher_result=teacher,
        student_log_probs=logits.log_softmax(-1),
        completion_tokens=ids,
        labels=torch.tensor([[1, -100]]),
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    return bool(gradient.isfinite().all())
