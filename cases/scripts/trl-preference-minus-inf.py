# trl 1.16.0: log-probs of completions by CPOTrainer and ORPOTrainer are NaN where token 0 is banned (logit -inf)
# an ignored label is read as token 0, whose log-prob is multiplied by 0, and -inf·0 is NaN: at every prompt token.
import torch
from trl.experimental.cpo import CPOTrainer

torch.manual_seed(0)
logits, labels = torch.randn(2, 4, 7), torch.tensor([[-100, -100, 3, 4], [-100, -100, 5, 2]])
logits[..., 0] = -torch.inf
found = CPOTrainer.get_batch_logps(logits, labels)
right = logits.double().log_softmax(-1)[:, 1:3].gather(-1, labels[:, 2:, None]).sum((1, 2))
print("| log-prob of completion | TRL | definition |\n|---|---|---|")
for number in range(2):
    print(f"| {number + 1} | {float(found[number]):.6g} | {float(right[number]):.6g} |")
raise SystemExit(int(not torch.allclose(found.double(), right, atol=1e-4)))
