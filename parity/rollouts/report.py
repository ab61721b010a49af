"""A judged recording in words, as a page with its two pictures (SVG, drawn without a library)."""

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parity.recording import Recording
from parity.rollouts.judge import DEFINITIONS, Verdict
from parity.rollouts.statistics import NEAR, QUANTILES

SIDE, LEFT, TOP = 320, 64, 40
POINTS, BINS = 1500, 60


def scatter(sampler: Tensor, trainer: Tensor, title: str) -> str:
    """Log-probs (n,) of the same tokens, the sampler's to the right and the trainer's upwards; equal ones lie on the line."""
    keep = sampler.isfinite() & trainer.isfinite()
    x, y = sampler[keep][:POINTS].tolist(), trainer[keep][:POINTS].tolist()
    low = min([*x, *y, -1.0])
    out = _frame(title, "sampler's log-prob, nats", "trainer's log-prob")
    out += _ticks([low * k / 4 for k in range(5)], low, 0.0)
    out.append(f'<path d="M{LEFT} {TOP + SIDE}L{LEFT + SIDE} {TOP}" stroke="#d1d5db"/>')
    out += [
        f'<circle cx="{LEFT + SIDE * (1 - a / low):.1f}" cy="{TOP + SIDE * b / low:.1f}" r="1.6" fill="#0b62a4" '
        'fill-opacity="0.45"/>'
        for a, b in zip(x, y, strict=True)
    ]
    return "".join([*out, "</svg>"])


def distribution(d: Tensor, self_noise: Tensor, title: str) -> str:
    """Share of tokens by d = trainer - sampler (n,) as bars, and by the trainer's difference to itself (m,) as a line."""
    values, noise = d[d.isfinite()], self_noise[self_noise.isfinite()]
    reach = max(
        float(values.abs().quantile(0.999)) if len(values) else 0.0, float(noise.abs().max()) if len(noise) else 0.0
    )
    reach = reach or 1.0
    bars, line = _shares(values, reach), _shares(noise, reach)
    top = max([*bars, *line, 1e-9])
    out = _frame(title, "trainer's minus sampler's log-prob, nats", "share of tokens")
    out += _ticks([reach * k / 2 for k in range(-2, 3)], -reach, reach, across_only=True)
    wide = SIDE / BINS
    out += [
        f'<rect x="{LEFT + k * wide:.1f}" y="{TOP + SIDE * (1 - share / top):.1f}" width="{wide:.1f}" '
        f'height="{SIDE * share / top:.1f}" fill="#0b62a4" fill-opacity="0.6"/>'
        for k, share in enumerate(bars)
    ]
    path = "L".join(f"{LEFT + (k + 0.5) * wide:.1f} {TOP + SIDE * (1 - s / top):.1f}" for k, s in enumerate(line))
    out.append(f'<path d="M{path}" fill="none" stroke="#c2410c" stroke-width="1.6" stroke-dasharray="5 3"/>')
    out.append(
        f'<text x="{LEFT + SIDE - 4}" y="{TOP + 14}" text-anchor="end">bars: to the sampler; dashed: to itself</text>'
    )
    return "".join([*out, "</svg>"])


def _shares(values: Tensor, reach: float) -> list[float]:
    counts = torch.histc(values.clamp(-reach, reach).float(), BINS, -reach, reach)
    return (counts / max(len(values), 1)).tolist()


def _frame(title: str, across: str, upwards: str) -> list[str]:
    wide, tall = LEFT + SIDE + 16, TOP + SIDE + 44
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{title}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#9ca3af"/>',
        f'<text x="{LEFT + SIDE / 2}" y="{tall - 6}" text-anchor="middle">{across}</text>',
        f'<text x="12" y="{TOP + SIDE / 2}" transform="rotate(-90 12 {TOP + SIDE / 2})" text-anchor="middle">{upwards}</text>',
    ]


def _ticks(values: Sequence[float], low: float, high: float, across_only: bool = False) -> list[str]:
    out = []
    for value in values:
        share = (value - low) / (high - low)
        label = f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.2g}"
        label = "0" if math.isclose(value, 0.0, abs_tol=1e-15) else label
        out.append(f'<text x="{LEFT + SIDE * share:.1f}" y="{TOP + SIDE + 16}" text-anchor="middle">{label}</text>')
        if not across_only:
            out.append(f'<text x="{LEFT - 6}" y="{TOP + SIDE * (1 - share) + 4:.1f}" text-anchor="end">{label}</text>')
    return out


CPU_ONLY = "An engine that computed on a CPU says nothing of its GPU kernels."


def text(one: Recording, verdict: Verdict) -> str:
    """The judgement, gate by gate, and the statistics; a line each."""
    s = verdict.found
    worst = max(verdict.gates, key=lambda name: verdict.gates[name])
    lines = [
        one.line(),
        f"  {'agrees' if verdict.agrees else 'DISAGREES'} as log-probs {DEFINITIONS[verdict.definition]}",
        "  share of what is allowed: " + ", ".join(f"{n} {h:.2f}" for n, h in verdict.gates.items()),
    ]
    if not verdict.agrees:
        cause = verdict.explanation or "nothing that was tried: other weights, or another computation"
        lines.append(f"  fails by {worst}; what fits better: {cause}")
        lines += [f"    rms {value:.2e} against: {name}" for name, value in verdict.fits.items()]
    lines += [
        f"  {s.tokens} tokens, {s.unscored} not scored, {s.cut} that the trainer's top-p or top-k excludes",
        "  |log-ratio|: "
        + ", ".join(f"{100 * q:g} % {v:.2e}" for q, v in zip(QUANTILES, s.quantiles, strict=True))
        + f"; rms {s.rms:.2e}, mean {s.mean:+.1e}",
        "  the trainer against itself, rms: " + ", ".join(f"{n} {v:.1e}" for n, v in verdict.self_noise.items()),
        f"  ratios outside {NEAR}: {100 * s.outside:.2f} %; k3 {s.k3:.2e}; effective sample size {s.ess:.4f} of tokens, "
        f"{s.ess_sequences:.4f} of sequences; mean ratio {s.mean_ratio:.6f}, which judges nothing",
        "  rms by position: " + ", ".join(f"{n} {v:.1e}" for n, (_, v) in s.by_position.items()),
        "  rms by probability: " + ", ".join(f"{n} {v:.1e} ({k})" for n, (k, v) in s.by_probability.items() if k),
    ]
    return "\n".join(lines)


def write(judged: Iterable[tuple[Recording, Verdict]], path: Path) -> None:
    """An HTML page of all, each with its pictures."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>Rollouts</title>",
        "<style>body{font-family:sans-serif;margin:2em}pre{white-space:pre-wrap}</style>",
        f"<h1>Rollouts against the trainer</h1><p>{CPU_ONLY}</p>",
    ]
    for one, verdict in judged:
        mask, sampler = one.mask, one.sampler_logps.double()
        trainer = (sampler + verdict.d)[mask]
        parts += [
            f"<h2>{html.escape(one.name)}</h2><pre>{html.escape(text(one, verdict))}</pre>",
            scatter(sampler[mask], trainer, html.escape(one.name)),
            distribution(verdict.d[mask], verdict.noise[mask], "log-ratio"),
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")
