"""The section of a run's page on the recordings that its cases took their ratios from."""

import base64
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from parity import recording
from parity.recording import Recording
from parity.results.report.html import Part
from parity.results.row import Row
from parity.rollouts import plot
from parity.rollouts.statistics import NEAR, statistics

POINTS = 400


def parts(rows: Iterable[Row]) -> list[Part]:
    """Scatter of sampler against trainer, and the log-ratios, of each dtype; a line for each recording. None without one."""
    drawn = {row.case: row.settings.get("recording") for row in rows if row.settings}
    cases = Counter(name for name in drawn.values() if name in recording.shipped())
    taken = [recording.named(str(name)) for name in sorted(cases, key=str)]
    if not taken:
        return []
    note = (
        f"{sum(cases.values()):,} cases took their log-ratios from recordings of a real engine. Here trainer and sampler score "
        "the same tokens of the distribution that was sampled from; `parity rollouts judge` holds them against the "
        "trainer's own noise. What an engine computes on a CPU says nothing of its GPU kernels."
    )
    rows_of = [[*_line(one)[:1], str(cases[one.name]), *_line(one)[1:]] for one in taken]
    headings = [
        "recording",
        "cases",
        "engine",
        "tokens",
        "rms of log-ratio, nats",
        f"ratios outside {NEAR}",
        "mean ratio",
    ]
    return [Part("rollouts", "Rollouts", note, _pictures(taken), f"{len(taken)} recordings", headings, rows_of)]


def log_ratios(one: Recording) -> Tensor:
    """log π - log K - log π_sampler (B, T), K the kept mass: both of the distribution that was sampled from; -inf cut."""
    assert one.trainer_logps is not None
    d = one.trainer_logps.double() - one.sampler_logps.double()
    return d if one.kept_mass is None else torch.where(one.kept_mass > 0, d - one.kept_mass.double().log(), -torch.inf)


def _line(one: Recording) -> list[str]:
    s = statistics(log_ratios(one), one.mask, one.sampler_logps.double())
    engine = f"{one.facts['engine']} on {one.facts.get('device', 'an unknown device')}"
    return [one.name, engine, f"{s.tokens:,}", f"{s.rms:.2g}", f"{100 * s.outside:.2f} %", f"{s.mean_ratio:.4f}"]


def _pictures(taken: list[Recording]) -> list[str]:
    out = []
    for dtype in sorted({str(one.facts["dtype"]) for one in taken}):
        same_dtype = [one for one in taken if one.facts["dtype"] == dtype]
        d = torch.cat([log_ratios(one)[one.mask] for one in same_dtype])
        sampler = torch.cat([one.sampler_logps.double()[one.mask] for one in same_dtype])
        some = slice(None, None, max(1, len(d) // POINTS))
        out.append(plot.scatter(sampler[some], (sampler + d)[some], f"log-probs, {dtype}"))
        out.append(plot.distribution(d, d.new_empty(0), f"log-ratio, {dtype}"))
    return [base64.b64encode(picture.encode()).decode() for picture in out]
