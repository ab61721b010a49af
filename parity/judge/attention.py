"""Attention in a definition, in the form of kernels whose backward pass makes the weights again."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from parity.judge.monte_carlo import RUNNING
from parity.judge.operations import NO_DIGIT, is_floating
from parity.judge.stages import stored

SOFTMAX = (torch.softmax, F.softmax, torch.Tensor.softmax)
PRODUCTS = (torch.matmul, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm)
Again = Callable[[torch.Tensor], torch.Tensor]


class WeightsAgain(TorchFunctionMode):
    """Within it softmax(s)·v is what a kernel computes that keeps its output O and L = log Σ exp s alone (Dao et al. 2022).

    Backward it makes the weights again, p = exp(s' - L), and takes Σ p·dP as Σ dO·O from the output as it was stored. s' is
    another product than the s of the forward pass, so that p·(dP - Σ dO·O) is 0 no longer where exact arithmetic has 0, nor
    p = 1 for a single key. From |L| = 2¹⁸ on p would have no right digit: it is the forward pass's. Products take dS as stored.
    Between softmax and product may be what is linear in the weights: a cast, a mask, a slice.

    Attributes:
        found: whether there was such a product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with self:
                return _written_out(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is torch.Tensor.__setitem__:
            vars(args[0]).pop("made", None)
        if not is_floating(out):
            return out
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if any(out is a for a in given):  # in place, or nothing to do
            if func.__name__[-1] == "_" != func.__name__[-2]:
                vars(out).pop("made", None)
            return out
        if func in PRODUCTS or any("made" in vars(a) for a in given):
            vars(out)["made"] = func, args, kwargs
        weighed = [a for a in given if "weights" in vars(a)]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if func in SOFTMAX and dim in (-1, out.dim() - 1):
            vars(out)["weights"] = args[0], lambda weights: weights
        elif len(weighed) == 1:
            scores, before = vars(weighed[0])["weights"]

            def then(weights: torch.Tensor) -> torch.Tensor:
                other = before(weights)
                exchanged = tree_map(lambda a: other if a is weighed[0] else a, (args, kwargs))
                return func(*exchanged[0], **exchanged[1])

            if func not in PRODUCTS:
                vars(out)["weights"] = scores, then
            elif out.shape[:-1] == scores.shape[:-1] and (RUNNING or _linear(then, scores, out)):
                self.found = True
                return self._product(out, scores, then)
        return out

    def _product(self, out: torch.Tensor, scores: torch.Tensor, product: Again) -> torch.Tensor:
        whole = scores.logsumexp(-1, keepdim=True).detach()
        far = whole.abs() >= NO_DIGIT
        z = torch.where(far, scores, _made_again(scores, {}))
        weights = torch.where(far, scores.softmax(-1), (z - whole).exp()).detach()
        moved = (z - z.detach()).nan_to_num()  # 0, also of -inf
        weights = weights * (1 + stored(moved, "use"))
        total = weights.sum(-1, keepdim=True)
        again = product(weights) - stored(out).detach() * (total - total.detach())
        return out.detach() + (again - again.detach())  # the forward pass has its own weights


def _linear(product: Again, scores: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a product is linear in the weights: half of them give half of it. Else Σ dO·O is not Σ p·dP."""
    with torch.no_grad():
        half, size = 2 * product(scores.softmax(-1) / 2), float(out.abs().nan_to_num().amax()) if out.numel() else 0.0
        return torch.allclose(half, out, 1e-6, 1e-9 * size, equal_nan=True)


def _made_again(x: torch.Tensor, seen: dict[int, torch.Tensor]) -> torch.Tensor:
    """x computed a second time from the operands of the last matrix products before it."""
    if "made" not in vars(x):
        return x
    if id(x) not in seen:
        func, args, kwargs = vars(x)["made"]
        if func not in PRODUCTS:
            again = lambda a: _made_again(a, seen) if isinstance(a, torch.Tensor) else a  # noqa: E731
            args, kwargs = tree_map(again, (args, kwargs))
        seen[id(x)] = func(*args, **kwargs)
    return seen[id(x)]


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention as its documentation has it; without dropout, which is random."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return torch.softmax(scores, -1) @ value
