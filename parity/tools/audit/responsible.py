"""Where to repair a setting that is not honoured: in the kernel, in the trainer that calls it, or in both."""

from parity.tools.audit.verdicts import Answer

TRAINER, KERNEL, BOTH = "trainer: does not pass it", "kernel", "both: kernel lacks it, trainer does not pass it"
MISAPPLIES = "trainer: misapplies it"
LACKS = "kernel: lacks the parameter"
NONE = ("absent", "refused", "not run")
_ENGINES = {
    "trl.GRPOTrainer.liger": "liger.FusedLinearGRPOLoss",
    "trl.distillation_loss": "trl.ChunkedDivergenceFunction",
    "trl.distillation_loss_kernel": "trl.ChunkedDivergenceFunction",
}


def engine(implementation: str) -> str | None:
    """The bare kernel that a trainer's path calls, under its own id; None where there is none to call."""
    if implementation == "trl.GRPOTrainer.liger":
        try:
            import trl.trainer.grpo_trainer as module
        except ImportError:
            return None
        return _ENGINES[implementation] if hasattr(module, "LigerFusedLinearGRPOLoss") else None
    return _ENGINES.get(implementation)


def to_repair(one: Answer, kernel: Answer | None, reference: Answer | None) -> str:
    """Where to repair, decided by what the kernel makes of the same value when it is called directly.

    Nothing is to be repaired where the release has no such setting: its reference has none either.
    """
    if one.parameter is not None:
        return f"adapter: {one.parameter}"
    if one.answer in ("honoured", "not run"):
        return ""
    if one.answer in NONE and (one.role == "reference" or (reference is not None and reference.answer in NONE)):
        return ""
    if is_wired(one.implementation):
        return _wired(one, kernel)
    if one.answer == "absent":
        return "caller's" if one.probe.callers else LACKS
    return "trainer" if "Trainer" in one.implementation else KERNEL


def _wired(one: Answer, kernel: Answer | None) -> str:
    passed = one.reads and one.answer != "refused"
    if kernel is None:
        return "trainer, or the engine it brings along"
    if kernel.answer == "honoured" or (one.probe.callers and kernel.answer in ("absent", "not run")):
        return MISAPPLIES if passed else TRAINER
    if kernel.answer in ("absent", "not run"):
        return LACKS if passed else BOTH
    return KERNEL if passed else f"both: kernel {kernel.answer}, trainer does not pass it"


def is_wired(implementation: str) -> bool:
    """Whether a trainer's path through a kernel stands behind the id."""
    return implementation in _ENGINES
