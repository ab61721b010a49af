"""The autograd function behind `narrow_products` where all logits stay for the backward: one product each, in bfloat16.

The statistics of `parity.fixes.chunked`, in powers of two: with `y = k raw - log2(sum of the others' e^z)`, where
`e^z = 2^(k raw)`, the distribution of the others is `r = 2^y`. On a CPU `exp2` takes a third of the time of `exp`, and
factors of a row go into its exponent instead of a pass of their own. The gradient of the logits takes their place.
"""

import contextlib
import math
import struct
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from parity.fixes.chunked import (
    NEGLIGIBLE,
    Buffers,
    Settings,
    blocks,
    keeps_graph,
    logits_tile,
    once,
    scored,
    spread,
    statistics_dtype,
    widened,
)


class WholeLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, rows: Tensor | None, s: Settings
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        count, column, buffers, factor = ids.shape[0], ids.unsqueeze(1), Buffers(), _factor(s)
        found = torch.empty(4, count, 1, dtype=s.tile)
        sums, weighted, tops, target = found
        with _no_autocast():
            logits = scored(hidden, rows).to(s.operand) @ weight.to(s.operand).t()
            for block in blocks(count, s.token_block):
                tile, _ = _scaled(logits[block], bias, s, buffers, False)
                torch.gather(tile, 1, column[block], out=target[block])
                tile.scatter_(1, column[block], -math.inf)
                top = torch.amax(tile, 1, keepdim=True, out=tops[block]).nan_to_num_(math.nan, math.inf, 0.0)
                if s.entropy:  # exactly 0 at the top: the terms of the entropy may be tiny
                    tile.sub_(top).mul_(factor)
                    exps = torch.exp2(tile, out=buffers.take("exps", tuple(tile.shape), tile, s.tile))
                    torch.sum(tile.clamp_(min=NEGLIGIBLE).mul_(exps), 1, keepdim=True, out=weighted[block])
                else:
                    offset = top.mul_(-factor)
                    exps = torch.add(offset, tile, alpha=factor, out=tile).exp2_()
                torch.sum(exps, 1, keepdim=True, out=sums[block])
        sums, weighted, tops, target = found.to(statistics_dtype(hidden.device)).squeeze(2)
        bits = sums.log2()  # -inf where there is no other token at all
        others_log2 = torch.add(bits, tops, alpha=factor if s.entropy else -1.0)
        delta = torch.add(others_log2, target, alpha=-factor).mul_(math.log(2))
        logps = spread(0.0 - softplus(delta, 1.0, 40.0), rows, hidden.shape[0], s.result)
        entropy = others = None
        if s.entropy:
            bounded = delta.clamp(NEGLIGIBLE, -NEGLIGIBLE)
            bits.masked_fill_(sums == 0.0, 0.0)
            sums.masked_fill_(sums == 0.0, 1.0)
            others = (bits - weighted / sums).mul_(math.log(2))  # entropy given that the chosen token is not drawn
            p, q = torch.sigmoid(-bounded), torch.sigmoid(bounded)
            entropy = p * softplus(bounded, 1.0, 40.0) + q * (softplus(-bounded, 1.0, 40.0) + others)
        ctx.settings, ctx.rows = s, rows
        of_entropy = (entropy, others, tops, bits) if s.entropy else ()
        ctx.save_for_backward(hidden, weight, bias, column, others_log2, delta, logits, *of_entropy)
        return logps, None if entropy is None else spread(entropy, rows, hidden.shape[0], s.result)

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        return once(_backward, ctx, grad_logps, grad_entropy)


