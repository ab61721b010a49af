"""What a model makes of a micro-batch by its own forward, and the noise of that.

Log-probs are taken twice: of each sequence alone, and of pairs that are padded, with every operation shaken by the unit
roundoff of its own dtype. The first are what the others are held against. The spread of the second about them is the noise
of this model on these tokens: what another kernel, another batch or another engine in the same dtype may be off by.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.judge.shaken import Shaken, unit

SAMPLE = 256
"""Tokens whose logits are kept, to fit causes with: (256, V)."""
CHUNK = 128
"""Tokens whose logits are in float32 at a time."""

SAID = {
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "logit_softcap"), "softcap"),
    **dict.fromkeys(("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"), "scale"),
}
"""What a transformers config calls what a model does to logits -> what it is."""
LIMIT, FARTHEST = 3.0, 15.0
"""Units that the rms of all differences, and the largest of them, may reach."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """R sequences of a micro-batch. n: their tokens that are in the loss, row by row."""

    ids: list[Tensor]  # of each row, without padding
    places: list[Tensor]  # of each row, where in `ids` the tokens of the loss are
    picked: Tensor  # (B,) and (B, T) bool: which rows and which tokens these are

    def of(self, values: Tensor) -> Tensor:
        """What `values` (B, T) say of these tokens, (n,) float64 on the CPU."""
        return values.detach()[self.picked].double().cpu()

    def back(self, values: Tensor) -> Tensor:
        """The reverse: (n,) as (B, T), NaN elsewhere."""
        out = values.new_full(self.picked.shape, torch.nan)
        out[self.picked.cpu()] = values
        return out

    def cut(self, most: int) -> "Rows":
        """With the last `most` tokens of each prompt alone."""
        cuts = [max(int(at[0]) - most, 0) if len(at) else 0 for at in self.places]
        ids, places = zip(*((i[n:], at - n) for i, at, n in zip(self.ids, self.places, cuts, strict=True)), strict=True)
        return Rows(list(ids), list(places), self.picked)

    def filled(self, count: int) -> "Rows":
        """With its shortest row again until there are `count`, of no token: as many forwards as another rank has."""
        more = [min(self.ids, key=len)] * (count - len(self.ids))
        return Rows([*self.ids, *more], [*self.places, *(self.places[0][:0] for _ in more)], self.picked)

    @property
    def prompt(self) -> int:
        """Tokens before the first one in the loss, of the row that has most."""
        return max((int(at[0]) for at in self.places if len(at)), default=0)

    @property
    def token_ids(self) -> Tensor:
        """(n,)."""
        return torch.cat([ids[at] for ids, at in zip(self.ids, self.places, strict=True)]).cpu()


def rows_of(input_ids: Tensor, attention: Tensor, mask: Tensor, count: int) -> Rows:
    """At most `count` rows at even distances of (B, P + T) ids; `mask` (B, T): the tokens in the loss, the last T positions."""
    chosen = torch.linspace(0, len(input_ids) - 1, min(count, len(input_ids))).round().long().tolist()
    present, width = attention.bool(), mask.shape[1]
    at = present.cumsum(1)[:, -width:] - 1
    mask = mask.bool() & present[:, -width:] & (at > 0)  # nothing predicts a row's first token
    picked = torch.zeros_like(mask)
    picked[chosen] = mask[chosen]
    return Rows([input_ids[i][present[i]] for i in chosen], [at[i][mask[i]] for i in chosen], picked)


def rows_from(pairs: Sequence[tuple[list[int], list[int]]], wanted: Tensor, device: Any) -> Rows:
    """The `wanted` tokens (B, T) of completions, as pairs of prompt and completion."""
    ids = [torch.tensor(prompt + completion, device=device) for prompt, completion in pairs]
    places = [w.nonzero()[:, 0].to(device) + len(prompt) for w, (prompt, _) in zip(wanted, pairs, strict=True)]
    return Rows(ids, places, wanted)


@dataclasses.dataclass(frozen=True)
class Scores:
    """n tokens, (n,) float64 on the CPU each, by a model's own forward."""

    logps: Tensor  # log-probs at the temperature
    shape: Tensor  # √(1 - 2p + Σp²), how far a log-prob moves when logits are off by 1 each, independently
    # what the last operations alone may be off by: the log-softmax in float32, the log-prob in the logits' dtype
    floor: Tensor
    sample: Tensor  # which tokens have logits, (m,) long
    logits: Tensor  # (m, V) float32 on the CPU, before the temperature
    hidden: Tensor | None  # (m, H), what the LM head was given for them; None where it was not seen
    dtype: torch.dtype  # of the logits
    noise: float = 0.0  # ε in nats: a token's unit is ε·shape and its floor, added in squares

    @property
    def units(self) -> Tensor:
        """Of each token, in nats, (n,)."""
        return ((self.noise * self.shape).square() + self.floor.square()).sqrt()

    def spread(self, values: Tensor) -> Tensor:
        """Log-probs (m,) of the sample as (n,), NaN elsewhere."""
        return torch.full_like(self.logps, torch.nan).index_put((self.sample,), values.double())

    def of_sample(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """The same of log-probs by logits (m, V); `ids` (n,)."""
        logps = (logits.double() / temperature).log_softmax(-1)
        return self.spread(logps.gather(-1, ids[self.sample][:, None])[:, 0])


@dataclasses.dataclass(frozen=True)
class Difference:
    """Log-probs (n,) against a model's own, in units of its noise; NaN: there is none."""

    values: Tensor
    own: Scores
    stored: float = 0.0  # unit roundoff of the 16-bit dtype in which they came

    @property
    def unit(self) -> Tensor:
        """Of every token: the noise, and where log-probs come in 16 bits what storing one rounds, uniform within ±u·|log p|, and
        storing Σ exp z before its logarithm, within ±u (torch's log_softmax on a CPU)."""
        return (self.own.units.square() + self.stored**2 * (self.values.square() + 1) / 3).sqrt()

    @property
    def each(self) -> Tensor:
        """Units of every token, (n,), without sign."""
        return ((self.values - self.own.logps) / self.unit).abs()

    def units(self, against: Tensor | None = None, of: Tensor | None = None) -> Tensor:
        """Of the tokens `of` that have one, against the model's own log-probs or `against`."""
        exact = self.own.logps if against is None else against
        there = ~self.values.isnan() & exact.isfinite()
        return ((self.values - exact) / self.unit)[there if of is None else there & of]


def rms(units: Tensor) -> float:
    """√mean x², infinite where one is; 0 of nothing."""
    return float(units.square().mean().sqrt()) if len(units) else 0.0


def mismatch(differences: Tensor) -> dict[str, float]:
    """Means over log-ratios d, trainer minus sampler: mismatch_kl = -d, k3 = exp d - d - 1, both estimates of KL(sampler ‖
    trainer), and exp|d|."""
    d = differences
    measured = {"mismatch_kl": -d, "k3": d.exp() - d - 1, "mean_exp_abs_difference": d.abs().exp()}
    return {name: float(x.mean()) for name, x in measured.items()}


def agrees(units: Tensor) -> bool:
    """Whether noise explains these differences."""
    return rms(units) <= LIMIT and (len(units) == 0 or float(units.abs().max()) <= FARTHEST)


def farthest(found: Difference, rows: Rows, decode: Callable[[int], str], count: int = 5) -> list[dict[str, Any]]:
    """The tokens that differ most, with text, log-probs and units."""
    ids, units = rows.token_ids.tolist(), found.each
    order = units.nan_to_num(-1.0).argsort(descending=True)[:count].tolist()
    columns = {"logp": found.values, "own": found.own.logps, "units": units}
    return [{"token": decode(ids[i]), **{name: float(x[i]) for name, x in columns.items()}} for i in order]


def score(
    model: Any, rows: Rows, temperature: float, together: int = 1, call: Callable[..., Any] | None = None
) -> Scores:
    """`rows` by the model's own forward, or by `call`, `together` at a time, padded at the right."""
    total = sum(map(len, rows.places))
    sample = torch.linspace(0, max(total - 1, 0), min(SAMPLE, total)).round().long().unique()
    parts, kept, hidden, done, dtype = [torch.zeros(0, 3)], [], [], 0, torch.float32
    for i, z, states in tables(model, rows, together, call):
        wanted = (sample[(sample >= done) & (sample < done + len(z))] - done).to(z.device)
        kept.append(z[wanted].float().cpu())
        hidden += [] if states is None else [states[wanted]]
        pieces = zip(z.split(CHUNK), rows.ids[i][rows.places[i]].split(CHUNK), strict=True)
        parts += [_selected(part, ids, temperature).cpu() for part, ids in pieces if len(ids)]
        done, dtype = done + len(z), z.dtype
    logps, shape, floor = torch.cat(parts).double().unbind(-1)
    states = torch.cat(hidden) if len(hidden) == len(kept) else None
    return Scores(logps, shape, floor, sample, torch.cat(kept), states, dtype)


def tables(
    model: Any, rows: Rows, together: int = 1, call: Callable[..., Any] | None = None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Of each row: its number, the logits (n, V) that predict its tokens, and what the LM head was given for them, (n, H)."""
    for first in range(0, len(rows.ids), together):
        group = range(first, min(first + together, len(rows.ids)))
        begin = min((int(rows.places[i][0]) for i in group if len(rows.places[i])), default=1) - 1
        logits, states = _logits(model, call or model, [rows.ids[i] for i in group], begin)
        for row, i in enumerate(group):
            at = rows.places[i] - 1 - begin
            yield i, logits[row][at].detach(), None if states is None else states[row][at].detach()


def _logits(model: Any, call: Any, ids: list[Tensor], begin: int) -> tuple[Tensor, Tensor | None]:
    """(N, L - begin, V), those of the positions from `begin` on; and what the LM head was given, (N, L - begin, H)."""
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    inner, given, width = innermost(model), list[Tensor](), batch.shape[1] - begin
    known = inspect.signature(inner.forward).parameters
    options = {n: v for n, v in {"use_cache": False, "logits_to_keep": width}.items() if n in known}
    head = inner.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: given.append(args[0])) if head is not None else None
    try:
        logits = call(input_ids=batch, attention_mask=mask, **options).logits[:, -width:]
    finally:
        if hook is not None:
            hook.remove()
    states = given[0][:, -width:] if len(given) == 1 else logits[:0]
    return logits, states if states.shape[:2] == logits.shape[:2] else None


def innermost(model: Any) -> Any:
    """The model below wrappers of ranks and adapters: its forward names what it takes."""
    while hasattr(model, "module"):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def begun(model: Any, rows: Rows) -> dict[str, Rows]:
    """The rows with a BOS token more in front of each, and without the one that each has: cause -> rows."""
    bos = getattr(innermost(model).config.get_text_config(), "bos_token_id", None)
    if not isinstance(bos, int):
        return {}
    more = [torch.cat([row.new_tensor([bos]), row]) for row in rows.ids]
    out = {"prompts begin with one more BOS token there": Rows(more, [at + 1 for at in rows.places], rows.picked)}
    pairs = zip(rows.ids, rows.places, strict=True)
    if all(int(row[0]) == bos and (not len(at) or int(at[0]) > 1) for row, at in pairs):
        less = [row[1:] for row in rows.ids]
        out["prompts begin with no BOS token there"] = Rows(less, [at - 1 for at in rows.places], rows.picked)
    return out


def bare_head(model: Any, scores: Scores, ids: Tensor, temperature: float) -> dict[str, Callable[[], Tensor]]:
    """What the model makes of the bare product of its LM head, if anything: its name -> log-probs without it, (n,)."""
    inner = innermost(model)
    head, config = inner.get_output_embeddings(), inner.config.get_text_config()
    if scores.hidden is None or type(getattr(head, "weight", None)) is not torch.nn.Parameter:
        return {}  # not seen, or a shard
    with torch.no_grad():
        product = torch.nn.functional.linear(scores.hidden.to(head.weight.dtype), head.weight).float().cpu()
    values = {name: getattr(config, name, None) for name in SAID}
    said = [f"the {SAID[name]} {x:g} of the logits" for name, x in values.items() if x not in (None, 0, 1)]
    said += ["the bias of the LM head"] * (getattr(head, "bias", None) is not None)
    rounding = max(2 * unit(scores.dtype), 64 * unit(torch.float32)) * float(scores.logits.abs().max())
    if not said and torch.allclose(product, scores.logits, rtol=0.0, atol=rounding):
        return {}
    where = "in hooks of" if head._forward_hooks or type(head) is not torch.nn.Linear else "to the logits behind"
    text = f"{' and '.join(said) or f'what the model does {where} its LM head'} is left out"
    return {text: lambda: scores.of_sample(product, ids, temperature)}


def _selected(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-prob, shape and floor of each token, (n, 3)."""
    z = logits.float() / temperature
    total = z.logsumexp(-1)
    logps = z.gather(-1, ids[:, None])[:, 0] - total
    spread = (z - total[:, None]).exp().square().sum(-1)
    floor = 8 * unit(torch.float32) * (1 + total.abs()) + unit(logits.dtype) * logps.abs()
    return torch.stack([logps, (1 - 2 * logps.exp() + spread).clamp(min=0).sqrt(), floor], -1)


def noise(model: Any, rows: Rows, temperature: float, alone: Scores, dtype: torch.dtype | None = None) -> Scores:
    """`alone`, the rows one by one, with ε of the same rows in pairs and shaken, by the roundoff of `dtype` if given."""
    shaken = []
    for seed in range(2):
        with Shaken(seed, dtype):
            shaken.append(score(model, rows, temperature, 2).logps)
    off, shape = torch.stack(shaken) - alone.logps, alone.shape.square().mean()
    epsilon = float((off.square().mean() / shape).sqrt()) if float(shape) > 0 else 0.0
    return dataclasses.replace(alone, noise=epsilon)


@contextlib.contextmanager
def undisturbed(model: Any, training: bool = False) -> Iterator[None]:
    """Evaluation mode, or in `training` the modes as they are, without gradients; modes, random states and what training moves
    beside parameters (running means) are put back."""
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(b, b.clone()) for b in model.buffers()] if training else []
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            for module, _ in modes:
                module.training = training and module.training
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
            for module, mode in modes:
                module.training = mode
                if hasattr(module, "reshard"):  # by FSDP2, which else keeps a root together until its backward pass
                    module.reshard()


def drops(model: Any, training: bool = False) -> bool:
    """Whether dropout makes the log-probs of the model in its present mode random, or would in `training`."""
    droppers = (m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0)
    if any(m.training or training for m in droppers):
        return True
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(
        (model.training or training) and (getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0))
    )


def kept_probs(logps: Tensor, top_p: float, top_k: int, min_p: float = 0.0) -> Tensor:
    """Probabilities (T, V) of the tokens that top-k, top-p and min-p keep, 0 of the others, from log-probs (T, V). Top-p
    keeps the fewest likeliest tokens whose mass reaches p, of what top-k left; min-p those with p ≥ min_p·max p."""
    order = logps.argsort(dim=-1, descending=True, stable=True)
    probs = logps.gather(-1, order).exp()
    if top_k > 0:
        probs = torch.where(torch.arange(probs.shape[-1]) < top_k, probs, 0.0)
    mass = probs.sum(-1, keepdim=True)
    before = (probs / mass).cumsum(-1) - probs / mass
    keep = (probs > 0) & ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[..., :1])
    return torch.zeros_like(logps).scatter_(-1, order, probs * keep)


def kept_mass(logps: Tensor, ids: Tensor, top_p: float, top_k: int, min_p: float = 0.0) -> Tensor:
    """Probability that is kept, (T,); 0 where the token itself is cut."""
    kept = kept_probs(logps, top_p, top_k, min_p)
    return torch.where(kept.gather(-1, ids[:, None])[:, 0] > 0, kept.sum(-1), 0.0)
