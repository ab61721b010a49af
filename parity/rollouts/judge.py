"""An engine's log-probs against their definition: the trainer's model in float64, and replicas of it in the trainer's dtype.

The mean ratio judges nothing: by E_s[π/s] = 1 it is 1 for every trainer, right or wrong.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.judge.gates import Judgement, failed
from parity.judge.operations import as_definition
from parity.judge.recipe import DTYPES, EAGER, NAMES
from parity.judge.stages import in_dtype
from parity.recording import Recording
from parity.rollouts import causes, engine_models, scoring
from parity.rollouts.scoring import LIMIT, Rows, kept_probs, mismatch, rms, rows_from, tables
from parity.trainers.definitions.training_step import measured

Pairs = Sequence[tuple[list[int], list[int]]]  # prompt and completion
Sampling = tuple[float, float, int]  # temperature, top-p (1: none), top-k (0: none)
BATCH = 16
TIES = 64
"""Tokens besides k that may equal the k-th: of 16-bit logits many do, and transformers and vLLM keep them all."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """(B, T) float64 each: log-prob over the whole vocabulary, and the kept mass under top-p and top-k (0: token cut). Of x,
    -log q of a token drawn from the kept ones, x - E[x], and log E[exp(λ(x - E[x]))] for each λ of `tilts`, (B, T, L)."""

    full: Tensor
    kept: Tensor
    surprise: Tensor
    cumulants: Tensor

    @property
    def truncated(self) -> Tensor:
        """log p - log K within the kept set, the log-prob of truncated sampling; -inf outside."""
        return torch.where(self.kept > 0, self.full - self.kept.log(), -torch.inf)


def score(model: Any, rows: Pairs, width: int, sampling: Sampling, tilts: Sequence[float] = ()) -> Scores:
    """Log-probs of the completions of `rows` by `model`, zero behind a row's end. Temperature, then top-k, then top-p,
    as vLLM and transformers have it. Logits leave the model in its own dtype; the log-softmax is taken in float64, so
    that what differs is the model's own. Raises UsageError where a logit is NaN, or a token is none of the model's."""
    temperature, top_p, top_k = sampling
    full, kept, surprise = (torch.full((len(rows), width), x, dtype=torch.float64) for x in (0.0, 1.0, 0.0))
    cumulants = full.new_zeros(*full.shape, len(tilts))
    lengths = torch.tensor([len(completion) for _, completion in rows])
    known = scoring.innermost(model).get_input_embeddings().weight.shape[0]
    if strange := [i for prompt, completion in rows for i in (*prompt, *completion) if not 0 <= i < known]:
        raise UsageError(f"token {strange[0]} is none of the {known:,} of the trainer's model")
    whole = rows_from(rows, torch.arange(width) < lengths[:, None], model.device)
    with torch.no_grad():
        for i, logits, _ in tables(model, whole, BATCH):
            if bool(logits.isnan().any()):
                raise UsageError(f"row {i}: the trainer's logits are NaN")
            place, ids = (i, whole.picked[i]), whole.ids[i][whole.places[i]].cpu()
            logps = (logits.cpu().double() / temperature).log_softmax(-1)
            full[place] = logps.gather(-1, ids[:, None])[:, 0]
            probs = kept_probs(logps, top_p, top_k)
            own, mass = probs.gather(-1, ids[:, None])[:, 0], probs.sum(-1)
            kept[place] = torch.where(own > 0, mass, 0.0)
            log_q = (probs / mass[:, None]).log()
            mean = -(log_q.exp() * log_q).nan_to_num(0.0).sum(-1)
            surprise[place] = mass.log() - full[place] - mean  # beyond all others where the token is cut
            for number, t in enumerate(tilts):
                cumulants[..., number][place] = ((1 - t) * log_q).logsumexp(-1) - t * mean
    return Scores(full, kept, surprise, cumulants)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The model whose log-probs the sampler's are held against. `folder`: where the model lies; `dtype`: of its weights
    and arithmetic; `change`: what happens to the model after it is loaded with its PEFT adapter."""

    folder: Path
    dtype: torch.dtype
    change: Callable[[Any], Any] = lambda model: model
    adapter: Path | None = None

    def loaded(self) -> Any:
        return self.change(engine_models.loaded(self.folder, self.dtype, self.adapter))

    def in_float64(self) -> Any:
        """The model with the same rounded weights, for arithmetic in float64."""
        return self.change(engine_models.loaded(self.folder, self.dtype, self.adapter).double())


