"""What a model makes of a micro-batch by its own forward, and the noise of that.

Log-probs are taken twice: of each sequence alone, and of pairs that are padded, with every operation shaken by the unit
roundoff of its own dtype. The first are what the others are held against. The spread of the second about them is the noise
of this model on these tokens: what another kernel, another batch or another engine in the same dtype may be off by.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.judge.monte_carlo import rounds_nothing

SAMPLE = 256
"""Tokens whose logits are kept, to fit causes with: (256, V)."""
CHUNK = 128
"""Tokens whose logits are in float32 at a time."""
LIMIT, FARTHEST = 3.0, 15.0
"""Units that the rms of all differences, and the largest of them, may reach."""


class Shaken(TorchDispatchMode):
    """Multiplies each result of an operation by 1 + u·ξ, ξ uniform in ±1, u the unit roundoff of its dtype, or of `dtype`.

    A product in float32 is also off by u·|a|·|b|·ξ, the norms of its row and column: what the order of its sum makes of it,
    and with tf32 what its operands lose. Random numbers are the mode's own.
    """

    def __init__(self, seed: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.seed, self.dtype, self.generators = seed, dtype, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if rounds_nothing(func):
            return out
        if type(out) is Tensor:
            return self.shaken(out, args[-2:]) if func in _PRODUCTS else self.shaken(out)
        if isinstance(out, tuple) and out and type(out[0]) is Tensor:  # an attention, with what its backward pass needs
            return self.shaken(out[0]), *out[1:]
        return out

    def shaken(self, out: Tensor, factors: Sequence[Tensor] = ()) -> Tensor:
        """`out`, in its own dtype, off by its rounding."""
        if not out.is_floating_point() or out.dtype is torch.float64:
            return out
        wide = out.float()
        shaken = wide * (1 + unit(self.dtype or out.dtype) * self.noise(wide))
        if factors and out.dtype is torch.float32:
            a, b = (x.float().norm(dim=dim, keepdim=True) for x, dim in zip(factors, (-1, -2), strict=True))
            rounded = self.dtype or (torch.float16 if _tf32(out) else torch.float32)
            shaken = shaken + unit(rounded) * a * b * self.noise(wide) / factors[0].shape[-1] ** (0.5 * _tf32(out))
        largest = torch.finfo(out.dtype).max
        return shaken.clamp_(-largest, largest).to(out.dtype)

    def noise(self, x: Tensor) -> Tensor:
        """Uniform in ±1."""
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        return torch.rand(x.shape, generator=self.generators[x.device], device=x.device).mul_(2).sub_(1)


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def _tf32(x: Tensor) -> bool:
    return x.is_cuda and torch.backends.cuda.matmul.allow_tf32


@dataclasses.dataclass(frozen=True)
class Rows:
    """R sequences of a micro-batch. n: their tokens that are in the loss, row by row.

    Attributes:
        ids: of each row, without padding.
        places: of each row, where in `ids` the tokens of the loss are.
        picked: (B,) and (B, T) bool: which rows and which tokens these are.
    """

    ids: list[Tensor]
    places: list[Tensor]
    picked: Tensor

    def of(self, values: Tensor) -> Tensor:
        """What `values` (B, T) say of these tokens, (n,) float64 on the CPU."""
        return values.detach()[self.picked].double().cpu()

    @property
    def token_ids(self) -> Tensor:
        """(n,)."""
        return torch.cat([ids[at] for ids, at in zip(self.ids, self.places, strict=True)]).cpu()


def rows_of(input_ids: Tensor, attention: Tensor, mask: Tensor, count: int) -> Rows:
    """At most `count` rows at even distances of (B, P + T) ids; `mask` (B, T): the tokens in the loss, the last T positions."""
    chosen = torch.linspace(0, len(input_ids) - 1, min(count, len(input_ids))).round().long().tolist()
    present, width = attention.bool(), mask.shape[1]
    mask = mask.bool() & present[:, -width:]
    mask = mask & (present.cumsum(1)[:, -width:] > 1)  # nothing predicts a row's first token
    at = present.cumsum(1)[:, -width:] - 1
    picked = torch.zeros_like(mask)
    picked[chosen] = mask[chosen]
    return Rows([input_ids[i][present[i]] for i in chosen], [at[i][mask[i]] for i in chosen], picked)


@dataclasses.dataclass(frozen=True)
class Scores:
    """n tokens, (n,) float64 on the CPU each, by a model's own forward.

    Attributes:
        logps: log-probs at the temperature.
        shape: √(1 - 2p + Σp²), how far a log-prob moves when logits are off by 1 each, independently.
        floor: what the last operations alone may be off by: the log-softmax in float32, the log-prob in the logits' dtype.
        sample: which tokens have logits, (m,) long.
        logits: (m, V) float32 on the CPU, before the temperature.
        hidden: (m, H), what the LM head was given for them; None where it was not seen.
    """

    logps: Tensor
    shape: Tensor
    floor: Tensor
    sample: Tensor
    logits: Tensor
    hidden: Tensor | None


def score(model: Any, rows: Rows, temperature: float, together: int = 1) -> Scores:
    """`rows` by the model's own forward, `together` at a time, padded at the right."""
    total = sum(map(len, rows.places))
    sample = torch.linspace(0, max(total - 1, 0), min(SAMPLE, total)).round().long().unique()
    parts, kept, hidden, done = [torch.zeros(0, 3)], [], [], 0
    for first in range(0, len(rows.ids), together):
        group = range(first, min(first + together, len(rows.ids)))
        begin = min((int(rows.places[i][0]) for i in group if len(rows.places[i])), default=1) - 1
        logits, states = _logits(model, [rows.ids[i] for i in group], begin)
        for row, i in enumerate(group):
            at = rows.places[i] - 1 - begin
            z, ids = logits[row][at], rows.ids[i][rows.places[i]]
            wanted = (sample[(sample >= done) & (sample < done + len(z))] - done).to(z.device)
            kept.append(z[wanted].float().cpu())
            hidden.append(None if states is None else states[row][at][wanted])
            pieces = zip(z.split(CHUNK), ids.split(CHUNK), strict=True)
            parts += [_selected(part, ids, temperature).cpu() for part, ids in pieces if len(ids)]
            done += len(z)
    logps, shape, floor = torch.cat(parts).double().unbind(-1)
    seen = [x for x in hidden if x is not None]
    return Scores(logps, shape, floor, sample, torch.cat(kept), torch.cat(seen) if len(seen) == len(kept) else None)


