"""The text of the one issue that a nightly gate keeps: what broke, since when, whose fault it is, how to see it again."""

from parity.results.report.render import filled
from parity.results.report.wording import CODES, count
from parity.results.trend import STILL_FAILS, Change, since


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
    who = sorted({run.by_key[k].implementation for k in (*change.new, *change.still)})
    also = f" and {len(who) - 1} more" if len(who) > 1 else ""
    tonight = sum(life.first.id == run.id for life in lives)
    added = f", {tonight} of them since tonight" if 0 < tonight < len(lives) else ""
    return f"parity: {count(len(lives), 'new finding')} in {who[0]}{also}, {since(first, run)}{added}"


def body(change: Change, page: str = "") -> str:
    """The issue as Markdown; `page`: address of the report. Whatever comes from rows is escaped."""
    values = {"title": title(change), "run": change.run, "change": change, "page": page, "still_fails": STILL_FAILS}
    return filled("issue.md.j2", **values)
