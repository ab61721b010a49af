# TRL 1.16: IWOPDTrainer divides by the label tokens of the window, counted once for each of its micro-batches
# The data loader hands out the whole window each time; lmbda is 0, so that nothing is generated.
from setup_distilled import said, trained
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

rows = [said([2, 3], [4, 5, 6, 7, 8]), said([9, 10, 11, 12], [13, 14])]
print("| batch x accumulation | loss of the window | mean of the JSD over its tokens |\n|---|---|---|")
wrong = []
for batch in (2, 1):
    found, right, _ = trained(
        IWOPDTrainer, IWOPDConfig, rows, batch, 2 // batch, lmbda=0.0, distillation_objective="jsd", loss_top_k=0
    )
    print(f"| {batch}x{2 // batch} | {found:.4g} | {right:.4g} |")
    wrong.append(abs(found / right - 1) > 1e-3)
raise SystemExit(int(any(wrong)))
