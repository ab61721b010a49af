"""An engine's log-probs against their definition: the trainer's model in float64, and replicas of it in the trainer's dtype.

The mean ratio judges nothing: by E_s[π/s] = 1 it is 1 for every trainer, right or wrong.
"""

from __future__ import annotations  # a watched run needs the statistics alone, without msgspec

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.judge.gates import Judgement, failed
from parity.judge.operations import as_definition
from parity.judge.recipe import DTYPES, EAGER, NAMES
from parity.judge.stages import in_dtype
from parity.rollouts import causes, engine_models, scoring
from parity.rollouts.scoring import Rows, kept_mass, rms, rows_from, tables

if TYPE_CHECKING:
    from parity.recording import Recording

Pairs = Sequence[tuple[list[int], list[int]]]  # prompt and completion
Sampling = tuple[float, float, int]  # temperature, top-p (1: none), top-k (0: none)
BATCH = 16


@dataclasses.dataclass(frozen=True)
class Scores:
    """(B, T) float64 each: log-prob over the whole vocabulary, the kept mass under top-p and top-k (0: token cut), and the
    log-prob of the likeliest token."""

    full: Tensor
    kept: Tensor
    likeliest: Tensor

    @property
    def truncated(self) -> Tensor:
        """log p - log K within the kept set, the log-prob of truncated sampling; -inf outside."""
        return torch.where(self.kept > 0, self.full - self.kept.log(), -torch.inf)


def score(model: Any, rows: Pairs, width: int, sampling: Sampling) -> Scores:
    """Log-probs of the completions of `rows` by `model`, zero behind a row's end. Temperature, then top-k, then top-p,
    as vLLM and transformers have it. Logits leave the model in its own dtype; the log-softmax is taken in float64, so
    that what differs is the model's own. Raises UsageError where a logit is NaN."""
    temperature, top_p, top_k = sampling
    full, likeliest, kept = (torch.full((len(rows), width), x, dtype=torch.float64) for x in (0.0, 0.0, 1.0))
    lengths = torch.tensor([len(completion) for _, completion in rows])
    whole = rows_from(rows, torch.arange(width) < lengths[:, None], model.device)
    with torch.no_grad():
        for i, logits, _ in tables(model, whole, BATCH):
            if bool(logits.isnan().any()):
                raise UsageError(f"row {i}: the trainer's logits are NaN")
            place, ids = (i, whole.picked[i]), whole.ids[i][whole.places[i]].cpu()
            logps = (logits.cpu().double() / temperature).log_softmax(-1)
            full[place] = logps.gather(-1, ids[:, None])[:, 0]
            kept[place], likeliest[place] = kept_mass(logps, ids, top_p, top_k), logps.amax(-1)
    return Scores(full, kept, likeliest)


def mismatch(differences: Tensor) -> dict[str, float]:
    """Means over log-ratios d, trainer minus sampler: mismatch_kl = -d, k3 = exp d - d - 1, both estimates of KL(sampler ‖
    trainer), and exp|d|."""
    d = differences
    measured = {"mismatch_kl": -d, "k3": d.exp() - d - 1, "mean_exp_abs_difference": d.abs().exp()}
    return {name: float(x.mean()) for name, x in measured.items()}


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The model whose log-probs the sampler's are held against. `folder`: where the model lies; `dtype`: of its weights
    and arithmetic; `change`: what happens to the model after it is loaded: an adapter, a step of training."""

    folder: Path
    dtype: torch.dtype
    change: Callable[[Any], Any] = lambda model: model

    def score(self, rows: Pairs, width: int, sampling: Sampling) -> Scores:
        return score(self.loaded(), rows, width, sampling)

    def loaded(self) -> Any:
        return self.change(engine_models.loaded(self.folder, self.dtype))

    def in_float64(self) -> Any:
        """The model with the same rounded weights, for arithmetic in float64."""
        return self.change(engine_models.loaded(self.folder, self.dtype).double())


PRODUCTS = 1 << 40
"""Parameters times tokens that are judged, about: of more than that, rows at even distances. Statistics are of all rows."""
ALIKE = 0.1
"""Share of what a dtype's rounding is allowed, three times its rms, from which a difference is as large as that rounding."""
QUANTILES = (0.5, 0.9, 0.99, 1.0)
DEFINITIONS = {
    "truncated": "at the temperature, over what top-p and top-k keep: the distribution that was sampled from",
    "full": "at the temperature, over the whole vocabulary: what TRL's trainer computes",
}
"""What a sampler's log-probs may be meant to be."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one recording."""

    definition: str  # of `DEFINITIONS`: what its log-probs are held to be
    judgements: Mapping[str, Judgement]  # quantity of `_defined` -> its judgement
    # of the sampled tokens, trainer minus sampler in nats; NaN where the sampler has none, infinite where the trainer's
    # top-p or top-k excludes the token
    log_ratios: Tensor
    fits: Mapping[str, float]  # other explanation -> rms of the sampler's log-probs against it, best first
    # what explains a disagreement: it leaves at most half the rms and no more than is allowed; or another dtype's rounding
    # that is as large, whatever the cause
    explanation: str | None

    @property
    def agrees(self) -> bool:
        return all(j.agrees for j in self.judgements.values())

    @property
    def worst(self) -> str:
        return max(self.judgements, key=lambda name: self.judgements[name].headroom)

    def text(self, recording: Recording) -> str:
        """The judgement, gate by gate, and the statistics; a line each."""
        lines = [
            recording.line(),
            f"  {'agrees' if self.agrees else 'DISAGREES'} as log-probs {DEFINITIONS[self.definition]}",
            "  error ÷ allowed: " + ", ".join(f"{n} {j.headroom:.2f}" for n, j in self.judgements.items()),
        ]
        if not self.agrees:
            cause = self.explanation or "nothing that was tried: other weights, or another computation"
            lines.append(f"  fails by {self.worst}; what fits better: {cause}")
            lines += [f"    rms {value:.2e} against: {name}" for name, value in self.fits.items()]
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


