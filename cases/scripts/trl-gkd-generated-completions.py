# TRL 1.16: GKDTrainer divides the loss of generated completions by the token count of the dataset's
# Trainer counts labels before training_step exchanges the completions (lmbda, 0.5 by default; here 1).
from setup_distilled import said, trained
from trl.experimental.gkd import GKDConfig, GKDTrainer

rows = [said([2, 3], [4] * 16)] * 2
found, right, tokens = trained(GKDTrainer, GKDConfig, rows, 2, 1, lmbda=1.0)
print("| tokens of the dataset | generated | loss | mean of the JSD over the generated |\n|---|---|---|---|")
print(f"| 32 | {tokens} | {found:.4g} | {right:.4g} |")
raise SystemExit(int(abs(found / right - 1) > 1e-3))
