"""The text of the one issue that a nightly gate keeps: what broke, since when, whose fault it is, how to see it again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from parity.results.memory import Run, Seen
from parity.results.report.markdown import code, escape
from parity.results.report.wording import CODES, count, others, ratio
from parity.results.step import CommandOutcome
from parity.results.trend import STILL_FAILS, Change, since

SHOWN = 20
"""Findings, headrooms and missing comparisons written out; the rest is counted."""


def title(change: Change) -> str:
    """One line for a phone: green, or what is wrong, since when."""
    run = change.run
    if run.green:
        cut = ", ".join(step.name for step in run.steps if not step.whole)
        return f"parity: green ({run.started:%Y-%m-%d})" + (f", as far as there was time for {cut}" if cut else "")
    fresh = [*change.new, *change.still]
    if not fresh:
        wrong = [f"{s.name}: {s.verdict}" for s in run.steps if s.counts == run.exit_code]
        why = CODES.get(run.exit_code, f"exit code {run.exit_code}")
        why = "it did not come to its end" if not run.ended else wrong[0] if wrong else why
        return f"parity: red ({run.started:%Y-%m-%d}): {why}"
    first = min((change.lives[k].first for k in fresh), key=lambda one: one.started)
    who = sorted({change.lives[k].now.implementation for k in fresh if change.lives[k].now})  # type: ignore[union-attr]
    also = f" and {len(who) - 1} more" if len(who) > 1 else ""
    tonight = sum(change.lives[k].first.id == run.id for k in fresh)
    added = f", {tonight} of them since tonight" if 0 < tonight < len(fresh) else ""
    return f"parity: {count(len(fresh), 'new finding')} in {who[0]}{also}, {since(first, run)}{added}"


def body(change: Change, page: str = "") -> str:
    """The issue as Markdown. Whatever comes from rows is escaped."""
    run = change.run
    out = [f"**{escape(title(change))}**", ""]
    if not run.green:
        out += [f"Exit code {run.exit_code}: {CODES.get(run.exit_code, 'see the log')}.", ""]
    if why := others(run.reasons):
        out += [*(f"- {escape(reason)}" for reason in why), ""]
    if not run.ended:
        out += ["The run did not come to its end: what is missing was not compared.", ""]
    out += _findings("New since the run before", change, change.new)
    out += _findings("Still there", change, change.still)
    if change.fixed:
        out += ["### Gone since the run before", ""]
        for k in change.fixed[:SHOWN]:
            still = f" ({STILL_FAILS})" if k in change.failing else ""
            out.append(f"- {code(k)}, first seen {change.lives[k].first.started:%Y-%m-%d}{still}")
        out += _more(change.fixed)
    if change.missing:
        out += ["### Compared less than usual", ""]
        for m in change.missing[:SHOWN]:
            out.append(
                f"- {code(m.implementation)} in {m.family} on {m.device}: {m.cases:,} cases, usually {m.usual:,.0f}"
            )
        out += _more(change.missing)
    if change.growth:
        out += ["### Headroom that grew", ""]
        for g in change.growth[:SHOWN]:
            now = "no finite size" if g.now is None else ratio(g.now)
            where = f"{g.quantity}, {g.dtype} on {g.device}"
            out.append(f"- {code(g.implementation)} {where}: {ratio(g.before)} → {now} ({code(g.case)})")
        out += _more(change.growth)
    out += list(_moved(change))
    known = sum(f.known is not None for f in run.findings)
    compared = sum(run.compared.values())
    out += [
        f"{compared:,} compared · {known:,} known findings · profile {run.profile} · seed {run.seed} · {run.device}",
        "",
    ]
    if page:
        out += [f"Report: {page}", ""]
    out += _steps(run.steps)
    versions = " · ".join(f"{n} {v}" for n, v in run.versions.items())
    return "\n".join([*out, f"<sub>{escape(versions)}</sub>", ""])


def _findings(heading: str, change: Change, keys: Iterable[str]) -> list[str]:
    keys = list(keys)
    if not keys:
        return []
    out = [f"### {heading}", ""]
    for k in keys[:SHOWN]:
        life = change.lives[k]
        assert life.now is not None
        out += _finding(life.now, life.first, life.times, life.of)
    return out + _more(keys)


def _finding(f: Seen, first: Run, times: int, of: int) -> list[str]:
    what = f"{f.cls} in {', '.join(f.quantities)}" if f.quantities else f.verdict
    size = "no finite size" if f.headroom is None else f"headroom {ratio(f.headroom)}"
    seen = f"seen in {times} of {count(of, 'run')}, first {first.started:%Y-%m-%d}"
    whose = f"wrong: {escape(f.wrong)}"
    lines = [f"- **{code(f.implementation)}**: {escape(what)}; {whose}; {size}; {count(f.cases, 'case')}; {seen}"]
    lines += [f"  {escape(f.message)}"] if f.message else []
    return [*lines, f"  {code(f.replay)}"]


def _steps(steps: Sequence[CommandOutcome]) -> Iterator[str]:
    if not steps:
        return
    yield from ("### Other commands of the night", "")
    for step in steps:
        yield f"- {code(step.command)}: {escape(step.verdict)}, {step.seconds / 60:.0f} min"
        if step.exit_code or step.search:
            yield from ("", "  ```", *(f"  {line.replace('```', '')}" for line in step.tail.splitlines()), "  ```", "")
    yield ""


def _moved(change: Change) -> Iterator[str]:
    if change.green is None or not change.moved:
        return
    yield f"### Moved since the last green run ({change.green.started:%Y-%m-%d})"
    yield ""
    yield from _pairs(change.moved)
    yield ""


def _pairs(moved: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    for name, (before, now) in moved.items():
        yield f"- {escape(name)} {escape(before)} → {escape(now)}"


def _more(items: object) -> list[str]:
    rest = len(items) - SHOWN  # type: ignore[arg-type]
    return [f"- and {rest:,} more", ""] if rest > 0 else [""]
