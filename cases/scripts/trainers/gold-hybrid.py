"""GOLD's hybrid ULD loss: the gradient where the student's distribution is the teacher's, and the matched loss that is logged.

Two tokenizers share a part of their tokens. The divergence of what they share is taken of probabilities that do not sum to 1,
without the term Σp - Σq that such a divergence has; with beta 0 or 1 equality is then no minimum. The trainer logs the loss of
the last sequence of a micro-batch as that of all.
"""

import types

import torch
from setup_tiny import uld
from trl.experimental.gold.gold_trainer import ULDLoss

V = 12


def tokenizer(*names):
    return types.SimpleNamespace(get_vocab=lambda: {name: i for i, name in enumerate(names)})


def hybrid(beta):
    shared = [f"shared {i}" for i in range(V - 4)]
    config = uld(use_extended_uld=False, uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=True, beta=beta)
    ours, theirs = (tokenizer(*shared, *(f"{whose} {i}" for i in range(4))) for whose in ("student", "teacher"))
    return ULDLoss(config, ours, theirs, device=torch.device("cpu"))


def call(loss, student, teacher):
    ids = torch.randint(0, V, student.shape[:2])
    labels = ids.clone()
    labels[:, :2] = -100
    return loss(student, teacher, labels, labels, ids, ids)


torch.manual_seed(0)
teacher = torch.randn(2, 7, V, dtype=torch.float64)
bad = False
print(
    "| beta | largest gradient where student = teacher | loss there | loss after a step of 5 against the gradient |\n|---|---|---|---|"
)
for beta in (0.0, 0.5, 1.0):
    student = teacher.clone().requires_grad_()
    at = call(hybrid(beta), student, teacher)
    at.backward()
    size = float(student.grad[:, 1:-1].abs().max())
    after = call(hybrid(beta), student.detach() - 5.0 * student.grad, teacher)
    print(f"| {beta} | {size:.3g} | {float(at.detach()):.3g} | {float(after.detach()):.3g} |")
    bad |= size > 1e-6
print("\n| matched loss of sequence 1 | of sequence 2 | mean | what the trainer logs |\n|---|---|---|---|")
student = torch.randn(2, 7, V, dtype=torch.float64)
alone = []
for i in range(2):
    one = hybrid(0.5)
    call(one, student[i : i + 1], teacher[i : i + 1])
    alone.append(float(one.last_matched_loss))
both = hybrid(0.5)
call(both, student, teacher)
logged = float(both.last_matched_loss)
print(f"| {alone[0]:.4f} | {alone[1]:.4f} | {sum(alone) / 2:.4f} | {logged:.4f} |")
bad |= abs(logged - sum(alone) / 2) > 1e-6
raise SystemExit(int(bad))
