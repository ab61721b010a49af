"""GOLD's hybrid ULD loss: `matched_loss` is logged of each micro-batch's last sequence, times the micro-batches of a step.

The same four rows in one batch and accumulated: the logged value, and the mean over the rows.
"""

import datasets
import torch
import transformers
from setup_distilled import made, tokenized
from trl.experimental.gold import GOLDConfig, GOLDTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
ROWS = [tokenized([2, 3], [4 + i, 5 + i, 6 + i, 7]) for i in range(4)]


def logged(batch, accumulation):
    hybrid = dict(use_uld_loss=True, uld_use_hybrid_loss=True, use_extended_uld=False, lmbda=0.0)
    trainer = made(GOLDTrainer, GOLDConfig, ROWS, batch, accumulation, **hybrid)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.args.logging_strategy, trainer.args.logging_steps, trainer.state.logging_steps = "steps", 1, 1
    with torch.no_grad():
        trainer.teacher_model.lm_head.weight.mul_(30)
    seen, each = [], trainer.uld_loss_fn._compute_hybrid_uld_loss

    def watched(*given):
        out = each(*given)
        seen.append(trainer.uld_loss_fn.last_matched_loss.item())
        return out

    trainer.uld_loss_fn._compute_hybrid_uld_loss = watched
    trainer.train()
    found = next(row["matched_loss"] for row in trainer.state.log_history if "matched_loss" in row)
    return found, sum(seen) / len(seen)


bad = False
print("| micro-batches | matched_loss, logged | mean over the rows |\n|---|---|---|")
for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
    found, right = logged(batch, accumulation)
    bad |= abs(found - right) > 1e-3
    print(f"| {accumulation} of {batch} | {found:.4f} | {right:.4f} |")
raise SystemExit(int(bad))