PRODUCTS = 1 << 40
"""Parameters times tokens that are judged, about: of more than that, rows at even distances. Statistics are of all rows."""
QUANTILES = (0.5, 0.9, 0.99, 1.0)
RARE = 9 * math.log(10)
"""-log of the probability with which tokens that were drawn are said not to be, at most."""
TILTS = tuple(sign / size for size in (2, 8, 32, 128) for sign in (1, -1))
DEFINITIONS = {
    "truncated": "at the temperature, over what top-p and top-k keep: the distribution that was sampled from",
    "full": "at the temperature, over the whole vocabulary: what TRL's trainer computes",
}
"""What a sampler's log-probs may be meant to be."""
WORDS = {"without one": "mass of the kept tokens but the last (below top-p)"}
"""Quantities of `_defined` whose name says too little, and what a reader is told."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one recording."""

    definition: str  # of `DEFINITIONS`: what its log-probs are held to be
    judgements: Mapping[str, Judgement]  # quantity of `_defined` -> its judgement
    # of the sampled tokens, trainer minus sampler in nats; NaN where the sampler has none, infinite where the trainer's
    # top-p or top-k excludes the token
    log_ratios: Tensor
    explanation: str | None  # what explains a disagreement, by the causes of a watched run
    off: str = ""  # of a disagreement: how many tokens are off, and where
    undrawn: str = ""  # how the tokens show that they were not drawn from the distribution

    @property
    def agrees(self) -> bool:
        return all(j.agrees for j in self.judgements.values())

    @property
    def worst(self) -> str:
        return max(self.judgements, key=lambda name: self.judgements[name].headroom)

    @property
    def fails_by(self) -> str:
        """What fails, in words."""
        return f"fails by {WORDS.get(self.worst, self.worst)}"

    def text(self, recording: Recording) -> str:
        """The judgement, gate by gate, and the statistics; a line each."""
        lines = [
            recording.line(),
            f"  {'agrees' if self.agrees else 'DISAGREES'} as log-probs {DEFINITIONS[self.definition]}",
            "  error ÷ allowed: "
            + ", ".join(f"{WORDS.get(n, n)} {j.headroom:.2f}" for n, j in self.judgements.items()),
        ]
        if not self.agrees:
            cause = f"what fits better: {self.explanation}" if self.explanation else "no known cause"
            cause = "weights were lost by the push" if recording.facts.get("not_pushed") else cause
            lines += [f"  {self.fails_by}; {cause}", *([f"  {self.off}"] if self.off else [])]
        d = self.log_ratios[self.log_ratios.isfinite()]
        cut, unscored = int(self.log_ratios.isinf().sum()), int(self.log_ratios.isnan().sum())
        lines.append(f"  {len(d)} tokens, {unscored} not scored, {cut} that the trainer's top-p or top-k excludes")
        if len(d):
            quantiles = zip(QUANTILES, d.abs().quantile(d.new_tensor(QUANTILES)).tolist(), strict=True)
            lines += [
                "  |log-ratio|: " + ", ".join(f"{100 * q:g} % {v:.2e}" for q, v in quantiles) + f"; rms {rms(d):.2e}",
                f"  mean ratio {float(d.exp().mean()):.6f}, which judges nothing",
                "  " + ", ".join(f"{name} {value:.3g}" for name, value in mismatch(d).items()),
            ]
        return "\n".join(lines)


