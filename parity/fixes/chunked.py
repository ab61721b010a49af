"""The autograd function behind `selective_log_probs`: one tile of logits at a time, kept or recomputed for the backward.

With `delta = logsumexp(z without id) - z[id]`, p = sigmoid(-delta) the probability of the chosen token, q = 1 - p, and
r the distribution of the others given that the chosen token is not drawn,

    logp = -softplus(delta)                   d logp / d z[id] = q        d logp / d z[j] = -q r[j]
    entropy = H(p, q) + q H(r)                d entropy / d z[j] = -p[j] (log p[j] + entropy)

where every term of the entropy is non-negative and, for the chosen token, `log p + entropy = q (H(r) - delta)`: nothing
cancels, however confident the model is. So the tiles collect statistics of the others only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Below this the exponential is 0 in every dtype; clamping to it keeps 0 * inf out of sums over masked entries.
NEGLIGIBLE = -1e4
_DOT_BLOCK = 256
_PARTS = 64
"""Parts of the hidden states' gradient that are added one by one; the sums of so many are added then."""


@dataclass(frozen=True)
class Settings:
    temperature: float
    softcap: float | None
    logit_scale: float
    entropy: bool
    vocab_block: int
    token_block: int
    operand: torch.dtype  # what hidden states and head are rounded to before they are multiplied
    tile: torch.dtype  # logits, softmax and accumulation
    result: torch.dtype  # log-probs and entropies
    keep: int = 0  # bytes of tiles that may stay for the backward

    @property
    def exponentials(self) -> bool:
        """Whether a kept tile holds e^x, all that the backward needs of it; with entropy or softcap the product."""
        return not self.entropy and self.softcap is None


class Buffers(dict[str, Tensor]):
    """Memory that all tiles of a call use in turn: on the CPU fresh pages cost more than what is written into them."""

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        if name not in self or self[name].numel() < size:
            self[name] = torch.empty(size, dtype=dtype, device=like.device)
        return self[name][:size].view(shape)