def judge(recording: Recording, trainer: Trainer, definition: str = "truncated") -> Verdict:
    """The recording's sampler log-probs against `trainer`'s, under a definition of `DEFINITIONS`."""
    from parity.trainers.definitions.training_step import measured

    f, rows, width = recording.facts, recording.rows(), recording.completion_ids.shape[1]
    sampling = (float(f["temperature"]), float(f["top_p"]), int(f["top_k"]))
    asked = (sampling[0], 1.0, 0) if definition == "full" else sampling
    mask, sampler = recording.mask, recording.sampler_logps
    scores = trainer.score(rows, width, asked)
    mine = scores.truncated
    found = (mine - sampler.double())[mask]
    model = trainer.in_float64()
    tokens = sum(len(prompt) + len(completion) for prompt, completion in rows)
    every = math.ceil(tokens * sum(p.numel() for p in model.parameters()) / PRODUCTS)  # one row in so many is judged
    scored = mask & ~sampler.isnan() & (torch.arange(len(rows)) % every == 0)[:, None]
    if not bool(scored.any()):
        return Verdict(definition, {"log-probs": failed("no token has a log-prob")}, found, {}, None)
    define = _defined(model, rows, scored, asked, sampler[scored].double())
    products = sum(m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear))
    oracle = dataclasses.replace(measured(model, define), size=int(scored.sum()) * products)
    values = _values(oracle.exact, sampler[scored], asked[1])
    judgements = oracle.judge(values, EAGER.resolve(NAMES[trainer.dtype]))
    if all(j.agrees for j in judgements.values()):
        return Verdict(definition, judgements, found, {}, None)
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    fits = explanations(recording, trainer, sampling, scores, capped)
    best, error = next(iter(fits), None), max(2.0, judgements["log-probs"].gates.get("norm", 0.0))
    if best and fits[best] * error <= rms(found[found.isfinite()]):  # down to what rounding is allowed
        return Verdict(definition, judgements, found, fits, best)
    if asked[1:] == (1.0, 0) and (did := _undeclared(trainer, rows_from(rows, scored, model.device), asked, sampler)):
        return Verdict(definition, judgements, found, fits, "; ".join(did))
    for dtype in (torch.float16, torch.bfloat16):
        if torch.finfo(dtype).eps > torch.finfo(trainer.dtype).eps:
            again = oracle.judge(values, EAGER.resolve(NAMES[dtype]))
            if all(j.agrees for j in again.values()) and again["log-probs"].gates["norm"] > ALIKE:
                return Verdict(definition, judgements, found, fits, causes.alike(NAMES[dtype]))
    return Verdict(definition, judgements, found, fits, None)


