# TRL 1.13 (below 1.15): SFT with use_liger_kernel=True and loss_type="dft" trains on plain cross entropy
# compute_loss takes Liger's fused cross entropy whatever loss_type says, without a word.
from setup_liger_trainer import LIGER, compared, steps
from setup_tiny import PAIRS, tiny
from trl import SFTConfig, SFTTrainer

rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
found, right = (
    steps(SFTTrainer, SFTConfig, rows, loss_type="dft", models={"model": tiny()}, **way) for way in (LIGER, {})
)
raise SystemExit(compared(found, right, "DFT"))
