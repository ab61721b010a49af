"""An engine's log-probs against the trainer's, in units of what the trainer differs from itself.

The unit is not chosen: the trainer scores the same tokens one row at a time, with more padding, with another attention
implementation, and with the same weights in float64 arithmetic. What it then differs from itself is rounding. An engine
that computes the same function differs from it by the rounding of both, √2 of one if the two are alike; `FACTOR` grants
an engine twice the trainer's error in each. Five gates, all of which must hold; the mean ratio is none of them, since by
the identity E_s[π/s] = 1 it is 1 for every trainer, right or wrong.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.errors import UsageError
from parity.judge.recipe import DTYPES
from parity.recording import Recording
from parity.rollouts import models
from parity.rollouts.scoring import PLAIN, Scores, Trainer
from parity.rollouts.statistics import Statistics, rms, statistics, stretches

FACTOR = 2 * math.sqrt(2)
TRUNCATED, FULL, RAW = "as sampled", "whole vocabulary", "raw"
DEFINITIONS = {
    TRUNCATED: "at the temperature, over what top-p and top-k keep: the distribution that was sampled from",
    FULL: "at the temperature, over the whole vocabulary: what TRL's trainer computes",
    RAW: "at temperature 1, over the whole vocabulary",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one recording under one definition of what its log-probs are.

    Attributes:
        gates: gate -> headroom, the share of what is allowed that was used; above 1 disagrees.
        self_noise: scoring of the trainer -> rms of its difference to itself, nats.
        found: the statistics.
        fits: other explanation -> rms of the sampler's log-probs against it, best first.
        d: (B, T) log-ratios, trainer minus sampler; NaN unscored, -inf cut.
        noise: (B, T) the trainer's largest difference to itself, by scoring; NaN where there is none.
    """

    definition: str
    gates: Mapping[str, float]
    self_noise: Mapping[str, float]
    found: Statistics
    fits: Mapping[str, float]
    d: Tensor
    noise: Tensor

    @property
    def agrees(self) -> bool:
        """Whether every gate holds."""
        return all(h <= 1.0 for h in self.gates.values())

    @property
    def explanation(self) -> str | None:
        """The explanation that fits where the claimed one does not: at most half its rms. None where nothing does."""
        name = min(self.fits, key=lambda n: self.fits[n], default=None)
        if self.agrees or name is None or self.fits[name] > 0.5 * max(self.found.rms, self.fits.get(TRUNCATED, 0.0)):
            return None
        return name


def judge(recording: Recording, trainer: Trainer, definition: str = TRUNCATED) -> Verdict:
    """The recording's sampler log-probs against `trainer`'s under a definition of `DEFINITIONS`."""
    f, rows, width = recording.facts, recording.rows(), recording.completion_ids.shape[1]
    asked = (float(f["temperature"]), float(f["top_p"]), int(f["top_k"]))
    sampling = {TRUNCATED: asked, FULL: (asked[0], 1.0, 0), RAW: (1.0, 1.0, 0)}[definition]
    mask, sampler = recording.mask, recording.sampler_logps.double()
    plain = trainer.score(rows, width, sampling)
    others = {
        name: trainer.score(rows, width, sampling, scoring).truncated
        for name, scoring in trainer.scorings(rows, width).items()
    }
    d = plain.truncated - sampler
    self_noise = {name: _finite(logps - plain.truncated, mask) for name, logps in others.items()}
    found = statistics(d, mask, sampler)
    gates = _gates(d, mask, sampler, found, self_noise)
    noise = max(self_noise.values(), key=lambda v: rms(v[~v.isnan()]))
    fits = {} if all(h <= 1.0 for h in gates.values()) else explanations(recording, trainer, plain)
    return Verdict(definition, gates, {n: rms(v[~v.isnan()]) for n, v in self_noise.items()}, found, fits, d, noise)


def judged(recording: Recording, model: str | None, adapter: Path | None, support: str) -> Verdict:
    """`judge` with the model by name or folder, and a PEFT adapter on it.

    Raises:
        UsageError: where there is no such model, or where it is not the recording's own and has other weights.
    """
    folder = models.folder_of(model or str(recording.facts["model"]))
    if model is None and models.weights_hash(folder) != recording.facts["weights"]:
        raise UsageError(
            f"{recording.name}: {folder} has other weights than were recorded; name the trainer's with --model"
        )

    def adapted(loaded: Any) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(loaded, adapter)

    trainer = Trainer(folder, DTYPES[str(recording.facts["dtype"])])
    if adapter is not None:
        trainer = dataclasses.replace(trainer, change=adapted)
    return judge(recording, trainer, {"truncated": TRUNCATED, "full": FULL}[support])


