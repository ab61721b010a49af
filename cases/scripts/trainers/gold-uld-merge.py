"""GOLD's ULD loss, default `uld_token_merge_strategy="observed"`: the probability it multiplies in for a later token of a
merged group. The teacher equals the student and the student's own tokens are grouped two by two."""

import torch
from setup_tiny import tiny, uld
from trl.experimental.gold.gold_trainer import ULDLoss

model = tiny().double()
with torch.no_grad():
    for p in model.parameters():
        p.mul_(8 if p.dim() > 1 else 1)
ids = torch.tensor([[2, 3, 7, 9, 11, 13, 1]])
labels = ids.clone()
labels[:, :2] = -100
start, size = 2, 5
logits = model(ids).logits.detach()
config = uld(uld_token_merge_strategy="observed")
loss = ULDLoss(config)
groups = [[0, 1], [2, 3]]
seen = []
merge = loss._merge_probabilities_with_alignment_groups


def watched(probs, groups, token_ids=None):
    out = merge(probs, groups, token_ids)
    seen.append((probs, groups, token_ids, out))
    return out


loss._merge_probabilities_with_alignment_groups = watched
offsets = torch.tensor([[[0, 0], [0, 0], [0, 2], [2, 4], [4, 6], [6, 8], [8, 8]]])
coarse = torch.tensor([[[0, 0], [0, 0], [0, 4], [4, 8], [8, 8]]])
other = torch.tensor([[2, 3, 7, 9, 1]])
other_labels = other.clone()
other_labels[:, :2] = -100
loss(
    logits,
    model(other).logits.detach(),
    labels,
    other_labels,
    ids,
    other,
    student_byte_offsets=offsets,
    teacher_byte_offsets=coarse,
)
probs, groups, tokens, out = seen[0]
right = logits.softmax(-1)[0]
bad = 0
print("| tokens of the group | factor used | p(second token given what precedes it), by the model |\n|---|---|---|")
for i, group in enumerate(groups):
    if len(group) < 2:
        continue
    used = float(out[i].sum() / probs[group[0]].sum())
    true = float(right[start + group[1] - 1, ids[0, start + group[1]]])
    bad |= abs(used / true - 1) > 1e-3
    print(f"| {[tokens[j] for j in group]} | {used:.6g} | {true:.6g} |")
raise SystemExit(int(bad))
