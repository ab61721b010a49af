"""What the ledger knows to be wrong in an installed stack: its defects by severity."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.errors import UsageError
from parity.process import installed
from parity.results.ledger import SEVERITIES, Entry, Ledger
from parity.results.report.findings import Finding
from parity.results.row import About

LIBRARIES = ("trl", "transformers", "liger-kernel", "cut-cross-entropy", "unsloth-zoo", "bitsandbytes", "torch")
OTHER = "unranked"  # severity of entries that have none: a user's own, and those of older releases


@dataclasses.dataclass(frozen=True)
class Stack:
    """Versions of the libraries, and the entries of the ledger that hold with them, seen or not, most severe first.
    `unread`: the ledger of the run that is not on this machine, so that only what the run met is known. `own`: of a run of a
    user's losses alone, which gets no catalogue of other people's defects. `others`: how many a run of named families leaves
    out, which it did not meet, of other families."""

    versions: Mapping[str, str]
    entries: Sequence[Entry]
    unread: str = ""
    own: bool = False
    others: int = 0

    @classmethod
    def of(cls, entries: Iterable[Entry], versions: Mapping[str, str] | None = None, unread: str = "") -> "Stack":
        """Entries in any order; conventions come last."""
        order = [*(name for name in SEVERITIES if name != "convention"), OTHER, "convention"]
        ranked = sorted(entries, key=lambda e: (order.index(e.severity or OTHER), e.user.rank, e.id))
        return cls({name: version for name in LIBRARIES if (version := (versions or {}).get(name))}, ranked, unread)

    @classmethod
    def here(cls, ledger: Ledger) -> "Stack":
        """The installed one, without a run."""
        there = {name: version for name in LIBRARIES if (version := installed(name))}
        return cls.of((e for e in ledger.entries if e.in_force() and not e.user.part_of), there)

    @classmethod
    def of_run(cls, about: About, found: Iterable[Finding], families: Collection[str] = ()) -> "Stack":
        """The one of a run: what its ledger knows of its versions, and whatever else the run saw again; where families or
        implementations were named, of the `families` that ran."""
        known: dict[str, Entry] = {}
        path, unread = about.asked.ledger if about.asked else None, ""
        try:
            ledger = Ledger.known(Path(path) if path else None)
            known = {e.id: e for e in (*Ledger.older(ledger.path), *ledger.entries)}
        except UsageError:  # of another machine
            unread = str(path)
        here = [e for e in known.values() if e.in_force(about.versions) and not e.user.part_of]
        named = about.asked and (about.asked.families or about.asked.implementations)
        entries = [e for e in here if not named or e.family in families]
        seen = [known.get(f.known) or _unread(f.known, f) for f in found if f.known]
        entries += [known.get(e.user.part_of, e) for e in seen]
        shown = {e.id: e for e in entries}
        others = sum(e.id not in shown and e.severity != "convention" for e in here)
        return dataclasses.replace(cls.of(shown.values(), about.versions, unread), others=others)

    @property
    def named(self) -> str:
        """`trl 1.16.0, liger-kernel 0.8.5, …`."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def by_severity(self) -> Mapping[str, list[Entry]]:
        """severity -> its entries, conventions last."""
        out = collections.defaultdict[str, list[Entry]](list)
        for entry in self.entries:
            out[entry.severity or OTHER].append(entry)
        return out

    @property
    def defects(self) -> str:
        """`4 high, 16 medium known defects`; conventions are none, and what cannot be read is said."""
        counts = {name: len(found) for name, found in self.by_severity.items() if name != "convention"}
        counted = ", ".join(f"{n} {severity}" for severity, n in counts.items()) or "no"
        said = f"{counted} known defect{'' if sum(counts.values()) == 1 else 's'}"
        return f"{said} that the run met ({self.unread} cannot be read here)" if self.unread else said


def _unread(id: str, finding: Finding) -> Entry:
    """An entry of which a run's rows have the id, and this machine's ledger nothing."""
    lead, quantities = finding.lead, finding.roots or ("*",)
    reason = lead.message or f"wrong in {', '.join(quantities)}"
    its: dict[str, Any] = {"family": lead.family, "case": lead.case, "quantities": quantities, "reason": reason}
    return Entry(id=id, implementations=(lead.implementation,), date="-", **its)


def where(entry: Entry) -> str:
    """The settings in which it shows, in a user's words."""
    return entry.user.when[:1].upper() + entry.user.when[1:] or ", ".join(entry.implementations)


APPLY = "`apply` is: from parity.fixes import apply; print(apply(trainer)), before trainer.train()"
"""How the fix of that name is had."""


def effect(entry: Entry) -> str:
    return entry.user.effect or entry.reason


def fix(entry: Entry) -> str:
    return entry.user.fix or "none known"


def meaning(severity: str) -> str:
    """`high: default or common settings`."""
    return f"{severity}: {dict(SEVERITIES)[severity]}" if severity in SEVERITIES else severity


def releases(entry: Entry) -> str:
    """The releases that are wrong, as far as known: since when, else the scope, else where it was seen."""
    if entry.user.since:
        name, _, first = entry.user.since.partition(" ")
        upper = [part for part in entry.versions.get(name, "").split(",") if part.startswith("<")]
        others = [f"{other} {spec}" for other, spec in entry.versions.items() if other != name and spec.startswith("<")]
        return "; ".join([",".join([f"{name} >={first}", *upper[:1]]), *others])
    scope = "; ".join(f"{name} {spec}" for name, spec in entry.versions.items())
    return scope or (f"seen in {entry.link.partition(':')[0]}" if entry.link else "not known")


def is_mended(entry: Entry) -> bool:
    """Whether some release of a library ends the entry's scope."""
    return any("<" in specifier for specifier in entry.versions.values())
