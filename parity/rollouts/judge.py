"""An engine's log-probs against their definition: the trainer's model in float64, and replicas of it in the trainer's dtype.

The mean ratio judges nothing: by E_s[π/s] = 1 it is 1 for every trainer, right or wrong.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.judge.escalation import CERTAIN, escalate, ladder
from parity.judge.gates import ROW, Judgement, Unit, failed
from parity.judge.gates import judge as judge_value
from parity.judge.recipe import DTYPES, EAGER, NAMES, UNIT_ROUNDOFF
from parity.recording import Recording
from parity.rollouts import engine_models
from parity.rollouts.trainer_scores import Rows, Sampling, Trainer
from parity.trainers.definitions.training_step import measured

STRETCHES = 4
QUANTILES = (0.5, 0.9, 0.99, 1.0)
LOGITS = 1 << 26
"""Logits that are held at a time, about."""
PRODUCTS = 1 << 40
"""Parameters times tokens that are judged, about: of more than that, rows at even distances. Statistics are of all rows."""
DEFINITIONS = {
    "truncated": "at the temperature, over what top-p and top-k keep: the distribution that was sampled from",
    "full": "at the temperature, over the whole vocabulary: what TRL's trainer computes",
}
"""What a sampler's log-probs may be meant to be."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of the log-ratios d, trainer minus sampler in nats.

    Attributes:
        tokens, sequences: the tokens judged, and the rows that have one.
        unscored, cut: tokens that the sampler has no log-prob for; that the trainer's top-p or top-k excludes.
        quantiles: of |d|, at `QUANTILES`.
        rms, mean: √mean d², mean d.
        mean_ratio: mean exp(d), which judges nothing.
        by_position: "1-8" -> rms of the tokens there, of at least 30.
    """

    tokens: int
    sequences: int
    unscored: int
    cut: int
    quantiles: tuple[float, ...]
    rms: float
    mean: float
    mean_ratio: float
    by_position: Mapping[str, float]


def statistics(d: Tensor, mask: Tensor) -> Statistics:
    """`Statistics` of d (B, T) under the mask (B, T): NaN where the sampler has none, infinite where the trainer excludes it."""
    scored = mask & ~d.isnan()
    finite = scored & d.isfinite()
    values = d[finite]
    n = max(len(values), 1)
    nothing = (math.nan,) * len(QUANTILES)
    return Statistics(
        tokens=len(values),
        sequences=int(finite.any(-1).sum()),
        unscored=int((mask & d.isnan()).sum()),
        cut=int((scored & ~d.isfinite()).sum()),
        quantiles=tuple(values.abs().quantile(d.new_tensor(QUANTILES)).tolist()) if len(values) else nothing,
        rms=rms(values),
        mean=float(values.sum() / n),
        mean_ratio=float(values.exp().sum() / n),
        by_position=_by_position(d, finite),
    )


def _by_position(d: Tensor, finite: Tensor) -> dict[str, float]:
    width = d.shape[1]
    ends = sorted({round(width * k / STRETCHES) for k in range(STRETCHES + 1)})
    parts = {f"{a + 1}-{b}": d[:, a:b][finite[:, a:b]] for a, b in itertools.pairwise(ends)}
    return {label: rms(values) for label, values in parts.items() if len(values) >= 30}


def rms(values: Tensor) -> float:
    """√mean x² of the finite ones, 0 of nothing."""
    values = values[values.isfinite()]
    return float(values.square().mean().sqrt()) if len(values) else 0.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one recording.

    Attributes:
        definition: of `DEFINITIONS`: what its log-probs are held to be.
        judgements: quantity of `_defined` -> its judgement.
        unit: rms of the trainer's own error, nats.
        found: the statistics.
        fits: other explanation -> rms of the sampler's log-probs against it, best first.
        coarser: a dtype in which they would be right, where that is coarser than the trainer's.
    """

    definition: str
    judgements: Mapping[str, Judgement]
    unit: float
    found: Statistics
    fits: Mapping[str, float]
    coarser: str | None

    @property
    def agrees(self) -> bool:
        """Whether every quantity agrees."""
        return all(j.agrees for j in self.judgements.values())

    @property
    def gates(self) -> dict[str, float]:
        """Quantity -> error ÷ allowed."""
        return {name: j.headroom for name, j in self.judgements.items()}

    @property
    def worst(self) -> str:
        """The quantity with the largest error ÷ allowed."""
        return max(self.gates, key=lambda name: self.gates[name])

    @property
    def explanation(self) -> str | None:
        """What explains a disagreement: it has at most half the rms, or is another dtype's rounding. Else None."""
        name = min(self.fits, key=lambda n: self.fits[n], default=None)
        if name is not None and self.fits[name] <= 0.5 * self.found.rms:
            return name
        return self.coarser and f"as far apart as the arithmetic of {self.coarser}"

    def text(self, recording: Recording) -> str:
        """The judgement, gate by gate, and the statistics; a line each."""
        s = self.found
        lines = [
            recording.line(),
            f"  {'agrees' if self.agrees else 'DISAGREES'} as log-probs {DEFINITIONS[self.definition]}",
            "  error ÷ allowed: " + ", ".join(f"{n} {h:.2f}" for n, h in self.gates.items()),
        ]
        if not self.agrees:
            cause = self.explanation or "nothing that was tried: other weights, or another computation"
            lines.append(f"  fails by {self.worst}; what fits better: {cause}")
            lines += [f"    rms {value:.2e} against: {name}" for name, value in self.fits.items()]
        quantiles = ", ".join(f"{100 * q:g} % {v:.2e}" for q, v in zip(QUANTILES, s.quantiles, strict=True))
        return "\n".join(
            [
                *lines,
                f"  {s.tokens} tokens, {s.unscored} not scored, {s.cut} that the trainer's top-p or top-k excludes",
                f"  |log-ratio|: {quantiles}; rms {s.rms:.2e}, mean {s.mean:+.1e}; the trainer's own error {self.unit:.1e}",
                f"  mean ratio {s.mean_ratio:.6f}, which judges nothing",
                "  rms by position: " + ", ".join(f"{n} {v:.1e}" for n, v in s.by_position.items()),
            ]
        )


