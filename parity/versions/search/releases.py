"""Bisect the releases of a package: the search, with a real index, environments and a check.

Every measurement is on disk before the next one starts, so a search that was killed goes on where it stopped: the
search is deterministic and is simply run again over what is known.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from parity.decoding import save_json, saved
from parity.errors import UsageError
from parity.results.json_output import BisectOut
from parity.versions.env.client import EnvironmentUnusable
from parity.versions.env.environment import Environment
from parity.versions.env.releases import releases
from parity.versions.env.resolve import PARTNERS
from parity.versions.env.spec import Spec, parse_all
from parity.versions.search.bisect import Find, Likeness, Measurement, SearchResult, bisect, reading

Check = Callable[[Environment], Measurement]


class SearchError(UsageError):
    """A search that cannot be begun as asked; the message is one line."""


@dataclass(frozen=True)
class Report:
    """How a search ended.

    `moved`: package -> (version before, version after) between the pair. `cause`: the packages of which each alone
    shows the change, empty when nothing was found, nothing had to be tried, or only the move together shows it.
    `text`: all of it, to paste.
    """

    found: SearchResult[str]
    moved: dict[str, tuple[str, str]]
    cause: tuple[str, ...]
    text: str

    def json(self, exit_code: int) -> BisectOut:
        """The same as a structure."""
        found = self.found
        return BisectOut(
            outcome=found.outcome,
            low=found.low,
            high=found.high,
            between=list(found.between),
            by=found.by,
            moved={name: list(pair) for name, pair in self.moved.items()},
            cause=list(self.cause),
            measured=[{"release": at, "verdict": m.verdict, "headroom": m.headroom} for at, m in found.measured],
            exit_code=exit_code,
        )


def search(
    package: str,
    *,
    good: str,
    bad: str,
    check: Check,
    about: str,
    find: Find = "broken",
    hold: Sequence[str | Spec] = (),
    state: Path | None = None,
    reproduce: str = "parity compare {low} {high}",
    confirm: int = 2,
    alone: bool = True,
    say: Callable[[str], None] = print,
) -> Report:
    """Finds the neighbouring releases of `package` between which what `check` finds changed.

    find="broken": `good` is the older end; "fixed": `bad` is. `about` names the check in the report and in the state
    file, which is resumed if it holds this very search. `reproduce` is the line that ends the report ({low}, {high}:
    specs). `confirm`: how often the final pair is measured again; `alone`: whether partners that moved with it are tried
    alone. SearchError for ends in the wrong order or another search's state; EnvironmentUnusable for an end that does
    not exist. An environment that cannot be made or imported inside the range is passed over.
    """
    older, newer = (good, bad) if find == "broken" else (bad, good)
    check_ends(package, good, bad, find)
    held = parse_all(hold)
    question = {"package": package, "good": good, "bad": bad, "find": find, "about": about}
    log = _Log({**question, "hold": [str(spec) for spec in held]}, state, check)
    candidates = log.candidates or log.begin([one.version for one in releases(package, older, newer)])

    def tell(version: str, left: int) -> None:
        say(f"{package} {version}: measuring ({left} step{'' if left == 1 else 's'} left after it)")

    def measure(version: str, repeat: int) -> Measurement:
        made = log.measure((f"{package}=={version}",), held, repeat)
        say(f"{package} {version}: {_told(made)}{' (again)' if repeat else ''}")
        return made

    found = bisect(candidates, measure, find=find, confirm=confirm, tell=tell)
    answers: dict[str, Measurement] = {}
    for version, made in found.measured:
        answers.setdefault(version, made)
    low, high = answers[found.low], answers[found.high]
    names = sorted({*low.versions, *high.versions}, key=lambda name: (name != package, name not in PARTNERS, name))
    pairs = {name: (low.versions.get(name, "absent"), high.versions.get(name, "absent")) for name in names}
    moved = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} if found.outcome == "found" else {}
    trials = _trials(package, found, moved, held, find, log, say) if alone else []
    cause = tuple(name for name, answer, _ in trials if answer is Likeness.YES)
    text = _text(package, about, find, found, answers, moved, trials, reproduce, held)
    return Report(found, moved, cause, text)


class _Kept(msgspec.Struct):
    question: dict[str, Any]
    candidates: list[str]
    entries: dict[str, Measurement]


class _Log:
    """The measurements made so far, in memory and in the state file."""

    def __init__(self, question: dict[str, object], path: Path | None, check: Check) -> None:
        self.question, self.path, self.check = question, path, check
        self.candidates: list[str] = []
        self.entries: dict[str, Measurement] = {}
        if path is None or not path.exists():
            return
        kept: _Kept | None = saved(_Kept, path)
        if kept is None:
            raise SearchError(f"state file {path} is not one of a bisect; delete it or name another")
        if (asked := kept.question) != question:
            other = f"{asked.get('package')} {asked.get('good')}..{asked.get('bad')} ({asked.get('about')})"
            raise SearchError(f"state file {path} belongs to another search, {other}; delete it or name another")
        self.candidates, self.entries = kept.candidates, kept.entries

    def begin(self, candidates: list[str]) -> list[str]:
        self.candidates = candidates
        self._save()
        return candidates

    def measure(self, specs: Sequence[str | Spec], hold: Sequence[str | Spec], repeat: int = 0) -> Measurement:
        key = json.dumps([[str(one) for one in specs], [str(one) for one in hold], repeat])
        if key in self.entries:
            return self.entries[key]
        try:
            environment = Environment.of(specs, hold)
            made = self.check(environment)
        except EnvironmentUnusable as error:
            # Not kept: the index or the disk may be to blame, and a resumed search should see for itself.
            return Measurement("unsupported", message=str(error))
        made = Measurement(made.verdict, made.headroom, made.versions or environment.versions, made.message)
        self.entries[key] = made
        self._save()
        return made

    def _save(self) -> None:
        if self.path is not None:
            try:
                save_json(self.path, _Kept(self.question, self.candidates, self.entries))
            except OSError as error:
                raise EnvironmentUnusable(f"state file {self.path}: {error.strerror or error}") from None


def _trials(
    package: str,
    found: SearchResult[str],
    moved: dict[str, tuple[str, str]],
    held: Sequence[Spec],
    find: Find,
    log: _Log,
    say: Callable[[str], None],
) -> list[tuple[str, Likeness, Measurement]]:
    """Who did it, where partners moved with the package: the package alone, and if not it, each partner alone."""
    partners = [name for name in PARTNERS if name in moved and name != package and "absent" not in moved[name]]
    if not partners:
        return []
    (_, first), (_, last) = found.measured[:2]
    answer = reading(first, last, find)[2]
    assert answer is not None, "a pair was found, so the ends have a reading"

    def alone(name: str, version: str, hold: list[str]) -> tuple[str, Likeness, Measurement]:
        say(f"{name} alone: {package} {version} with {', '.join(hold)}")
        made = log.measure((f"{package}=={version}",), (*held, *hold))
        return name, answer(made), made

    itself = alone(package, found.high, [f"{name}=={moved[name][0]}" for name in partners])
    if itself[1] is Likeness.YES:
        return [itself]
    return [itself, *(alone(name, found.low, [f"{name}=={moved[name][1]}"]) for name in partners)]


def check_ends(package: str, good: str, bad: str, find: Find) -> None:
    """Refuses ends between which there is nothing to search, before anything is measured.

    Raises:
        SearchError: an end is no version, both are the same, or they are in the wrong order for `find`.
    """
    ends = []
    for label, text in (("good", good), ("bad", bad)):
        try:
            ends.append(Version(text))
        except InvalidVersion:
            raise SearchError(f"--{label} {text!r} is not a version of {package}; write one such as 0.27.2") from None
    if ends[0] == ends[1]:
        raise SearchError(f"--good and --bad are both {package} {good}; name two releases")
    if (ends[0] < ends[1]) != (find == "broken"):
        hint = (
            "for when it became right add --find fixed" if find == "broken" else "for when it broke drop --find fixed"
        )
        order = "older" if find == "broken" else "newer"
        raise SearchError(f"--good {good} is not the {order} end (--bad {bad}): swap them, or {hint}")


def _told(made: Measurement) -> str:
    headroom = "" if made.headroom is None else f", headroom {made.headroom:.3g}"
    return f"{made.verdict}{headroom}" + (f": {made.message}" if made.message else "")


def _level(made: Measurement) -> str:
    if made.verdict not in ("agree", "disagree"):
        return "none"
    return "not finite" if made.headroom is None else f"{made.headroom:.3g}"


def _text(
    package: str,
    about: str,
    find: Find,
    found: SearchResult[str],
    answers: dict[str, Measurement],
    moved: dict[str, tuple[str, str]],
    trials: list[tuple[str, Likeness, Measurement]],
    reproduce: str,
    held: Sequence[Spec],
) -> str:
    low, high = answers[found.low], answers[found.high]
    ends = f"{package} {found.low}: {_told(low)}; {package} {found.high}: {_told(high)}"
    if found.outcome == "alike":
        return f"{about}: both ends are alike, there is nothing to search. {ends}"
    if found.outcome == "swapped":
        return f"{about}: the ends are the wrong way round: swap --good and --bad, or change --find. {ends}"
    if found.outcome == "unjudged":
        return f"{about}: an end could not be judged, so there is nothing to search between. {ends}"
    if found.outcome == "unstable":
        verdicts = [
            f"{version} {made.verdict}" for version, made in found.measured if version in (found.low, found.high)
        ]
        return f"{about}: different results when repeated, so no release is blamed: {', '.join(verdicts)}. {ends}"

    change = {"broken": "broke in", "fixed": "became right in"}[find] if found.by == "verdict" else "changed in"
    named = (package, "torch", "triton", *PARTNERS)
    rows = [("", found.low, found.high), ("verdict", low.verdict, high.verdict)]
    rows += [("headroom", _level(low), _level(high))]
    rows += [(name, *pair) for name, pair in moved.items() if name in named]
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    others = [name for name, answer, _ in trials if answer is Likeness.YES and name != package]
    by = "".join(f", with {name} {moved[name][1]}" for name in others)
    lines = [f"{about} {change} {package} {found.high}{by}", ""]
    lines += [f"  {row[0]:{wide[0]}}  {row[1]:{wide[1]}}  {row[2]}" for row in rows] + [""]
    if beside := [name for name in moved if name not in named]:
        lines.append(f"moved too: {', '.join(beside)}")
    for version in found.between:
        lines.append(f"not judged: {package} {version}: {_told(answers[version])}")
    times = sum(version == found.low for version, _ in found.measured)
    lines.append(f"measured: {len(answers)} releases, decided by {found.by}, the pair {times} times")
    for name, answer, made in trials:
        before, after = moved[name]
        says = {
            Likeness.YES: "shows the change",
            Likeness.NO: "does not show it",
            Likeness.UNKNOWN: "could not be judged",
        }
        lines.append(f"alone: {name} {before} -> {after} {says[answer]} ({_told(made)})")
    if trials and not any(answer is Likeness.YES for _, answer, _ in trials):
        lines.append("no single package shows the change alone: it takes them together")
    spec = {"low": f"{package}=={found.low}", "high": f"{package}=={found.high}"}
    lines.append(f"reproduce: {reproduce.format(**spec)}" + "".join(f" --hold {one}" for one in held))
    return "\n".join(lines)