def judge(recording: Recording, trainer: Trainer, definition: str = "truncated", explain: bool = True) -> Verdict:
    """The recording's sampler log-probs against `trainer`'s, under a definition of `DEFINITIONS`; `explain` a disagreement,
    or ask whether the tokens are drawn ones."""
    f, rows, width = recording.facts, recording.rows(), recording.completion_ids.shape[1]
    sampling = (float(f["temperature"]), float(f["top_p"]), int(f["top_k"]))
    asked = (sampling[0], 1.0, 0) if definition == "full" else sampling
    mask, sampler = recording.mask, recording.sampler_logps
    scores = score(trainer.loaded(), rows, width, sampling, TILTS if explain else ())
    mine = scores.full if definition == "full" else scores.truncated
    found = (mine - sampler.double())[mask]
    model = trainer.in_float64()
    tokens = sum(len(prompt) + len(completion) for prompt, completion in rows)
    every = math.ceil(tokens * sum(p.numel() for p in model.parameters()) / PRODUCTS)  # one row in so many is judged
    scored = mask & ~sampler.isnan() & (torch.arange(len(rows)) % every == 0)[:, None]
    if not bool(scored.any()):
        return Verdict(definition, {"log-probs": failed("no token has a log-prob")}, found, None)
    define = _defined(model, rows, scored, asked, sampler[scored].double())
    products = sum(m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear))
    oracle = dataclasses.replace(measured(model, define), size=int(scored.sum()) * products)
    values = _values(oracle.exact, sampler[scored], asked[1])
    judgements = oracle.judge(values, EAGER.resolve(NAMES[trainer.dtype]))
    verdict = Verdict(definition, judgements, found, None, undrawn=_undrawn(scores, mask, found) if explain else "")
    if verdict.agrees or not explain:
        return verdict
    others = {
        "top-p or top-k is not in them": scores.full,
        "those of the distribution that was sampled from": scores.truncated,
    }

    def rounds(name: str) -> bool:
        """Whether all of it would be right by the rounding of this dtype."""
        return all(j.agrees for j in oracle.judge(values, EAGER.resolve(name)).values())

    there = rows_from(rows, scored, model.device)
    named, off = _causes(trainer.loaded(), there, sampling, mine, sampler, others, trainer.dtype, rounds)
    return dataclasses.replace(verdict, explanation=" or ".join(named) or None, off=off)


def _undrawn(scores: Scores, mask: Tensor, ratios: Tensor) -> str:
    """How tokens (B, T) show that they were not drawn from the trainer's distribution: greedily, or by settings that the
    recording does not name. "" where they may be.

    Of drawn tokens exp(λS - Σ log E[exp(λ(x - E[x]))]), S = Σ (x - E[x]), is a martingale of mean 1 for each λ, above eᴸ with a
    probability of e⁻ᴸ at most. Log-probs that are off by d, the `ratios`, move E[S] by about Σd².
    """
    there = mask & scores.surprise.isfinite()
    total, count = float(scores.surprise[there].sum()), int(there.sum())
    beyond = math.copysign(max(0.0, abs(total) - float(ratios[ratios.isfinite()].square().sum())), total)
    shown = beyond * torch.tensor(TILTS, dtype=torch.float64) - scores.cumulants[there].sum(0)
    if float(shown.max()) <= RARE + math.log(len(TILTS)):
        return ""
    likely = "likelier" if total < 0 else "less likely"
    return f"the {count} tokens are {likely} than drawn ones: -log p is off by {total / count:.2g} nats on average"


def _causes(
    model: Any,
    rows: Rows,
    sampling: Sampling,
    mine: Tensor,
    sampler: Tensor,
    known: Mapping[str, Tensor],
    dtype: torch.dtype,
    rounds: Callable[[str], bool],
) -> tuple[list[str], str]:
    """What explains a difference from `mine` (B, T) down to noise, by the causes of a watched run, `known` ones besides; last,
    the size of arithmetic coarser than `dtype`, if by what `rounds` in it all is right. And which tokens are off."""
    tau = sampling[0]
    with torch.no_grad():
        alone = scoring.score(model, rows, tau)

        def by(rows: Rows, adapted: bool = True) -> Tensor:
            with contextlib.nullcontext() if adapted else model.disable_adapter():
                return scoring.score(model, rows, tau).logps

        def noisy(dtype: torch.dtype | None = None) -> scoring.Scores:
            return dataclasses.replace(scoring.noise(model, rows, tau, alone, dtype), logps=rows.of(mine))

        others: dict[str, Callable[[], Tensor]] = {n: functools.partial(rows.of, x) for n, x in known.items()}
        others |= scoring.bare_head(model, alone, rows.token_ids, tau)
        others |= {text: functools.partial(by, there) for text, there in scoring.begun(model, rows).items()}
        if hasattr(model, "disable_adapter"):
            others["the adapter is left out"] = functools.partial(by, rows, adapted=False)
        found = scoring.Difference(rows.of(sampler), noisy())
        coarser = [d for d in (torch.float16, torch.bfloat16) if torch.finfo(d).eps > torch.finfo(dtype).eps]
        alike = [(NAMES[d], functools.partial(noisy, d)) for d in coarser]
        named = causes.explanations(found, rows, tau, [(sampling[1], sampling[2], 0.0)], others, alike, rounds)
        if sampling[1] < 1 or sampling[2] > 0:  # which the definition has too
            named = [one.replace(causes.KEPT, "other tokens were kept than the recording says") for one in named]
        return named, _place(found.each > LIMIT, rows.picked)