def judge(recording: Recording, trainer: Trainer, definition: str = "truncated") -> Verdict:
    """The recording's sampler log-probs against `trainer`'s, under a definition of `DEFINITIONS`."""
    f, rows, width = recording.facts, recording.rows(), recording.completion_ids.shape[1]
    sampling = (float(f["temperature"]), float(f["top_p"]), int(f["top_k"]))
    asked = (sampling[0], 1.0, 0) if definition == "full" else sampling
    mask, sampler = recording.mask, recording.sampler_logps
    mine = trainer.score(rows, width, asked).truncated
    found = statistics(mine - sampler.double(), mask)
    scored = mask & ~sampler.isnan()
    model = trainer.in_float64()
    scored[torch.arange(len(rows)) % _every(model, rows) != 0] = False
    if not bool(scored.any()):
        return Verdict(definition, {"log-probs": failed("no token has a log-prob")}, 0.0, found, {}, None)
    define, masses, size = _defined(model, rows, scored, asked)
    oracle = measured(model, define)

    def judgements(dtype: torch.dtype) -> dict[str, Judgement]:
        recipe = EAGER.resolve(NAMES[dtype])

        def judge_with(count: int, finer: bool, names: Collection[str] | None) -> dict[str, Judgement]:
            units = {name: oracle.unit(name, recipe, count) for name in oracle.exact}
            values = _nearest(sampler[scored], units, masses, sampling[1])
            return {name: judge_value(value.float(), units[name], torch.float32) for name, value in values.items()}

        return escalate(judge_with, ladder(size), certain=CERTAIN)

    judged = judgements(trainer.dtype)
    fits: dict[str, float] = {}
    coarser = None
    if not all(j.agrees for j in judged.values()):
        fits = explanations(recording, trainer, sampling, mine)
        wider = [d for d in (torch.float16, torch.bfloat16) if torch.finfo(d).eps > torch.finfo(trainer.dtype).eps]
        explaining = (NAMES[d] for d in wider if all(j.agrees for j in judgements(d).values()))
        coarser = next(explaining, None)
    return Verdict(definition, judged, rms(mine[scored] - oracle.exact["log-probs"]), found, fits, coarser)


