"""Whether arithmetic still is what it was: for whatever the lists of this package do not name."""

from __future__ import annotations

import torch

_SIZE = 4


def arithmetic() -> bytes:
    """The bits of a small float64 computation of every operation that the definitions are made of, and its gradient."""
    x = torch.linspace(-1.5, 2.0, _SIZE * _SIZE, dtype=torch.float64).view(_SIZE, _SIZE).requires_grad_()
    z = torch.tanh(x @ x.T / 3.0) * 3.0
    logps = torch.log_softmax(z, -1)
    p = torch.softmax(z, -1)
    ids = torch.arange(_SIZE).unsqueeze(-1)
    picked = logps.gather(-1, ids).squeeze(-1)
    ratio = torch.exp(picked - picked.detach().flip(0))
    clipped = torch.min(ratio, torch.clamp(ratio, 0.8, 1.2))
    rest = torch.logsumexp(z, -1) + (p * logps).sum(-1) + torch.sigmoid(picked) + torch.nn.functional.softplus(picked)
    mixed = (
        torch.where(ratio > 1, clipped, rest).mean()
        + torch.log1p(p).sum()
        + torch.bmm(p[None], z[None]).abs().sqrt().sum()
    )
    (gradient,) = torch.autograd.grad(mixed, x)
    narrow = z.detach().to(torch.bfloat16).float() + z.detach().to(torch.float16).float()
    product = torch.nn.functional.linear(narrow, narrow).double()
    return torch.cat([mixed.detach().view(1), gradient.flatten(), product.flatten()]).numpy().tobytes()
