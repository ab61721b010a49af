"""The text of the one issue that a nightly gate keeps: what broke, since when, whose fault it is, how to see it again."""

from collections.abc import Iterable, Iterator, Sequence

from parity.results.memory import Run, Seen
from parity.results.report.markdown import code, escape
from parity.results.report.wording import CODES, count, others, ratio
from parity.results.step import CommandOutcome
from parity.results.trend import STILL_FAILS, Change, since

SHOWN = 20
"""Lines of a section that are written out; the rest is counted."""


def title(change: Change) -> str:
    """One line for a phone: green, or what is wrong, since when."""
    run = change.run
    if run.green:
        cut = ", ".join(step.name for step in run.steps if not step.whole)
        return f"parity: green ({run.started:%Y-%m-%d})" + (f", as far as there was time for {cut}" if cut else "")
    lives = [change.lives[k] for k in (*change.new, *change.still)]
    if not lives:
        wrong = [f"{s.name}: {s.verdict}" for s in run.steps if s.counts == run.exit_code]
        why = wrong[0] if wrong else CODES.get(run.exit_code, f"exit code {run.exit_code}")
        return f"parity: red ({run.started:%Y-%m-%d}): {why if run.ended else 'it did not come to its end'}"
    first = min((life.first for life in lives), key=lambda one: one.started)
    who = sorted({life.now.implementation for life in lives if life.now})
    also = f" and {len(who) - 1} more" if len(who) > 1 else ""
    tonight = sum(life.first.id == run.id for life in lives)
    added = f", {tonight} of them since tonight" if 0 < tonight < len(lives) else ""
    return f"parity: {count(len(lives), 'new finding')} in {who[0]}{also}, {since(first, run)}{added}"


def body(change: Change, page: str = "") -> str:
    """The issue as Markdown. Whatever comes from rows is escaped."""
    run = change.run
    out = [f"**{escape(title(change))}**", ""]
    if not run.green:
        out += [f"Exit code {run.exit_code}: {CODES.get(run.exit_code, 'see the log')}.", ""]
    if not run.ended:
        out += ["The run did not come to its end: what is missing was not compared.", ""]
    out += _section("", [f"- {escape(reason)}" for reason in others(run.reasons)])
    lives = change.lives
    for heading, keys in (("New since the run before", change.new), ("Still there", change.still)):
        seen = [(life.now, life) for k in keys if (life := lives[k]).now]
        out += _section(
            heading, [_finding(f, life.first, f"{life.times} of {count(life.of, 'run')}") for f, life in seen]
        )
    gone = (
        f"- {code(k)}, first seen {lives[k].first.started:%Y-%m-%d}" + (f" ({STILL_FAILS})" * (k in change.failing))
        for k in change.fixed
    )
    out += _section("Gone since the run before", gone)
    missing = (
        f"- {code(m.implementation)} in {m.family} on {m.device}: {m.cases:,} cases, usually {m.usual:,.0f}"
        for m in change.missing
    )
    out += _section("Compared less than usual", missing)
    grown = (
        f"- {code(g.implementation)} {g.quantity}, {g.dtype} on {g.device}: {ratio(g.before)} → "
        f"{'no finite size' if g.now is None else ratio(g.now)} ({code(g.case)})"
        for g in change.growth
    )
    out += _section("Headroom that grew", grown)
    if change.green:
        moved = [f"- {escape(n)} {escape(then)} → {escape(now)}" for n, (then, now) in change.moved.items()]
        moved += ["", f"Which release it was: {code(change.search)}"] if change.search else []
        out += _section(f"Moved since the last green run ({change.green.started:%Y-%m-%d})", moved)
    known, compared = sum(f.known is not None for f in run.findings), sum(run.compared.values())
    out += [
        f"{compared:,} compared · {known:,} known findings · profile {run.profile} · seed {run.seed} · {run.device}"
    ]
    out += ["", *([f"Report: {page}", ""] if page else []), *_steps(run.steps)]
    versions = " · ".join(f"{n} {v}" for n, v in run.versions.items())
    return "\n".join([*out, f"<sub>{escape(versions)}</sub>", ""])


def _section(heading: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    more = [f"- and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    return [*([f"### {heading}", ""] if heading else []), *lines[:SHOWN], *more, ""] if lines else []


def _finding(f: Seen, first: Run, seen: str) -> str:
    what = f"{f.cls} in {', '.join(f.quantities)}" if f.quantities else f.verdict
    size = "no finite size" if f.headroom is None else f"headroom {ratio(f.headroom)}"
    said = f"{escape(what)}; wrong: {escape(f.wrong)}; {size}; {count(f.cases, 'case')}; seen in {seen}"
    line = f"- **{code(f.implementation)}**: {said}, first {first.started:%Y-%m-%d}"
    return "\n".join([line, *([f"  {escape(f.message)}"] if f.message else []), f"  {code(f.replay)}"])


def _steps(steps: Sequence[CommandOutcome]) -> Iterator[str]:
    if not steps:
        return
    yield from ("### Other commands of the night", "")
    for step in steps:
        yield f"- {code(step.command)}: {escape(step.verdict)}, {step.seconds / 60:.0f} min"
        if step.counts:
            yield from ("", "  ```", *(f"  {line.replace('```', '')}" for line in step.tail.splitlines()), "  ```", "")
    yield ""
