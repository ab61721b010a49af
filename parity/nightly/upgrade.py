"""May we upgrade? Compare, audit and a run of the other release, and a team's own settings first: one page, one verdict."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from parity.errors import UsageError
from parity.nightly import steps
from parity.process import installed
from parity.results.memory import CUT, CommandOutcome
from parity.results.report import measured
from parity.results.report.findings import normalised
from parity.results.report.render import escape
from parity.results.row import Row
from parity.results.trend import SHARE
from parity.versions import compare, releases, team
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.row_diff import MARKS, Difference, differences, side, table
from parity.versions.spec import parse_all

SAFE, CHANGED, NOT_SAFE, UNKNOWN = "safe", "safe, with changes of behaviour", "not safe", "not known"
CODES = {SAFE: 0, CHANGED: 0, NOT_SAFE: 1, UNKNOWN: 3}
NEXT, OWN, COMPARE = "NEXT", "your settings", "compare"
LIMIT = 3600.0
"""Seconds on the clock for one of the commands."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One question of the check: what was asked, the answer in a line, and what was printed."""

    name: str
    verdict: str
    summary: str
    printed: str


def resolved(spec: str) -> str:
    """PKG==VER with NEXT replaced by the newest release on the index.

    Raises:
        UsageError: for a spec without a version.
    """
    package, sign, version = spec.partition("==")
    if not sign or not version:
        raise UsageError(f"upgrade-check {spec!r}: write PKG==VER, or PKG==NEXT for the newest release")
    if version != NEXT:
        return spec
    return f"{package}=={releases.newest(package).version}"


def check(
    spec: str,
    config: Path | None,
    reports: Path,
    say: Callable[[str], None],
    device: str = "cpu",
    limit: float = LIMIT,
) -> tuple[str, list[Part]]:
    """The verdict and its parts, the team's own settings first; these and each command have `limit` seconds.

    Raises:
        EnvironmentUnusable: when the environment of the other release cannot be made.
        UsageError: where the package is not installed here.
    """
    package = spec.partition("==")[0]
    if not (version := installed(package)):
        raise UsageError(f"upgrade-check: {package} is not installed here: there is nothing to upgrade from")
    now = f"{package}=={version}"
    parts = []
    if config is not None:
        say(f"your settings in {now} and {spec}")
        parts.append(own_settings(now, spec, team.read(config), device, limit))

    def asked(name: str, words: Sequence[str]) -> Part:
        words = [*words, "--device", device]
        say(f"parity {' '.join(words)}")
        return part(steps.part(name, words, reports, limit))

    parts.append(asked("run", ["run", "--with", spec, "--profile", "pr"]))
    say(f"parity compare {now} {spec} --device {device}")
    parts.append(compared(now, spec, device, limit))
    parts.append(asked("audit", ["audit", "--with", spec, "--reports", str(reports / "audit")]))
    return verdict(parts), parts


def own_settings(before: str, after: str, wanted: team.Team, device: str, limit: float = LIMIT) -> Part:
    """A team's settings and their neighbours through the plain and the fused losses of both releases, in `limit` seconds."""
    asked = [(f"{label} ({case.dtype}, seed {case.seed})", case) for label, case in team.cases(wanted)]
    named = compare.implementations(["trl.GRPOTrainer.*", "liger.FusedLinearGRPOLoss"])
    made = [Environment.of(parse_all([spec])) for spec in (before, after)]
    try:
        seen = compare.both(made, [asked, asked], named, device, clock=limit)
    except EnvironmentUnusable as error:
        return Part(OWN, UNKNOWN, str(error), "")
    different = differences(*(side(looked.rows, asked) for looked in seen))
    worse = [m for m in different if m.mark == "+"]
    mine = [m for m in worse if m.case.startswith(OWN)]
    judged = sum(r.judged for r in seen[1].rows)
    if not judged:
        return Part(OWN, UNKNOWN, "nothing was compared with these settings", "")
    exactly = {case.id for label, case in asked if label.startswith(OWN)}
    one, two = (sum(r.judged and r.case in exactly for r in looked.rows) for looked in seen)
    lost, why = _lost(different)
    counts = ", ".join(f"{sum(m.mark == mark for m in different)} {mark}" for mark in MARKS)
    if mine:
        summary, found = f"{len(mine)} quantities are wrong with exactly these settings", NOT_SAFE
    elif two < SHARE * one:
        summary, found = f"{two} of {one} quantities with exactly these settings could be judged there; {why}", UNKNOWN
    elif worse:
        summary, found = f"right with these settings, {len(worse)} quantities wrong with neighbours of them", CHANGED
    elif different:
        inside = f"{len(different) - lost} moved inside their gates" if len(different) > lost else ""
        summary, found = "; ".join(filter(None, ["right", inside, why if lost else ""])), CHANGED
    else:
        summary, found = "nothing moved", SAFE
    others = f"\nnot part of the loss, not looked at: {', '.join(wanted.others)}" if wanted.others else ""
    text = table(different) if different else "nothing moved"
    return Part(OWN, found, f"{summary} ({counts}; {judged} judged)", text + others)


