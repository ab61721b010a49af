"""Whether arithmetic still is what it was: for whatever the lists of this package do not name."""

import torch

_X = torch.linspace(-1.5, 2.0, 16, dtype=torch.float64).view(4, 4)
_IDS = torch.arange(4).unsqueeze(-1)


def arithmetic() -> bytes:
    """The bits of a small float64 computation of every operation that the definitions are made of, and of a gradient."""
    x = _X.detach().requires_grad_()
    z = torch.tanh(x @ x.T)
    total = torch.log_softmax(z, -1).gather(-1, _IDS).exp().mean() + torch.logsumexp(z, -1).sum()
    (gradient,) = torch.autograd.grad(total, x)
    z, total = z.detach(), total.detach()
    p, picked = torch.softmax(z, -1), z.gather(-1, _IDS).squeeze(-1)
    rest = (
        torch.sigmoid(picked) + torch.nn.functional.softplus(picked) + torch.min(picked, torch.clamp(picked, 0.8, 1.2))
    )
    mixed = (
        torch.where(picked > 1, picked, rest).mean()
        + torch.log1p(p).sum()
        + torch.bmm(p[None], z[None]).abs().sqrt().sum()
    )
    narrow = z.to(torch.bfloat16).float() + z.to(torch.float16).float()
    product = torch.nn.functional.linear(narrow, narrow).double()
    return torch.cat([total.view(1), mixed.view(1), gradient.flatten(), product.flatten()]).numpy().tobytes()
