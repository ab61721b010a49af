# TRL 1.16: online DPO cuts a prompt that is within max_length, when another row of its batch has a longer completion
# "If the sequence exceeds this limit, the leftmost tokens will be truncated": what is compared with it is the padded batch.
import torch
from setup_online import online
from setup_tiny import tiny

torch.manual_seed(0)
trainer = online(tiny(), tiny(), max_length=10, max_new_tokens=8)
policy = trainer.model.eval()


def scored(width):
    """The log-prob of a completion of two tokens behind a prompt of eight, padded to a width."""
    prompt, completion = torch.arange(2, 10)[None], torch.tensor([[10, 11] + [0] * (width - 2)])
    mask = (torch.arange(width) < 2).long()[None]
    with torch.no_grad():
        found = trainer._forward(policy, prompt, torch.ones_like(prompt), completion, mask)
    return float((found * mask).sum())


ids = torch.arange(2, 12)[None]
with torch.no_grad():
    table = torch.log_softmax(policy(input_ids=ids).logits.double(), -1)
right = float(table[0, 7:9].gather(-1, ids[0, 8:10, None]).sum())
print("| ten tokens, max_length 10 | log-prob of the completion |\n|---|---|")
print(f"| by the model | {right:.6g} |")
print(f"| alone | {scored(2):.6g} |\n| beside a completion of eight tokens | {scored(8):.6g} |")
raise SystemExit(int(abs(scored(8) - right) > 1e-3))
