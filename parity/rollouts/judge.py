"""An engine's log-probs against the trainer's, in units of the trainer's own error.

The unit is not chosen: the trainer scores the same tokens in its dtype, and with the same weights in float64; the
difference is its rounding. An engine that computes the same function differs from it by the rounding of both, √2 of one if
the two are alike; `FACTOR` grants an engine twice the trainer's error. Five gates, all of which must hold. The mean ratio
is none of them: by E_s[π/s] = 1 it is 1 for every trainer, right or wrong.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.judge.recipe import DTYPES, NAMES
from parity.recording import Recording
from parity.rollouts import engine_models
from parity.rollouts.trainer_scores import Sampling, Trainer

FACTOR = 2 * math.sqrt(2)
POSITION = 1.5
"""A stretch holds a quarter of the tokens, and late ones read more rounded context: their rms may be so much larger."""
STRETCHES = 4
QUANTILES = (0.5, 0.9, 0.99, 1.0)
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
        gates: gate -> error ÷ allowed; above 1 disagrees.
        unit: rms of the trainer's own error, nats.
        found: the statistics.
        fits: other explanation -> rms of the sampler's log-probs against it, best first.
        coarser: a dtype whose rounding is as large as the difference, where that is coarser than the trainer's.
    """

    definition: str
    gates: Mapping[str, float]
    unit: float
    found: Statistics
    fits: Mapping[str, float]
    coarser: str | None

    @property
    def agrees(self) -> bool:
        """Whether every gate holds."""
        return all(h <= 1.0 for h in self.gates.values())

    @property
    def worst(self) -> str:
        """The gate with the largest error ÷ allowed."""
        return max(self.gates, key=lambda name: self.gates[name])

    @property
    def explanation(self) -> str | None:
        """What explains a disagreement: it has at most half the rms, or the size of another dtype's rounding. Else None."""
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
    mask, sampler = recording.mask, recording.sampler_logps.double()
    mine, exact = trainer.score(rows, width, asked).truncated, trainer.exact(rows, width, asked).truncated
    found = statistics(mine - sampler, mask)
    impossible = not found.tokens or bool((mask & (sampler > 1e-4)).any())
    gates = _gates(found, mine - exact, mask, impossible)
    fits: dict[str, float] = {}
    coarser = None
    if any(h > 1.0 for h in gates.values()):
        fits = explanations(recording, trainer, sampling, mine)
        for dtype in (torch.bfloat16, torch.float16):
            if torch.finfo(dtype).eps > torch.finfo(trainer.dtype).eps:
                error = dataclasses.replace(trainer, dtype=dtype).score(rows, width, asked).truncated - exact
                same = all(h <= 1.0 for h in _gates(found, error, mask, impossible).values())
                coarser = NAMES[dtype] if same and found.rms * FACTOR > rms(error[mask]) else coarser
    return Verdict(definition, gates, rms((mine - exact)[mask]), found, fits, coarser)


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


def _gates(found: Statistics, error: Tensor, mask: Tensor, impossible: bool) -> dict[str, float]:
    """Error ÷ allowed of each gate; `error` (B, T) is the trainer's own.

    size: rms d. tail: 99 % quantile of |d|. position: the largest rms of a stretch of positions. mean: |mean d|, allowed
    three standard errors with a sequence as one sample, its tokens being as dependent as can be, or three times the
    trainer's own. support: tokens that the trainer's top-p or top-k excludes, allowed three more than three times as many
    as its own rounding excludes; and log-probs that are none, above 0.
    """
    own = error[mask & error.isfinite()]
    unit, tail = rms(own), float(own.abs().quantile(0.99)) if len(own) else 0.0
    center = abs(float(own.mean())) if len(own) else 0.0
    excluded = int((mask & ~error.isfinite()).sum())
    return {
        "size": _over(found.rms, FACTOR * unit),
        "tail": _over(found.quantiles[2], FACTOR * tail),
        "position": _over(max(found.by_position.values(), default=found.rms), FACTOR * unit * POSITION),
        "mean": _over(abs(found.mean), 3 * max(center, unit / math.sqrt(max(found.sequences, 1)))),
        "support": math.inf if impossible else found.cut / (3 * excluded + 3),
    }


def _over(value: float, allowed: float) -> float:
    if value == 0.0:
        return 0.0
    return value / allowed if allowed > 0.0 and not math.isnan(value) else math.inf


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
