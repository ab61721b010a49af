"""A judged recording in words, and as a page with its two pictures."""

import html
from collections.abc import Iterable
from pathlib import Path

from parity.recording import Recording
from parity.rollouts import plot
from parity.rollouts.judge import DEFINITIONS, Verdict
from parity.rollouts.statistics import NEAR, QUANTILES

CPU_ONLY = "An engine that computed on a CPU says nothing of its GPU kernels."


def text(recording: Recording, verdict: Verdict) -> str:
    """The judgement, gate by gate, and the statistics; a line each."""
    s = verdict.found
    worst = max(verdict.gates, key=lambda name: verdict.gates[name])
    lines = [
        recording.line(),
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
    for recording, verdict in judged:
        mask, sampler = recording.mask, recording.sampler_logps.double()
        trainer = (sampler + verdict.d)[mask]
        parts += [
            f"<h2>{html.escape(recording.name)}</h2><pre>{html.escape(text(recording, verdict))}</pre>",
            plot.scatter(sampler[mask], trainer, html.escape(recording.name)),
            plot.distribution(verdict.d[mask], verdict.noise[mask], "log-ratio"),
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")