def precision(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    operand = torch.promote_types(hidden.dtype, weight.dtype)
    if bias is not None and bias.dtype == torch.float64:
        operand = torch.float64
    device = hidden.device.type
    if operand != torch.float64 and torch.is_autocast_enabled(device):
        operand = torch.get_autocast_dtype(device)
    return operand, torch.float64 if operand == torch.float64 else torch.float32


def statistics_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: a few numbers a token are cheap."""
    return torch.float32 if device.type == "mps" else torch.float64


def _rounds_dlogits(settings: Settings, device: torch.device) -> bool:
    # Tensor cores take both factors in 16 bits; elsewhere the product is done in the tile's dtype anyway.
    return settings.operand != settings.tile and device.type == "cuda"


def _to_reach(exponent: int, x: Tensor) -> Tensor:
    """For each entry of x >= 0 the power of two by which it comes to 2**(exponent - 1) up to 2**exponent."""
    shift = torch.where(x > 0, exponent - torch.frexp(x).exponent, 100).clamp(-100, 100)
    return torch.ldexp(torch.ones_like(x), shift)


def _operand(x: Tensor, settings: Settings, buffers: Buffers, name: str) -> Tensor:
    x = x.to(settings.operand)
    if x.is_cuda or x.dtype == settings.tile:
        return x
    return buffers.take(name, tuple(x.shape), x, settings.tile).copy_(x)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """`total += a @ b`; what `total` held before the `first` product does not count."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    else:
        torch.addmm(total.zero_() if first else total, a, b, out_dtype=total.dtype, out=total)


def blocks(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _raw_tile(h: Tensor, w: Tensor, bias: Tensor | None, s: Settings, out: Tensor | None) -> Tensor:
    """One tile of `hidden @ weight.T + bias`, in `out` or in memory of its own."""
    wide = h.dtype == s.tile
    tile = torch.mm(h, w.t(), out=out) if wide else torch.mm(h, w.t(), out_dtype=s.tile)
    return tile if bias is None else tile.add_(bias.to(s.tile))


def logits_tile(raw: Tensor, s: Settings, slope: bool, copied: bool) -> tuple[Tensor, Tensor | None]:
    """Its logits, and with a softcap their derivative `sech^2` (1 - tanh^2 would cancel near the cap).

    In place, unless `copied`.
    """
    factor = s.logit_scale / (s.temperature if s.softcap is None else s.softcap)
    tile = raw * factor if copied else raw if factor == 1.0 else raw.mul_(factor)
    if s.softcap is None:
        return tile, None
    sech2 = None
    if slope:
        decay = tile.abs().mul_(-2).exp_()
        sech2 = decay.mul(4).div_(decay.add_(1).square_())
    return tile.tanh_().mul_(s.softcap / s.temperature), sech2


def _chosen_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, s: Settings, out: Tensor) -> None:
    """Writes the chosen tokens' logits into `out`, in its dtype: one dot product a token, so precision is cheap."""
    z = (hidden.to(s.operand).to(out.dtype) * weight[ids].to(s.operand).to(out.dtype)).sum(1)
    if bias is not None:
        z += bias[ids].to(out.dtype)
    z *= s.logit_scale
    if s.softcap is not None:
        z = s.softcap * torch.tanh(z / s.softcap)
    out.copy_(z / s.temperature)


def _put_target(tile: Tensor, ids: Tensor, start: int, value: Tensor) -> None:
    """Writes `value`, one a row, over the chosen token of each row that has it in this tile."""
    local = ids - start
    inside = ((local >= 0) & (local < tile.shape[1])).unsqueeze(1)
    column = local.clamp(0, tile.shape[1] - 1).unsqueeze(1)
    tile.scatter_(1, column, torch.where(inside, value.to(tile.dtype), tile.gather(1, column)))


class ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        rows: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        count = ids.shape[0]
        # sum over the others of e^x, x = z - top
        total = torch.zeros(count, dtype=statistics_dtype(hidden.device), device=hidden.device)
        weighted, target = torch.zeros_like(total), torch.zeros_like(total)  # sum of e^x * x; z[id]
        top = torch.full_like(total, -math.inf)  # largest logit among the others
        kept: list[Tensor] = []
        tops: list[Tensor] = []  # what the exponentials of a kept tile were shifted by
        room = settings.keep if any(ctx.needs_input_grad[:3]) else 0
        buffers, banned = Buffers(), torch.full((1, 1), -math.inf, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for block in blocks(count, _DOT_BLOCK):
                picked = hidden[block if rows is None else rows[block]]
                _chosen_logits(picked, weight, bias, ids[block], settings, target[block])
            for columns in blocks(weight.shape[0], settings.vocab_block):
                w = _operand(weight[columns], settings, buffers, "head")
                b = None if bias is None else bias[columns]
                for block in blocks(count, settings.token_block):
                    h = _operand(hidden[block if rows is None else rows[block]], settings, buffers, "hidden")
                    room -= h.shape[0] * w.shape[0] * settings.tile.itemsize
                    reused = room < 0 and h.dtype == settings.tile
                    out = buffers.take("tile", (h.shape[0], w.shape[0]), w, h.dtype) if reused else None
                    tile = _raw_tile(h, w, b, settings, out)
                    kept += [tile] if room >= 0 else []
                    shape = tuple(tile.shape)
                    copied = room >= 0 and not settings.exponentials
                    tile, _ = logits_tile(tile, settings, False, copied)
                    _put_target(tile, ids[block], columns.start, banned)
                    before = top[block].clone()
                    top[block] = now = torch.maximum(before, tile.amax(1).to(before.dtype))
                    tops += [now] if room >= 0 and settings.exponentials else []
                    shift = _finite_or_zero(now)
                    tile.sub_(shift.to(tile.dtype).unsqueeze(1))
                    moved = torch.where(before == -math.inf, 0.0, before - shift)
                    decay = torch.where(before == -math.inf, 0.0, moved.exp())
                    if settings.entropy:
                        tile.clamp_(min=NEGLIGIBLE)
                        exps = torch.exp(tile, out=buffers.take("exps", shape, w, settings.tile))
                        weighted[block] = decay * (weighted[block] + moved * total[block]) + tile.mul_(exps).sum(1)
                    else:
                        exps = tile.exp_()
                    total[block] = decay * total[block] + exps.sum(1)

        shift = _finite_or_zero(top)
        total = torch.where(top == -math.inf, 1.0, total)  # no other token at all: any finite stand-in will do
        delta = torch.where(top == -math.inf, top, shift) - target + total.log()
        zero = delta.new_zeros(())
        result = settings.result
        logps = spread(-torch.logaddexp(zero, delta) + 0.0, rows, hidden.shape[0], result)
        entropy = others = None
        if settings.entropy:
            bounded = delta.clamp(NEGLIGIBLE, -NEGLIGIBLE)
            others = total.log() - weighted / total  # entropy given that the chosen token is not drawn
            p, q = torch.sigmoid(-bounded), torch.sigmoid(bounded)
            entropy = p * torch.logaddexp(zero, bounded) + q * (torch.logaddexp(zero, -bounded) + others)
        ctx.settings, ctx.rows, ctx.kept = settings, rows, len(kept)
        ctx.save_for_backward(hidden, weight, bias, ids, shift, total, delta, entropy, others, *kept, *tops)
        return logps, None if entropy is None else spread(entropy, rows, hidden.shape[0], result)

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = ChunkedLogProbs._backward(ctx, grad_logps, grad_entropy)
        if not torch.is_grad_enabled():
            return found
        # create_graph=True: without this the gradients would pass for constants.
        leaves = [x for x in (*ctx.saved_tensors[:3], grad_logps, grad_entropy) if x is not None]
        return tuple(None if x is None else _Once.apply(x, *leaves) for x in found)

    @staticmethod
    def _backward(ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, shift, total, delta, entropy, others, *kept = ctx.saved_tensors
        settings, rows = ctx.settings, ctx.rows
        if grad_logps is None and grad_entropy is None:
            return (None,) * 6

        # Chain-rule factors of a row: dlogits[j] = e^x_j * (constant + linear * x_j) for the others, `at_target` for
        # the chosen token; see the module docstring.
        slope = settings.logit_scale / settings.temperature
        q = torch.sigmoid(delta)
        at_target, constant, linear = torch.zeros_like(delta), torch.zeros_like(delta), None
        if grad_logps is not None:
            g = scored(grad_logps.reshape(-1), rows).to(delta.dtype) * slope
            at_target, constant = g * q, -g * q / total
        if grad_entropy is not None:
            g = scored(grad_entropy.reshape(-1), rows).to(delta.dtype) * slope
            bounded = delta.clamp(NEGLIGIBLE, -NEGLIGIBLE)
            linear = -g * q / total
            log_q = -torch.logaddexp(delta.new_zeros(()), -bounded)
            at_target = at_target - g * q * torch.sigmoid(-bounded) * (others - bounded)
            constant = constant + linear * (entropy - total.log() + log_q)

        unit = None
        if _rounds_dlogits(settings, hidden.device):
            bounds = [at_target, constant * total] + ([] if linear is None else [linear * total])
            unit = _to_reach(14, torch.stack(bounds).abs().amax(0))
            at_target, constant = at_target * unit, constant * unit
            linear = None if linear is None else linear * unit
        factors = [None if x is None else x.unsqueeze(1) for x in (at_target, constant, linear, shift)]
        tiles = kept[: ctx.kept], kept[ctx.kept :]
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _backward_tiles(
                hidden, weight, bias, ids, rows, factors, unit, settings, ctx.needs_input_grad, tiles
            )
        return *grads, None, None, None


class _Once(torch.autograd.Function):
    """A gradient, as a function of what it was made of, that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *leaves: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("selective_log_probs and FusedLinearGRPOLoss are not differentiable twice")


def _backward_tiles(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    rows: Tensor | None,
    factors: list[Tensor | None],
    unit: Tensor | None,
    settings: Settings,
    needs: tuple[bool, ...],
    kept: tuple[list[Tensor], list[Tensor]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    (needs_hidden, needs_weight, needs_bias), (tiles, tops) = needs[:3], kept
    count, wide = ids.shape[0], settings.tile
    per_columns = -(-count // settings.token_block)
    new = torch.empty_like if rows is None else torch.zeros_like
    grad_hidden = new(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
    buffers, last_use, in_place = Buffers(), not keeps_graph(), unit is None and weight.dtype == wide
    # A row of dlogits fills the range of 16 bits by its unit. Where rows are added, the hidden states carry the rest:
    # `share`, at most what takes the largest of them to 2**15, so that no row is lost that the sum would show.
    share = whole = None
    if unit is not None and (needs_weight or needs_bias):
        whole = unit.amin() * _to_reach(15, hidden.detach().abs().amax().to(unit.dtype)) if count else unit.new_ones(())
        share = (whole / unit).to(wide).unsqueeze(1)

    # The head's gradient is finished one vocabulary block at a time, over all tokens, so it never exists in float32
    # as a whole. With a frozen head the same holds for the hidden states, one token block at a time.
    group_size = count if needs_weight or needs_bias else settings.token_block
    for group in blocks(count, max(group_size, 1)) if count else [slice(0, 0)]:
        size = group.stop - group.start
        for_hidden = None
        if grad_hidden is not None:
            direct = unit is None and rows is None and hidden.dtype == wide
            for_hidden = grad_hidden[group] if direct else hidden.new_empty(size, hidden.shape[1], dtype=wide)
        before = None  # the sum of earlier parts, where there are many: one by one, alike ones would drift
        for part, columns in enumerate(blocks(weight.shape[0], settings.vocab_block)):
            w = _operand(weight[columns], settings, buffers, "head")
            b = None if bias is None else bias[columns]
            first = part % _PARTS == 0
            if first and part and for_hidden is not None:
                before = for_hidden.clone() if before is None else before.add_(for_hidden)
            for_weight = for_bias = None
            if grad_weight is not None:
                at = grad_weight[columns]
                for_weight = at if in_place else buffers.take("head gradient", tuple(at.shape), at, wide)
                for_weight = for_weight if size else for_weight.zero_()
            if grad_bias is not None:
                for_bias = torch.zeros(w.shape[0], dtype=wide, device=w.device)
            for inner in blocks(size, settings.token_block):
                block = slice(group.start + inner.start, group.start + inner.stop)
                h = _operand(hidden[block if rows is None else rows[block]], settings, buffers, "hidden")
                # Kept tiles are the first ones in the forward's order: blocks of tokens within blocks of the vocabulary.
                number = columns.start // settings.vocab_block * per_columns + block.start // settings.token_block
                here = number < len(tiles)
                fresh = (here and last_use) or h.dtype != wide
                out = None if fresh else buffers.take("tile", (h.shape[0], w.shape[0]), w, h.dtype)
                at_target, constant, linear, shift = (None if x is None else x[block] for x in factors)
                assert at_target is not None and constant is not None and shift is not None
                if number < len(tops):
                    top = tops[number].unsqueeze(1)
                    moved = torch.where(top == -math.inf, 0.0, (top - shift).exp())
                    tile = torch.mul(tiles[number], (constant * moved).to(wide), out=tiles[number] if last_use else out)
                    _put_target(tile, ids[block], columns.start, at_target)
                else:
                    raw = tiles[number] if here else _raw_tile(h, w, b, settings, out)
                    copied = here and not last_use
                    parts = at_target, constant, linear, shift
                    tile = _dlogits(raw, ids[block], columns.start, parts, settings, copied)
                if for_bias is not None:
                    for_bias += tile.sum(0) if share is None else torch.mv(tile.t(), share[block, 0])
                dlogits = tile if unit is None else _operand(tile, settings, buffers, "dlogits")
                if for_hidden is not None:
                    _add_product(for_hidden[inner], dlogits, w, first=first)
                if for_weight is not None:
                    h = h if share is None else (h * share[block]).to(h.dtype)
                    _add_product(for_weight, dlogits.t(), h, first=inner.start == 0)
            for total, into in ((None if in_place else for_weight, grad_weight), (for_bias, grad_bias)):
                if total is not None and into is not None:
                    into[columns] = total if whole is None else total / whole
        if for_hidden is not None and before is not None:
            for_hidden.add_(before)
        if for_hidden is not None and grad_hidden is not None and not direct:
            for_hidden = for_hidden if unit is None else for_hidden / unit[group].unsqueeze(1)
            grad_hidden[group if rows is None else rows[group]] = for_hidden.to(grad_hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def _dlogits(
    raw: Tensor, ids: Tensor, start: int, parts: tuple[Tensor | None, ...], s: Settings, copied: bool
) -> Tensor:
    """The gradient of a tile of products, in their place unless `copied`; for `parts` see `ChunkedLogProbs._backward`."""
    at_target, constant, linear, shift = parts
    assert at_target is not None and constant is not None and shift is not None
    tile, sech2 = logits_tile(raw, s, True, copied)
    tile.sub_(shift.to(tile.dtype))
    if linear is None:
        tile.exp_().mul_(constant.to(tile.dtype))
    else:
        line = (tile.clamp_(min=NEGLIGIBLE) * linear.to(tile.dtype)).add_(constant.to(tile.dtype))
        tile.exp_().mul_(line)
    _put_target(tile, ids, start, at_target)
    return tile if sech2 is None else tile.mul_(sech2)


def keeps_graph() -> bool:
    """Whether a second backward pass may follow, so that kept tiles must stay as they are."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


def _finite_or_zero(top: Tensor) -> Tensor:
    return torch.where(top == -math.inf, 0.0, top)


def scored(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def spread(x: Tensor, rows: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    if rows is None:
        return x.to(dtype)
    return torch.zeros(count, dtype=dtype, device=x.device).index_copy_(0, rows, x.to(dtype))
