"""`parity findings`: the ledger as one page for somebody who trains, ranked by what a recipe of today meets."""

from __future__ import annotations

from collections.abc import Iterator

from parity.results.ledger import Entry, Ledger
from parity.results.user import SEVERITIES

_HEAD = """# Findings: what released libraries compute wrong

Written by `parity findings > docs/findings.md` from `cases/ledger.toml`. Every run measures each line against a float64
reference. `parity replay NAME --issue`, NAME from the last column, prints a script that shows it; `parity upstream --all`
writes script, text and patch of each to reports/upstream/.

`apply` is `parity.fixes.apply(trainer)`; it, `FusedLinearGRPOLoss` and `selective_log_probs` are in [fixes.md](fixes.md).
"""


def page(ledger: Ledger) -> str:
    """The page, in Markdown."""
    return "\n".join(_lines(ledger))


def _lines(ledger: Ledger) -> Iterator[str]:
    yield _HEAD
    whole = [e for e in ledger.entries if not e.user.part_of]
    for severity, meaning in SEVERITIES.items():
        entries = sorted((e for e in whole if e.severity == severity), key=lambda e: (e.user.rank, e.id))
        if not entries:
            continue
        yield f"## {severity.capitalize()}: {meaning}\n"
        yield "| where | effect | releases | fix | NAME |"
        yield "|---|---|---|---|---|"
        for e in entries:
            yield f"| {_capital(e.user.when)} | {e.user.effect} | {releases(e)} | {e.user.fix} | {e.id} |"
        yield ""


def releases(entry: Entry) -> str:
    """The releases that are wrong, as far as known: since when, else the scope, else where it was seen."""
    library = next(iter(entry.versions), "")
    if entry.user.since:
        name = entry.user.since.partition(" ")[0]
        upper = [part for part in entry.versions.get(name, "").split(",") if part.startswith("<")]
        return f"{entry.user.since} on" + (f", {upper[0].replace('<', 'below ')}" if upper else "")
    if library:
        return "; ".join(f"{name} {spec}" for name, spec in entry.versions.items())
    return f"seen in {entry.link.partition(':')[0]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
