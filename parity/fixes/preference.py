"""`exchange_alpha`: DPO's alpha divergence with the α of the paper."""

from typing import Any

from parity.fixes.override import source_of
from parity.fixes.patch import ALREADY, Change, Patch

ALPHA, COEFFICIENT = "exchange_alpha", "f_alpha_divergence_coef"


def exchange_alpha(trainer: Any) -> Patch:
    """DPO's alpha divergence is (1 - u^-α)/α, u = π/π_ref, with the α of the config (f-DPO, arXiv 2309.16240, table 1).

    DPOTrainer (trl 0.29.0 to 1.16.0) computes (u^(α-1) - 1)/(α - 1): α and 1 - α are exchanged. Sets
    `trainer.f_alpha_divergence_coef` to 1 - α, for this trainer alone; its config stays. Nothing is done where the trainer has
    another divergence, α is 0.5, or its loss does not subtract 1 from α (its source is read).
    """
    kind = getattr(getattr(trainer, "args", None), "f_divergence_type", None)
    if getattr(kind, "value", kind) != "alpha_divergence" or not hasattr(trainer, COEFFICIENT):
        return Patch(ALPHA, reason="the trainer has no alpha divergence")
    if f"{COEFFICIENT} - 1.0" not in source_of(getattr(type(trainer), "_compute_loss", None)):
        return Patch(ALPHA, reason="its loss has α as the paper has it")
    held: Change | None = vars(trainer).get("_parity_alpha")
    if held is not None and held.active:
        return Patch(ALPHA, reason=ALREADY, _undo=held.hold(trainer))
    alpha = getattr(trainer, COEFFICIENT)
    if alpha == 0.5:
        return Patch(ALPHA, reason="α is 0.5, where the two are the same")
    change = Change(lambda: setattr(trainer, COEFFICIENT, alpha), lambda: delattr(trainer, "_parity_alpha"))
    setattr(trainer, COEFFICIENT, 1.0 - alpha)
    trainer._parity_alpha = change
    return Patch(ALPHA, changed=(f"trainer.{COEFFICIENT}",), _undo=change.hold(trainer))
