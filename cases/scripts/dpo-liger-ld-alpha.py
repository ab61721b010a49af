# TRL 1.13 (below 1.15): DPO with use_liger_kernel=True ignores ld_alpha
# the fused loss sums whole completions, and _compute_loss_liger neither refuses nor warns.
from setup_liger_trainer import LIGER, compared, steps
from setup_tiny import PAIRS, tiny
from trl import DPOConfig, DPOTrainer

found, right = (
    steps(DPOTrainer, DPOConfig, PAIRS, ld_alpha=0.4, models={"model": tiny(0), "ref_model": tiny(1)}, **way)
    for way in (LIGER, {})
)
raise SystemExit(compared(found, right, "ld_alpha=0.4"))