def _place(off: Tensor, picked: Tensor) -> str:
    """How many of the `picked` tokens (B, T) are `off` (n,), in which rows, from which to which place of a completion."""
    there = torch.zeros_like(picked)
    there[picked] = off
    rows, places = (there.any(dim).nonzero()[:, 0].tolist() for dim in (1, 0))
    count = f"{int(off.sum())} of {len(off)} tokens are off by more than {LIMIT:g} times the noise"
    if not rows:
        return count
    which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {int(picked.any(1).sum())} rows"
    if not bool((there & (picked.flip(1).cumsum(1).flip(1) > 1)).any()):
        return f"{count}, in {which}, each the last of its row"
    return f"{count}, in {which}, at tokens {places[0]} to {places[-1]} of the completions, counted from 0"


def _defined(
    model: Any, rows: Pairs, scored: Tensor, sampling: Sampling, sampler: Tensor
) -> Callable[[Any], dict[str, Tensor]]:
    """The definition of the log-probs of the `scored` tokens (B, T), (n,) each; float32 from the logits on.

    log-probs: log p - log K at the temperature, K the mass of the kept tokens. mean: of these, 0-dim. Of what is kept beside
    the sampled token, the likeliest are: outranked is by how much the next is likelier than the sampled one, at most 0. kept:
    the share of K in what top-k leaves, at least top-p; without one: the same without the least likely, less than top-p. tied:
    by how much the k-th token is likelier than the last that top-k keeps, 0: it keeps those that equal the k-th.
    """
    temperature, top_p, top_k = sampling
    wanted = rows_from(rows, scored, model.device)
    token = wanted.token_ids[:, None]
    with torch.no_grad(), as_definition():
        exact = (torch.cat([z for _, z, _ in tables(model, wanted, BATCH)]) / temperature).log_softmax(-1)
    alone, last_k = top_k > 0 and top_p >= 1, min(top_k, exact.shape[-1]) - 1
    order = exact.argsort(dim=-1, descending=True, stable=True)[:, : top_k + TIES * alone or None]
    if alone or top_p < 1:
        choose = functools.partial(_tied, last_k=last_k) if alone else functools.partial(_kept, top_p=top_p)
        kept = choose(exact.gather(-1, order), exact.gather(-1, token), sampler)
    else:
        kept = torch.full_like(token, order.shape[-1] - 1)
    marginal = order.gather(-1, kept)
    last = torch.where((order == token).cumsum(-1).gather(-1, kept) > 0, marginal, token)

    def define(model: Any) -> dict[str, Tensor]:
        logits = torch.cat([z for _, z, _ in tables(model, wanted, BATCH)])
        with in_dtype("fp32"):
            logps = (logits / temperature).log_softmax(-1)
            own = logps.gather(-1, token)
            if top_p >= 1 and not top_k:
                return {"log-probs": own[:, 0], "mean": own.mean()}
            masses = torch.nn.functional.pad(logps.gather(-1, order).exp().cumsum(-1), (1, 0))
            before = masses.gather(-1, kept)
            mass = before + logps.gather(-1, last).exp()
            out = {"log-probs": own - mass.log(), "outranked": logps.gather(-1, marginal) - own}
            if top_p < 1:
                out |= {"kept": mass / masses[:, -1:], "without one": before / masses[:, -1:]}
            elif alone:
                out["tied"] = logps.gather(-1, order[:, last_k, None]) - logps.gather(-1, marginal)
            return {name: value[:, 0] for name, value in out.items()} | {"mean": out["log-probs"].mean()}

    return define


