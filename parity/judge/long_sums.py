"""How far float32 drifts from a long sum: each addition rounds to a unit in the last place of what is summed so far."""

import torch

LANES = 16
"""In which a vector unit adds along the last dimension; along another one it adds in turn, in one."""
MANY = 64
"""Terms of a sum of gradients from which on it drifts."""
TIE = 2.0**-12
"""Logits that differ by less count as equal: rounded in 16 bits they may be."""


def drift(terms: torch.Tensor, dim: int, lanes: torch.Tensor, stretch: torch.Tensor) -> torch.Tensor:
    """float32's Σ terms along `dim`, added in turn in so many lanes, minus the sum; the dimension is kept.

    The k-th addition is off by round(x/U)·U - x, U the unit in the last place of the k-th partial sum: random terms walk,
    equal ones round alike at every addition (logits that a softcap saturates, rows of the head that pad it), and those below
    U/2 are lost. `lanes` and `stretch` are (R, 1, …); the terms are multiplied by `stretch`, so that replicas differ.
    """
    if dim % terms.dim() == 0:
        return drift(terms.unsqueeze(0), dim % terms.dim() + 1, lanes[:1], stretch[:1]).squeeze(0)
    x = terms.mul(stretch).float().movedim(dim, -1)
    off = x.new_empty(x.shape[:-1], dtype=torch.float64)
    for n in (1, LANES):
        chosen = (lanes == n).reshape(-1)
        if bool(chosen.any()):
            part = x[chosen]
            if extra := -part.shape[-1] % n:
                part = torch.nn.functional.pad(part, (0, extra))
            part = part.unflatten(-1, (-1, n))
            off[chosen] = _additions(part).sum((-2, -1), dtype=torch.float64)
    return off.unsqueeze(-1).movedim(-1, dim) / stretch


def _additions(x: torch.Tensor) -> torch.Tensor:
    """The rounding error of each addition to the running sums along dimension -2 (Knuth's TwoSum)."""
    before = x.cumsum(-2).roll(1, -2)
    before[..., :1, :] = 0.0
    total = before + x
    added = total - before
    return (total - added).sub_(before).add_(added.sub_(x))


def mass_of_maxima(logs: torch.Tensor, dim: int) -> torch.Tensor:
    """Σ exp(logs) while an entry is the largest so far along `dim`, 0 where it never is; ties are all the largest.

    What an online log-sum-exp, which rescales its sum when the maximum grows, has added up with this maximum.
    """
    logs = logs.movedim(dim, -1).contiguous()
    largest = logs.cummax(-1).values
    last = torch.searchsorted(largest, logs + TIE, right=True).sub_(1).clamp_(min=0)
    mass = logs.exp().cumsum(-1).gather(-1, last)
    return torch.where(logs >= largest - TIE, mass, 0.0).movedim(-1, dim)
