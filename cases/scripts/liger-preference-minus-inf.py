# liger-kernel 0.8.5: DPO's loss is NaN where a label is ignored and token 0 is banned (logit -inf)
# an ignored label is read as token 0, whose log-prob is multiplied by 0, and -inf·0 is NaN: at every prompt token.
import torch
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

torch.manual_seed(0)
hidden, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
labels = torch.tensor([[-100, 3, 4], [-100, 5, 2]])
bias = torch.zeros(7)
bias[0] = -torch.inf
loss = LigerFusedLinearDPOLoss(compiled=False, use_ref_model=False)
found = float(loss(weight, hidden, labels, bias)[0])
logps = (hidden.double() @ weight.double().T + bias).log_softmax(-1)[:, 1:].gather(-1, labels[:, 1:, None]).sum((1, 2))
right = -float(torch.nn.functional.logsigmoid(0.1 * (logps[0] - logps[1])))
print(f"| DPO's loss | |\n|---|---|\n| Liger | {found:.6g} |\n| definition | {right:.6g} |")
raise SystemExit(int(not abs(found - right) < 1e-4))