def _tied(inside: Tensor, own: Tensor, sampler: Tensor, last_k: int) -> Tensor:
    """`_kept` where top-k alone decides: as many as k, and those that rounding may make equal to the k-th, at `last_k`."""
    mass, _ = _sums(inside)
    off = _off(own - mass, ((2 * inside).logcumsumexp(-1) - 2 * mass).exp(), sampler)
    explained = [off, (inside[:, last_k, None] - inside) / math.sqrt(2), (inside - own) / math.sqrt(2)]
    worst = torch.stack(explained).amax(0)
    worst[:, :last_k] = torch.inf
    return worst.argmin(-1, keepdim=True)


def _off(logp: Tensor, alike: Tensor, sampler: Tensor) -> Tensor:
    """How far log-probs (n, k) within sets of tokens are from the engine's (n,), in errors of logits; `alike`: Σq² of each."""
    noise = (1 - 2 * logp.exp() + alike).clamp(min=torch.finfo(torch.float32).eps ** 2).sqrt()
    return (logp - sampler[:, None]).abs() / noise


def _kept(inside: Tensor, own: Tensor, sampler: Tensor, top_p: float) -> Tensor:
    """How many tokens an engine kept before the last one, (n, 1), read from its log-probs (n,) of the sampled tokens.

    `inside` (n, k): exact log-probs, likeliest first; `own` (n, 1): of the sampled token.

    Where the mass of the likeliest tokens is near top-p, rounding decides what is kept, and with it every log-prob at that
    position: either set is right. The set is taken that the smallest errors of logits explain, where these are independent
    and alike, their standard deviation ε. With p = q·K, to first order, a log-prob within the set is then off by
    ε·√(1 - 2q + Σq²), the log-odds of the set's mass K by ε·√(Σp²/K² + Σ'p²/(1 - K)²), Σ' over the tokens outside, and the
    difference of two log-probs by ε·√2.
    """
    total = inside.logsumexp(-1, keepdim=True)
    mass, rest = _sums(inside - total)
    squares, other_squares = _sums(2 * (inside - total))
    logp, alike = own - total - mass, (squares - 2 * mass).exp()
    far = (math.log(top_p / (1 - top_p)) - mass + rest) / (alike + (other_squares - 2 * rest).exp()).sqrt()
    far[:, -1] = -torch.inf  # all of them
    explained = [
        _off(logp, alike, sampler),
        far,
        torch.nn.functional.pad(-far[:, :-1], (1, 0), value=-torch.inf),
        (inside - own) / math.sqrt(2),
    ]
    return torch.stack(explained).amax(0).argmin(-1, keepdim=True)


def _sums(logs: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exp(logs) up to each entry of a row, and behind it."""
    behind = logs.flip(-1).logcumsumexp(-1).flip(-1)[:, 1:]
    return logs.logcumsumexp(-1), torch.nn.functional.pad(behind, (0, 1), value=-torch.inf)


def _values(exact: Mapping[str, Tensor], sampler: Tensor, top_p: float) -> dict[str, Tensor]:
    """What an engine says, and of a limit what keeps it and is nearest to the exact value."""
    bounds = {"kept": (top_p, None), "without one": (None, top_p), "outranked": (None, 0.0), "tied": (None, 0.0)}
    out = {name: exact[name].clamp(*bounds[name]).float() for name in exact if name in bounds}
    return {"log-probs": sampler, "mean": sampler.double().mean().float(), **out}


def trainer_of(recording: Recording, model: str | None, adapter: Path | None) -> Trainer:
    """The model by name or folder, the recording's by default, and a PEFT adapter on it. Raises UsageError where there is no
    such model, or where it is not the recording's own and has other weights."""
    folder = engine_models.folder_of(model or str(recording.facts["model"]))
    if model is None and engine_models.weights_hash(folder) != recording.facts["weights"]:
        raise UsageError(f"{recording.name}: {folder} has other weights than recorded; name the trainer's with --model")
    return Trainer(folder, DTYPES[str(recording.facts["dtype"])], adapter=adapter)
