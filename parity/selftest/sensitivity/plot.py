"""Limits as a picture: share of cases in which an error of a given size is caught, as SVG, drawn without a library."""

import html
import math
from collections.abc import Iterable, Sequence

from parity.selftest.sensitivity.measure import ABSOLUTE, DEFAULTS, DTYPES, GATES, GRID, JUDGES, LOOSE, DetectionLimit
from parity.selftest.sensitivity.table import limits

WIDTH, HEIGHT, LEFT, TOP, GAP = 190, 120, 62, 78, 26
STYLES = {
    GATES: ("#0b62a4", "2.2", "none"),
    DEFAULTS: ("#c2410c", "1.4", "5 3"),
    LOOSE: ("#6b7280", "1.4", "2 3"),
    ABSOLUTE: ("#15803d", "1.4", "8 3 2 3"),
}
"""Colour, width and dashes of each judge; they differ without colour too."""
SHARES = (0.5, 0.99)
PANELS = (
    ("logprobs", "log-probs"),
    ("logprobs", "gradients"),
    ("policy", "log-probs"),
    ("policy", "loss"),
    ("policy", "gradients"),
    ("divergence", "loss"),
    ("divergence", "gradients"),
)


def svg(found: Iterable[DetectionLimit], logits: str) -> str:
    """Small multiples, a row for each dtype and a column for each error; a curve for each judge.

    A case whose correct values a judge faults counts as not caught: what is always red catches nothing.
    """
    every = [one for one in found if one.logits == logits or one.dtype == "fp32"]
    panels = dict.fromkeys([*PANELS, *((one.family, one.target) for one in every)])
    wide = LEFT + len(panels) * (WIDTH + GAP)
    tall = TOP + len(DTYPES) * (HEIGHT + GAP) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Share of cases in which a relative error ε is caught ({logits})</text>',
        *_legend(),
    ]
    for column, (family, target) in enumerate(panels):
        x = LEFT + column * (WIDTH + GAP)
        out.append(f'<text x="{x}" y="{TOP - 8}">{family}: {target}</text>')
        for row, dtype in enumerate(DTYPES):
            y = TOP + row * (HEIGHT + GAP)
            chosen = [one for one in every if (one.family, one.target, one.dtype) == (family, target, dtype)]
            out += _panel(x, y, chosen, last=row == len(DTYPES) - 1)
            if column == 0:
                out.append(f'<text x="6" y="{y + HEIGHT / 2 + 24}" font-size="13">{dtype}</text>')
                for share in SHARES:
                    at = y + HEIGHT * (1 - share) + 4
                    out.append(f'<text x="{x - 4}" y="{at:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    out.append(f'<text x="{LEFT}" y="{tall - 6}">ε, from 2⁻²⁴ to 1</text></svg>')
    return "\n".join(out) + "\n"


def _legend() -> list[str]:
    out = []
    for k, (label, (colour, width, dash)) in enumerate(STYLES.items()):
        x = LEFT + k * 190
        out.append(f'<path d="M{x} 42h30" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>')
        out.append(f'<text x="{x + 36}" y="46">{html.escape(label)}</text>')
    return out


def _panel(x: float, y: float, chosen: Sequence[DetectionLimit], last: bool) -> list[str]:
    out = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d1d5db"/>']
    for power in range(-7, 1):
        at = x + WIDTH * _across(10.0**power)
        if power % 2 == 0:
            out.append(f'<path d="M{at:.1f} {y}v{HEIGHT}" stroke="#eef0f2"/>')
            if last:
                out.append(f'<text x="{at:.1f}" y="{y + HEIGHT + 13}" text-anchor="middle">1e{power}</text>')
    for share in SHARES:
        at = y + HEIGHT * (1 - share)
        out.append(f'<path d="M{x} {at:.1f}h{WIDTH}" stroke="#e5e7eb"/>')
    for label in reversed(JUDGES):
        if chosen:
            colour, width, dash = STYLES[label]
            out.append(
                f'<path d="{_curve(x, y, limits(chosen, label), len(chosen))}" fill="none" stroke="{colour}" '
                f'stroke-width="{width}" stroke-dasharray="{dash}"/>'
            )
    return out


def _across(error: float) -> float:
    """Where an ε lies between the ends of the grid, 0 to 1, on a logarithmic scale."""
    low, high = math.log2(GRID[0]), math.log2(GRID[-1])
    return (math.log2(error) - low) / (high - low)


def _curve(x: float, y: float, values: Sequence[float], count: int) -> str:
    """A step curve of the share of `count` cases with a limit of at most ε."""
    height = y + HEIGHT
    parts = [f"M{x} {height}"]
    for k, value in enumerate(v for v in values if v <= GRID[-1]):
        parts.append(f"H{x + WIDTH * _across(value):.1f}V{y + HEIGHT * (1 - (k + 1) / count):.1f}")
    return "".join([*parts, f"H{x + WIDTH}"])