def _logits(model: Any, ids: list[Tensor], begin: int) -> tuple[Tensor, Tensor | None]:
    """(N, L - begin, V), those of the positions from `begin` on; and what the LM head was given, (N, L - begin, H)."""
    width = max(map(len, ids))
    batch = ids[0].new_zeros(len(ids), width)
    mask = torch.zeros_like(batch)
    for i, row in enumerate(ids):
        batch[i, : len(row)], mask[i, : len(row)] = row, 1
    inner, given = innermost(model), list[Tensor]()
    known = inspect.signature(inner.forward).parameters
    options = {"use_cache": False, "logits_to_keep": width - begin}
    head = inner.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: given.append(args[0])) if head is not None else None
    try:
        out = model(input_ids=batch, attention_mask=mask, **{n: v for n, v in options.items() if n in known})
    finally:
        if hook is not None:
            hook.remove()
    logits: Tensor = out.logits[:, begin - width :]
    states = given[0][:, begin - width :] if len(given) == 1 else logits[:0]
    return logits, states if states.shape[:2] == logits.shape[:2] else None


def innermost(model: Any) -> Any:
    """The model below wrappers of ranks and adapters: its forward names what it takes."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _selected(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-prob, shape and floor of each token, (n, 3)."""
    z = logits.float() / temperature
    total = z.logsumexp(-1)
    logps = z.gather(-1, ids[:, None])[:, 0] - total
    p = logps.exp()
    spread = (z - total[:, None]).exp().square().sum(-1)
    floor = 8 * unit(torch.float32) * (1 + total.abs()) + unit(logits.dtype) * logps.abs()
    return torch.stack([logps, (1 - 2 * p + spread).clamp(min=0).sqrt(), floor], -1)


@dataclasses.dataclass(frozen=True)
class Own:
    """A model's own scores, and the noise of them.

    Attributes:
        scores: of each sequence alone.
        noise: ε in nats: a token's unit is ε·shape and its floor, added in squares.
    """

    scores: Scores
    noise: float

    @property
    def units(self) -> Tensor:
        """Of each token, in nats, (n,)."""
        return ((self.noise * self.scores.shape).square() + self.scores.floor.square()).sqrt()


def own(model: Any, rows: Rows, temperature: float, seeds: Sequence[int], dtype: torch.dtype | None = None) -> Own:
    """Scores `rows` alone, and once for each seed in pairs and shaken, by the roundoff of `dtype` if given."""
    alone = score(model, rows, temperature)
    shaken = []
    for seed in seeds:
        with Shaken(seed, dtype):
            shaken.append(score(model, rows, temperature, 2).logps)
    off, shape = torch.stack(shaken) - alone.logps, alone.shape.square().mean()
    return Own(alone, float((off.square().mean() / shape).sqrt()) if float(shape) > 0 else 0.0)


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; modes and random states are put back."""
    modes = [(m, m.training) for m in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def drops(model: Any) -> bool:
    """Whether dropout makes the log-probs of the model in its present mode random."""
    if any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(model.training and (getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)))
