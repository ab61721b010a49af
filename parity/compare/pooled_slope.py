"""The slope gate over a whole run: a scale error too small for one case shows in the mean of many."""

import collections
import math
from collections.abc import Sequence

from msgspec.structs import replace

from parity.judge.gates import SLOPE
from parity.results.row import Row

POOL_MINIMUM = 30
POOL_SIGMAS = 8.0
POOL_FLOOR = {"fp32": 2.0**-21, "fp16": 2.0**-12, "bf16": 2.0**-10}
"""Systematic slope that rounding itself may leave (a constant's rounding), by the dtype of the case: on the pinned stack no
implementation that agrees comes nearer to its limit than 0.16 on the CPU, and 0.38 on an H200 (docs/judging.md)."""


def mean_slope(slopes: Sequence[tuple[float, float]], floor: float) -> tuple[float, float]:
    """Weighted mean and its standard error, of pairs (slope, what its case allows).

    The weight is 1/(σ² + floor²) with σ the sixth part of what the slope gate of the case allows: a case that is all
    rounding says nothing of a scale and must not carry the error of the mean, and none that is nearly exact may carry
    the mean. The error is the larger of √(1/Σw) and √(Σw²(s - m)²)/Σw, so that it holds where the units are off too.
    """
    weights = [1 / ((allowed / SLOPE) ** 2 + floor**2) for _, allowed in slopes]
    total = sum(weights)
    mean = sum(w * s for w, (s, _) in zip(weights, slopes, strict=True)) / total
    observed = math.sqrt(sum((w * (s - mean)) ** 2 for w, (s, _) in zip(weights, slopes, strict=True))) / total
    return mean, max(observed, math.sqrt(1 / total))


def pooled(rows: Sequence[Row]) -> list[Row]:
    """|mean slope| ≤ max(8·standard error, floor) over the cases of an implementation, quantity and dtype that agree."""
    groups = collections.defaultdict[tuple[str, str, str, str], list[tuple[Row, float, float]]](list)
    for row in rows:
        slope, headroom = row.slope, row.gates.get("slope")
        if row.verdict == "agree" and slope is not None and headroom is not None:
            allowed = abs(slope) / headroom if headroom > 0 else 0.0  # by its gate
            groups[row.implementation, row.family, row.subject, row.dtype].append((row, slope, allowed))
    out = []
    for (*_, subject, dtype), found in sorted(groups.items()):
        if len(found) < POOL_MINIMUM:
            continue
        mean, error = mean_slope([(slope, allowed) for _, slope, allowed in found], POOL_FLOOR[dtype])
        headroom = abs(mean) / max(POOL_SIGMAS * error, POOL_FLOOR[dtype])
        row = replace(found[0][0], case=f"pooled over {len(found)} cases", quantity=f"pooled slope: {subject}")
        row = replace(row, gate="pooled slope", gates={"pooled slope": headroom}, headroom=headroom, slope=mean)
        row = replace(row, cls=None, blame=None, worst=[], settings={}, replay="", message="")
        if not headroom <= 1.0:
            said = f"mean slope {mean:.3g} over {len(found)} cases, error {error:.2g}"
            row = replace(row, verdict="disagree", cls="precision", blame="candidate", message=said)
        out.append(row)
    return out