def _backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, column, others_log2, delta, logits, *of_entropy = ctx.saved_tensors
    s, rows, needs = ctx.settings, ctx.rows, ctx.needs_input_grad
    if grad_logps is None and grad_entropy is None:
        return (None,) * 6
    # dlogits[j] = 2^y[j] * (constant + linear * y[j]) for the others, `at_target` for the chosen token.
    q = torch.sigmoid(delta).mul_(s.logit_scale / s.temperature)
    at_target = torch.zeros_like(q) if grad_logps is None else scored(grad_logps.reshape(-1), rows) * q
    constant = linear = sign = None
    if grad_entropy is not None:
        g = scored(grad_entropy.reshape(-1), rows) * q
        entropy, others, tops, bits = of_entropy
        bounded = delta.clamp(NEGLIGIBLE, -NEGLIGIBLE)
        linear = -g * math.log(2)
        constant = -at_target - g * (entropy - softplus(-bounded, 1.0, 40.0)) - linear * bits
        at_target = at_target - g * torch.sigmoid(-bounded) * (others - bounded)
    # The CPU's bfloat16 units take subnormal numbers for 0, so dlogits are scaled by a power of two.
    size = at_target.abs() if constant is None else torch.cat([at_target, constant, linear]).abs_()
    exponent = min(max(10 - math.frexp(float(size.amax()) if size.numel() else 0.0)[1], -100), 100)
    unit = 2.0**exponent
    if constant is None:  # a row's factor goes into its exponent, its sign to the other factor of the products
        sign, unit = at_target.sign().to(s.operand).unsqueeze(1), -unit
        offset = (-others_log2).clamp_(max=1e30).add_(size.log2()).add_(exponent)  # no other token: log2(0) decides
        at_target, offset = (x.unsqueeze(1).to(s.tile) for x in (size * unit, offset))
    else:
        scale = unit * (-bits).exp2_()
        found = at_target * unit, constant * scale, linear * scale, tops
        at_target, constant, linear, tops = (x.unsqueeze(1).to(s.tile) for x in found)
    buffers, factor = Buffers(), _factor(s)
    into = torch.empty_like(logits) if keeps_graph() else logits
    grad_bias = torch.zeros(weight.shape[0], dtype=s.tile) if bias is not None and needs[2] else None
    grad_hidden = grad_weight = tile = None
    with _no_autocast():
        for block in blocks(column.shape[0], s.token_block):
            tile, sech2 = _scaled(logits[block], bias, s, buffers, True)
            if constant is None or linear is None:
                torch.add(offset[block], tile, alpha=factor, out=tile).exp2_()
            else:
                tile.sub_(tops[block]).mul_(factor).clamp_(min=NEGLIGIBLE)
                line = (tile * linear[block]).add_(constant[block])
                tile.exp2_().mul_(line)
            tile.scatter_(1, column[block], at_target[block])
            if sech2 is not None:
                tile.mul_(sech2)
            if grad_bias is not None:
                grad_bias += (tile if sign is None else tile * sign[block]).sum(0)
            into[block].copy_(tile)
        del buffers, tile  # so that the peak is that of logits and gradients
        if needs[1]:
            picked = scored(hidden, rows).to(s.operand)
            grad_hidden = picked if sign is None else picked * sign
            grad_weight = _quotient(into.t(), grad_hidden, unit, weight.dtype)
        if needs[0]:
            out = None if sign is None else grad_hidden  # in the memory of the other factor
            grad_hidden = _quotient(into, weight.to(s.operand), unit, hidden.dtype, out)
            if sign is not None:
                grad_hidden.mul_(sign)
            if rows is not None:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden)
    grad_bias = None if grad_bias is None or bias is None else (grad_bias / unit).to(bias.dtype)
    return grad_hidden if needs[0] else None, grad_weight, grad_bias, None, None, None


def _no_autocast() -> contextlib.AbstractContextManager[None]:
    """Nothing to enter where autocast is off: entering takes as long as a small tensor's sum."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()


def _factor(s: Settings) -> float:
    """The float32 number k with e^z = 2^(k x), of what `_scaled` gives."""
    scale = s.logit_scale / s.temperature if s.softcap is None else 1.0
    return float(struct.unpack("f", struct.pack("f", scale / math.log(2)))[0])


def _scaled(
    raw: Tensor, bias: Tensor | None, s: Settings, buffers: Buffers, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows of products in float32 with their bias; under a softcap their logits, and the softcap's derivative."""
    tile = widened(raw, bias, s, buffers)
    return (tile, None) if s.softcap is None else logits_tile(tile, s, slope, False)


def _quotient(a: Tensor, b: Tensor, unit: float, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`a @ b / unit`: divided within the product, unless that would take small results for 0."""
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    if dtype == a.dtype and 2.0**-32 <= abs(unit) <= 2.0**32:
        return torch.addmm(out, a, b, beta=0, alpha=1 / unit, out=out)
    return torch.mm(a, b, out=out).to(dtype).div_(unit)