def _every(model: Any, rows: Rows) -> int:
    """One row in so many is judged."""
    tokens = sum(len(prompt) + len(completion) for prompt, completion in rows)
    return math.ceil(tokens * sum(p.numel() for p in model.parameters()) / PRODUCTS)


def _defined(
    model: Any, rows: Rows, scored: Tensor, sampling: Sampling
) -> tuple[Callable[[Any], dict[str, Tensor]], Tensor | None, int]:
    """What defines the log-probs of the `scored` tokens; `_masses` of the exact order; the entries of all products.

    log-probs: log p - log Σ p over the kept tokens, at the temperature. mean: of these. What is kept is counted in the order
    of the exact probabilities, and reaches to the token itself: kept is their mass. likelier: the mass of the tokens that are
    likelier than the sampled one, less than top-p where it is not excluded. ahead: by how much the last of top-k is likelier,
    at most 0. A row stands at the left, and needs no mask.
    """
    temperature, top_p, top_k = sampling
    length = max(len(p) + len(c) for p, c in rows)
    ids = torch.tensor([[*p, *c, *[0] * (length - len(p) - len(c))] for p, c in rows])
    row, place = scored.nonzero(as_tuple=True)
    at = torch.tensor([len(p) - 1 for p, _ in rows])[row] + place
    token = ids[row, at + 1]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    size = ids.numel() * sum(m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear))
    parts = row.div(max(1, LOGITS // (length * vocabulary)), rounding_mode="floor")

    def logps(model: Any) -> Tensor:
        out = []
        for part in parts.unique():
            inside, first = parts == part, int(row[parts == part][0])
            z = model(input_ids=ids[first : int(row[inside][-1]) + 1]).logits
            out.append(torch.log_softmax(z[row[inside] - first, at[inside]] / temperature, -1))
        return torch.cat(out)

    if top_p >= 1 and not top_k:

        def whole(model: Any) -> dict[str, Tensor]:
            found = logps(model).gather(-1, token[:, None])[:, 0]
            return {"log-probs": found, "mean": found.mean()}

        return whole, None, size
    with torch.no_grad():
        order = logps(model).argsort(dim=-1, descending=True, stable=True)[:, : top_k or None]
        masses = _masses(logps(model), order)
    rank = (order == token[:, None]).int().argmax(-1)
    kept = torch.maximum((masses[:, :-1] < min(top_p, 1.0)).sum(-1), rank + 1)

    def truncated(model: Any) -> dict[str, Tensor]:
        every = logps(model)
        own = every.gather(-1, token[:, None])[:, 0]
        mass = _masses(every, order)
        ahead = every.gather(-1, order) > own[:, None]
        out = {"kept": mass.gather(-1, kept[:, None])[:, 0], "likelier": (mass.diff(dim=-1) * ahead).sum(-1)}
        total = torch.logsumexp(every.gather(-1, order), -1)
        out["log-probs"] = own - total - out["kept"].log()
        if top_k:
            out["ahead"] = every.gather(-1, order[:, -1:])[:, 0] - own
        return out | {"mean": out["log-probs"].mean()}

    return truncated, masses, size


def _masses(logps: Tensor, order: Tensor) -> Tensor:
    """(n, k + 1): the probability of the first 0, 1, … tokens of an order, of all k."""
    p = torch.softmax(logps.gather(-1, order), -1)
    return torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(-1)], -1)


