# TRL 1.13 (0.29 to below 1.15): DPO with use_liger_kernel=True ignores use_weighting
# LigerFusedLinearDPOLoss knows no weights, and _compute_loss_liger neither hands them over nor refuses.
from setup_liger_trainer import LIGER, compared, steps
from setup_tiny import PAIRS, tiny
from trl import DPOConfig, DPOTrainer


def run(way):
    models = {"model": tiny(0), "ref_model": tiny(1)}
    for model in models.values():
        model.lm_head.weight.data *= 20  # completions that the model finds unlikely: small weights
    return steps(DPOTrainer, DPOConfig, PAIRS, use_weighting=True, models=models, **way)


found, right = run(LIGER), run({})
raise SystemExit(compared(found, right, "weighted"))