def compared(before: str, after: str, device: str, limit: float) -> Part:
    """What moved between two releases; where a fifth of what is judged in one is not in the other, nothing is known."""
    try:
        found = compare.compare(([before], [after]), device=device, clock=limit)
    except (EnvironmentUnusable, UsageError) as error:
        return Part(COMPARE, UNKNOWN, str(error), "")
    worse, better, other = (sum(m.mark == mark for m in found.moved) for mark in MARKS)
    lost, why = _lost(found.moved)
    said = [text for n, text in ((worse, f"{worse} worse"), (better, f"{better} better")) if n]
    said += [f"{other - lost} otherwise moved"] if other > lost else []
    said += [why] if lost else []
    summary = "; ".join([*said, *found.notes]) or "nothing moved"
    one, two = found.judged
    if worse:
        return Part(COMPARE, NOT_SAFE, summary, found.text())
    if two < SHARE * one:
        return Part(COMPARE, UNKNOWN, f"{two:,} of {one:,} quantities could be judged there; {summary}", found.text())
    return Part(COMPARE, CHANGED if said or found.notes else SAFE, summary, found.text())


def _lost(found: Sequence[Difference]) -> tuple[int, str]:
    """How many were judged before and are not there, though not wrong there either, and why."""
    lost = [m for m in found if m.mark == "~" and _judged(m.before) and not _judged(m.after)]
    messages = [(m.after.message if m.after else "") or "not run" for m in lost]
    shown = {normalised(text): text for text in messages}
    why = collections.Counter(shown[normalised(text)] for text in messages)
    reasons = ", ".join(f"{text} ({n})" for text, n in why.most_common(3))
    return len(lost), f"{len(lost)} judged before and not there: {reasons}"


def _judged(row: Row | None) -> bool:
    return row is not None and row.judged


def part(step: CommandOutcome) -> Part:
    """What one command says about the upgrade, by its exit code; what it had no time for is not safe."""
    if step.exit_code is None:
        return Part(step.name, UNKNOWN, CUT, step.tail)
    if step.reached and step.exit_code in (0, 4):
        return Part(step.name, UNKNOWN, f"nothing new is wrong so far, but {CUT}: {step.reached}", step.tail)
    if step.exit_code == 0:
        return Part(step.name, SAFE, "nothing new is wrong", step.tail)
    if step.exit_code in (1, 4):
        found = NOT_SAFE if step.exit_code == 1 else CHANGED
        summary = "something is wrong that is not known" if step.exit_code == 1 else "a known failure is gone"
        return Part(step.name, found, summary, step.tail)
    return Part(step.name, UNKNOWN, f"it could not answer (exit code {step.exit_code})", step.tail)


def verdict(parts: Sequence[Part]) -> str:
    """The gravest of the parts; with settings of its own a team is told about those, and the rest stands below."""
    return _gravest([p for p in parts if p.name == OWN] or parts)


def headline(spec: str, parts: Sequence[Part]) -> str:
    """The verdict in a line, which does not say of everything what holds for a team's own settings."""
    others = [p for p in parts if p.name != OWN]
    beyond = f" for your settings, beyond them {_gravest(others)}" if others and len(others) < len(parts) else ""
    return f"{spec}: {verdict(parts)}{beyond}"


def _gravest(parts: Sequence[Part]) -> str:
    found = {p.verdict for p in parts}
    return next(v for v in (NOT_SAFE, UNKNOWN, CHANGED, SAFE) if v in found)


def page(spec: str, parts: Sequence[Part]) -> str:
    answers = measured.table(["asked", "verdict", "why"], ([p.name, p.verdict, escape(p.summary)] for p in parts))
    lines = [f"# Upgrade to {headline(spec, parts)}", "", *answers, ""]
    for p in parts:
        lines += [f"## {p.name}", "", "```", p.printed or "(nothing)", "```", ""]
    return "\n".join(lines)
