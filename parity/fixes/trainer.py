"""`apply(trainer)`: install all fixes that this trainer needs; each says what it did, or why nothing."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parity.fixes import kernel, patches, wiring
from parity.fixes.patch import Patch


@dataclass(frozen=True)
class Applied(contextlib.AbstractContextManager["Applied"]):
    """What `apply` did, one `Patch` a fix. Truth value: whether anything changed; leaving the block undoes it."""

    patches: tuple[Patch, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """Everything that was changed, over all fixes."""
        return tuple(name for patch in self.patches for name in patch.changed)

    def __getitem__(self, name: str) -> Patch:
        return {patch.name: patch for patch in self.patches}[name]

    def __iter__(self) -> Iterator[Patch]:
        return iter(self.patches)

    def __bool__(self) -> bool:
        return bool(self.changed)

    def __str__(self) -> str:
        return "\n".join(map(str, self.patches))

    def undo(self) -> None:
        """Takes everything back, in reverse order; a second call does nothing."""
        for patch in reversed(self.patches):
            patch.undo()

    def __exit__(self, *_: object) -> None:
        self.undo()


def apply(trainer: Any) -> Applied:
    """Puts in place what `trainer` needs of `parity.fixes`; call it after construction, before `trainer.train()`.

        print(apply(trainer))          # from here on; .undo() takes it back
        with apply(trainer): trainer.train()

    The fixes are those of `parity.fixes.patches`, then the kernel and the fused loss. Each decides from the trainer's code or by
    trying it; one with nothing to repair gives its reason. If one of them raises, those before it are undone. All hold for this
    trainer and its models alone; what two trainers share stays until both are undone. A TypeError where `trainer` has no model.
    """
    if getattr(trainer, "model", None) is None:
        raise TypeError(f"apply: {type(trainer).__name__} has no model: a trainer is expected, after construction")
    fixes: list[Callable[[Any], Patch]] = [
        patches.require_input_grads,
        patches.divide_by_accumulation,
        patches.average_over_window,
        patches.exchange_alpha,
        patches.mask_padded_log_probs,
        patches.scale_logits,
        patches.move_padding_right,
        patches.merge_into_copies,
        _keep_checkpointing,
        patches.use_model_logits,
        kernel.use_selective_log_probs,
        wiring.use_fused_policy_loss,
    ]
    with contextlib.ExitStack() as applied:
        done = tuple(applied.enter_context(fix(trainer)) for fix in fixes)
        applied.pop_all()
    return Applied(done)


def _keep_checkpointing(trainer: Any) -> Patch:
    args = getattr(trainer, "args", None)
    planned = [getattr(args, f"{kind}_checkpointing", False) for kind in ("gradient", "activation")]
    switched_on = any(getattr(m, "gradient_checkpointing", False) for m in trainer.model.modules())
    if not any(planned) and not switched_on:
        return Patch("keep_gradient_checkpointing", reason="gradient checkpointing is off")
    return patches.keep_gradient_checkpointing(trainer)
