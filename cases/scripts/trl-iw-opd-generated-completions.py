# TRL 1.16: IWOPDTrainer divides the loss of generated completions by the token count of the dataset's
# Trainer counts labels before _fill_buffer exchanges the completions (lmbda, 1 by default).
from setup_distilled import said, trained
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

rows = [said([2, 3], [4] * 16)] * 2
found, right, tokens = trained(IWOPDTrainer, IWOPDConfig, rows, 2, 1, distillation_objective="jsd", loss_top_k=0)
print("| tokens of the dataset | generated | loss | mean of the JSD over the generated |\n|---|---|---|---|")
print(f"| 32 | {tokens} | {found:.4g} | {right:.4g} |")
raise SystemExit(int(abs(found / right - 1) > 1e-3))