def _finite(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask & values.isfinite(), values, torch.nan)


def _gates(
    d: Tensor, mask: Tensor, sampler: Tensor, found: Statistics, self_noise: Mapping[str, Tensor]
) -> dict[str, float]:
    """Headroom of each gate.

    size: rms d. tail: 99 % quantile of |d|. position: the largest rms of a stretch of positions. mean: |mean d|, allowed
    three standard errors with a sequence as one sample, its tokens being as dependent as can be, or three times the
    trainer's own. support: tokens that the trainer's top-p or top-k excludes, allowed three more than three times as many
    as it excludes itself when it scores otherwise; and log-probs that are none, above 0.
    """
    shared = {name: values[~values.isnan()] for name, values in self_noise.items()}
    unit = max((rms(v) for v in shared.values()), default=0.0)
    tail = max((float(v.abs().quantile(0.99)) for v in shared.values() if len(v)), default=0.0)
    center = max((abs(float(v.mean())) for v in shared.values() if len(v)), default=0.0)
    sequences = int((mask & d.isfinite()).any(-1).sum())
    finite = mask & d.isfinite()
    worst = max((rms(d[part]) for _, part in stretches(finite) if int(part.sum()) >= 30), default=found.rms)
    excluded = max((int((mask & v.isnan()).sum()) for v in self_noise.values()), default=0)
    impossible = int((mask & (sampler > 1e-4)).sum()) if found.tokens else 1
    return {
        "size": _over(found.rms, FACTOR * unit),
        "tail": _over(found.quantiles[2], FACTOR * tail),
        "position": _over(worst, FACTOR * unit * POSITION),
        "mean": _over(abs(found.mean), 3 * max(center, unit / math.sqrt(max(sequences, 1)))),
        "support": math.inf if impossible else found.cut / (3 * excluded + 3),
    }


POSITION = 1.5
"""A stretch holds a quarter of the tokens, and late ones read more rounded context: their rms may be so much larger."""


def _over(value: float, allowed: float) -> float:
    if value == 0.0:
        return 0.0
    return value / allowed if allowed > 0.0 and not math.isnan(value) else math.inf


def explanations(recording: Recording, trainer: Trainer, plain: Scores) -> dict[str, float]:
    """What else the sampler's log-probs may be -> rms against it, best first."""
    f, rows, width = recording.facts, recording.rows(), recording.completion_ids.shape[1]
    asked = (float(f["temperature"]), float(f["top_p"]), int(f["top_k"]))
    mask, sampler = recording.mask, recording.sampler_logps.double()
    candidates = {"raw log-probs: the temperature is not in them": trainer.score(rows, width, (1.0, 1.0, 0)).full}
    if recording.truncated:
        candidates["top-p or top-k is not in them"] = trainer.score(rows, width, (asked[0], 1.0, 0)).full
        candidates["those of the distribution that was sampled from"] = trainer.score(rows, width, asked).truncated
    if asked[0] == 1.0 and not recording.truncated:
        candidates.clear()
    candidates["each belongs to the token before it"] = plain.truncated.roll(1, 1)
    candidates["each belongs to the token after it"] = plain.truncated.roll(-1, 1)
    out = {}
    for name, logps in candidates.items():
        here = mask.clone()
        if "before it" in name:
            here[:, 0] = False
        if "after it" in name:
            here = mask & mask.roll(-1, 1)
            here[:, -1] = False
        values = (logps - sampler)[here]
        out[name] = rms(values[values.isfinite()])
    without = _uncapped(trainer)
    if without is not None:
        values = (without.score(rows, width, asked, PLAIN).truncated - sampler)[mask]
        out["a softcap of the logits is missing"] = rms(values[values.isfinite()])
    return dict(sorted(out.items(), key=lambda item: item[1]))


def _uncapped(trainer: Trainer) -> Trainer | None:
    """The same trainer without a softcap on its logits; None where its config has none."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(trainer.folder).get_text_config()
    if getattr(config, "final_logit_softcapping", None) is None:
        return None
    return dataclasses.replace(trainer, change=lambda model: without_softcap(trainer.change(model)))


def without_softcap(model: object) -> object:
    """The model, its softcap on logits off."""
    config = model.config.get_text_config()  # type: ignore[attr-defined]
    config.final_logit_softcapping = None
    return model