def _nearest(sampler: Tensor, units: Mapping[str, Unit], masses: Tensor | None, top_p: float) -> dict[str, Tensor]:
    """The values of an engine: its log-probs, and what is nearest to the exact value among those that it may have had.

    Where rounding decides whether the mass of some tokens reaches top-p, the engine may have kept these or others.
    """
    exact = {name: unit.exact for name, unit in units.items()}
    out, value = dict[str, Tensor](), sampler.double()
    if masses is not None:
        kept = exact["kept"]
        room = ROW * torch.maximum(units["kept"].errors.rows[0], UNIT_ROUNDOFF["fp32"] * kept)[:, None]
        may = (masses[:, 1:] + room >= top_p) & (masses[:, :-1] - room < top_p)
        wanted = (kept * (exact["log-probs"] - value).exp())[:, None]
        at = torch.where(may, (masses[:, 1:] - wanted).abs(), torch.inf).argmin(-1, keepdim=True)
        other = value + (masses[:, 1:].gather(-1, at)[:, 0] / kept).log()
        nearer = (other - exact["log-probs"]).abs() < (value - exact["log-probs"]).abs()
        value = torch.where(nearer & may.any(-1), other, value)
        out["likelier"] = exact["likelier"].clamp(max=top_p)
    if "ahead" in exact:
        out["ahead"] = exact["ahead"].clamp(max=0.0)
    return {"log-probs": value, "mean": value.mean(), **out}


def judged(recording: Recording, model: str | None, adapter: Path | None, support: str) -> Verdict:
    """`judge` with the model by name or folder, and a PEFT adapter on it.

    Raises:
        UsageError: where there is no such model, or where it is not the recording's own and has other weights.
    """
    folder = engine_models.folder_of(model or str(recording.facts["model"]))
    if model is None and engine_models.weights_hash(folder) != recording.facts["weights"]:
        raise UsageError(
            f"{recording.name}: {folder} has other weights than were recorded; name the trainer's with --model"
        )

    def adapted(loaded: Any) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(loaded, adapter)

    trainer = Trainer(folder, DTYPES[str(recording.facts["dtype"])])
    if adapter is not None:
        trainer = dataclasses.replace(trainer, change=adapted)
    return judge(recording, trainer, support)


def explanations(recording: Recording, trainer: Trainer, sampling: Sampling, mine: Tensor) -> dict[str, float]:
    """What else the sampler's log-probs may be -> rms against it, best first. `mine` (B, T): what they are not."""
    rows, width, mask = recording.rows(), recording.completion_ids.shape[1], recording.mask
    candidates: dict[str, Tensor] = {}
    if sampling != (1.0, 1.0, 0):
        raw = trainer.score(rows, width, (1.0, 1.0, 0)).full
        candidates["raw log-probs: the temperature is not in them"] = raw
    if recording.truncated:
        scores = trainer.score(rows, width, sampling)
        candidates["top-p or top-k is not in them"] = scores.full
        candidates["those of the distribution that was sampled from"] = scores.truncated
    nothing = mine.new_full((len(mine), 1), math.nan)
    candidates["each belongs to the token before it"] = torch.cat([nothing, mine[:, :-1]], 1)
    after = torch.where(mask, mine, math.nan)
    candidates["each belongs to the token after it"] = torch.cat([after[:, 1:], nothing], 1)
    if engine_models.softcap(trainer.folder) is not None:
        uncapped = dataclasses.replace(trainer, change=lambda model: without_softcap(trainer.change(model)))
        candidates["a softcap of the logits is missing"] = uncapped.score(rows, width, sampling).truncated
    sampler = recording.sampler_logps.double()
    out = {name: rms((logps - sampler)[mask]) for name, logps in candidates.items()}
    return dict(sorted(out.items(), key=lambda item: item[1]))


def without_softcap(model: Any) -> Any:
    """The model, its softcap on logits off."""
    model.config.get_text_config().final_logit_softcapping = None
    return model
