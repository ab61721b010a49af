"""`parity findings`: the ledger as one page for somebody who trains, ranked by what a recipe of today meets."""

from collections.abc import Iterator

from parity.results.ledger import Entry, Ledger
from parity.results.user import SEVERITIES

_HEAD = """# Findings: what released libraries compute wrong

Each was measured against a float64 reference. `parity replay NAME --issue` (NAME: last column) prints a script that shows
it; `parity upstream --all` writes script, text and, if known, patch of each. Unsloth's and the 4-bit head's need
`pip install 'llm-parity[unsloth,kbit]'`. `apply` is `parity.fixes.apply(trainer)`: [fixes.md](fixes.md). Written by
`parity findings`. What newer releases have mended: [findings-mended.md](measured/findings-mended.md).
"""
_HEAD_MENDED = """# Findings that newer releases have mended

Written by `parity findings --mended`. The others: [findings.md](../findings.md).
"""


def page(ledger: Ledger, mended: bool = False) -> str:
    """The page, in Markdown: what the newest releases compute wrong, or with `mended` what only older ones do."""
    return "\n".join(_lines(ledger, mended))


def is_mended(entry: Entry) -> bool:
    """Whether some release of a library ends the entry's scope."""
    return any("<" in specifier for specifier in entry.versions.values())


def _lines(ledger: Ledger, mended: bool) -> Iterator[str]:
    yield _HEAD_MENDED if mended else _HEAD
    whole = [e for e in ledger.entries if not e.user.part_of and is_mended(e) == mended]
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
    if mended:
        yield from _older(Ledger.older(ledger.path))


def _older(entries: list[Entry]) -> Iterator[str]:
    yield "## Known to runs with an older release\n"
    yield "`parity replay NAME --with PKG==VER` shows one.\n"
    yield "| where | what is wrong | releases | NAME |"
    yield "|---|---|---|---|"
    for e in entries:
        where = ", ".join(f"`{i}`" for i in e.implementations)
        yield f"| {where} | {e.reason} | {releases(e)} | {e.id} |"
    yield ""


def releases(entry: Entry) -> str:
    """The releases that are wrong, as far as known: since when, else the scope, else where it was seen."""
    library = next(iter(entry.versions), "")
    if entry.user.since:
        name = entry.user.since.partition(" ")[0]
        upper = [part for part in entry.versions.get(name, "").split(",") if part.startswith("<")]
        others = [f"{other} {spec}" for other, spec in entry.versions.items() if other != name and spec.startswith("<")]
        return ", ".join([f"{entry.user.since} on", *(part.replace("<", "below ") for part in [*upper[:1], *others])])
    if library:
        return "; ".join(f"{name} {spec}" for name, spec in entry.versions.items())
    return f"seen in {entry.link.partition(':')[0]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
