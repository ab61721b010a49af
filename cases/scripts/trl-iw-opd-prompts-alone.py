# TRL 1.16: the loss of IWOPDTrainer is infinite on a dataset of prompts, which its collator documents
# Trainer counts labels before _fill_buffer generates completions (lmbda, 1 by default): there are none.
from setup_distilled import said, trained
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

rows = [said([2, 3], [])] * 2
found, right, tokens = trained(IWOPDTrainer, IWOPDConfig, rows, 2, 1, distillation_objective="jsd", loss_top_k=0)
print("| tokens of the dataset | generated | loss | mean of the JSD over the generated |\n|---|---|---|---|")
print(f"| 0 | {tokens} | {found:.4g} | {right:.4g} |")
raise SystemExit(int(abs(found / right - 1) > 1e-3))
