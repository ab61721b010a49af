"""How a night's time is shared out: what is new first, what has failed lately next, what never failed last; none gets nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from parity.results.memory import Run
from parity.results.trend import NIGHTS

NEW, FAILED, QUIET = 4.0, 2.0, 1.0
"""Weights of time: twice the weight is twice the time, as far as there is something to do."""
FAILURES = (1, 4)
"""Exit codes of a command that found something; one whose time was over before its end is as good."""


def families(
    past: Sequence[Run], device: str, now: Iterable[tuple[str, str]], versions: Mapping[str, str]
) -> dict[str, float]:
    """Family -> weight: `NEW` where one of the (implementation, family) of tonight was never compared or a library moved since
    the last night, `FAILED` where one of the last nights had a finding that no ledger entry covers."""
    nights = [run for run in past if run.device == device]
    seen = {(i, f) for run in nights for (i, f, _), count in run.compared.items() if count}
    last = nights[-1].versions if nights else {}
    moved = {name.partition("-")[0] for name, version in versions.items() if last.get(name) != version}
    failed = {f.family for run in nights[-NIGHTS:] for f in run.findings if f.known is None}
    out: dict[str, float] = {}
    for implementation, family in now:
        new = (implementation, family) not in seen or implementation.partition(".")[0] in moved
        weight = NEW if new else FAILED if family in failed else QUIET
        out[family] = max(weight, out.get(family, 0.0))
    return out


def parts(past: Sequence[Run], usual: Mapping[str, float], run: str = "run") -> dict[str, float]:
    """Name -> share of a night for its commands, out of the `usual` shares; in the order in which they should run.

    Those of equal weight that the last night cut come first. `run` is the long run, whose findings tell how it did.
    """
    nights = past[-NIGHTS:]
    done = {name: [s for night in nights for s in night.steps if s.name == name] for name in usual}
    weights = {
        name: NEW if not them else FAILED if any(not s.whole or s.exit_code in FAILURES for s in them) else QUIET
        for name, them in done.items()
    }
    if run in usual and nights:
        weights[run] = FAILED if any(f.known is None for night in nights for f in night.findings) else QUIET
    mean = statistics.fmean(weights.values()) if weights else 1.0
    shares = {name: usual[name] * max(0.5, weight / mean) for name, weight in weights.items()}
    total = sum(shares.values())
    cut = {name for name, them in done.items() if them and not them[-1].whole}
    return {name: shares[name] / total for name in sorted(shares, key=lambda n: (-weights[n], n not in cut))}