def _defined(
    model: Any, rows: Pairs, scored: Tensor, sampling: Sampling, sampler: Tensor
) -> Callable[[Any], dict[str, Tensor]]:
    """The definition of the log-probs of the `scored` tokens (B, T), (n,) each; float32 from the logits on.

    log-probs: log p - log K at the temperature, K the mass of the kept tokens. mean: of these, 0-dim. Of what is kept beside
    the sampled token, the likeliest are: outranked is by how much the next is likelier than the sampled one, at most 0. kept:
    the share of K in what top-k leaves, at least top-p; without one: the same without the least likely, less than top-p.
    """
    temperature, top_p, top_k = sampling
    wanted = rows_from(rows, scored, model.device)
    token = wanted.token_ids[:, None]
    with torch.no_grad(), as_definition():
        exact = (torch.cat([z for _, z, _ in tables(model, wanted, BATCH)]) / temperature).log_softmax(-1)
    order = exact.argsort(dim=-1, descending=True, stable=True)[:, : top_k or None]
    if top_p < 1:
        kept = _kept(exact.gather(-1, order), exact.gather(-1, token), sampler, top_p)
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
            return {name: value[:, 0] for name, value in out.items()} | {"mean": out["log-probs"].mean()}

    return define


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
    noise = (1 - 2 * logp.exp() + alike).clamp(min=torch.finfo(torch.float32).eps ** 2).sqrt()
    explained = [
        (logp - sampler[:, None]).abs() / noise,
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
    bounds = {"kept": (top_p, None), "without one": (None, top_p), "outranked": (None, 0.0)}
    out = {name: exact[name].clamp(*bounds[name]).float() for name in exact if name in bounds}
    return {"log-probs": sampler, "mean": sampler.double().mean().float(), **out}


def judged(recording: Recording, model: str | None, adapter: Path | None, support: str) -> Verdict:
    """`judge` with the model by name or folder, and a PEFT adapter on it. Raises UsageError where there is no such
    model, or where it is not the recording's own and has other weights."""
    folder = engine_models.folder_of(model or str(recording.facts["model"]))
    if model is None and engine_models.weights_hash(folder) != recording.facts["weights"]:
        raise UsageError(f"{recording.name}: {folder} has other weights than recorded; name the trainer's with --model")
    trainer = Trainer(folder, DTYPES[str(recording.facts["dtype"])])
    if adapter is not None:
        from peft import PeftModel

        trainer = dataclasses.replace(trainer, change=lambda loaded: PeftModel.from_pretrained(loaded, adapter))
    return judge(recording, trainer, support)


def explanations(
    recording: Recording, trainer: Trainer, sampling: Sampling, scores: Scores, capped: bool
) -> dict[str, float]:
    """What else the sampler's log-probs may be -> rms against it, best first. `scores`: what they are not.
    `capped`: whether the model has a softcap on its logits."""
    rows, width, mask, mine = recording.rows(), recording.completion_ids.shape[1], recording.mask, scores.truncated
    sampler, candidates = recording.sampler_logps.double(), dict[str, Tensor]()
    if sampling[0] != 1:
        raw = trainer.score(rows, width, (1.0, 1.0, 0)).full
        candidates["raw log-probs: the temperature is not in them"] = raw
    if recording.truncated:
        cut = trainer.score(rows, width, sampling)
        candidates["top-p or top-k is not in them"] = cut.full
        candidates["those of the distribution that was sampled from"] = cut.truncated
    nothing = mine.new_full((len(mine), 1), math.nan)
    candidates["each belongs to the token before it"] = torch.cat([nothing, mine[:, :-1]], 1)
    after = torch.where(mask, mine, math.nan)
    candidates["each belongs to the token after it"] = torch.cat([after[:, 1:], nothing], 1)
    if capped:
        uncapped = dataclasses.replace(trainer, change=lambda model: without_softcap(trainer.change(model)))
        candidates["a softcap of the logits is missing"] = uncapped.score(rows, width, sampling).truncated
    candidates["missing ones are filled with 0"] = mine.masked_fill(sampler == 0, 0.0)
    candidates["those of the likeliest token"] = mine - scores.full + scores.likeliest
    others = {name: logps for name, logps in candidates.items() if not torch.equal(logps[mask], mine[mask])}
    differences = {name: (logps - sampler)[mask] for name, logps in others.items()}
    out = {name: rms(d[d.isfinite()]) for name, d in differences.items() if bool(d.isfinite().any())}
    return dict(sorted(out.items(), key=lambda item: item[1]))


def _undeclared(trainer: Trainer, rows: Rows, sampling: Sampling, sampler: Tensor) -> list[str]:
    """What a sampler did that the recording does not say, by the causes of a watched run, down to noise."""
    model = trainer.loaded()
    with torch.no_grad():
        alone = scoring.score(model, rows, sampling[0])
        own = scoring.noise(model, rows, sampling[0], alone)
    found = scoring.Difference(rows.of(sampler), own)
    return causes.explanations(found, rows, sampling[0], [(sampling[1], sampling[2], 0.0)], {}, {})


def without_softcap(model: Any) -> Any:
    model.config.get_text_config().final_logit_softcapping = None
    return model
