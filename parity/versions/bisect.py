"""The search for the release that changed a result.

`find_change` is the search proper, over True, False and unknown. `bisect` turns measurements into such answers: by verdict
where the ends differ in it, by headroom where they do not. `search` does so with a real index, environments and a check.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from packaging.version import InvalidVersion, Version

from parity.errors import UsageError
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.releases import parse_all, releases
from parity.versions.resolve import PARTNERS

Find = Literal["broken", "fixed"]
Outcome = Literal["found", "alike", "swapped", "unjudged", "unstable"]
By = Literal["verdict", "headroom"]
# From worst to best; a release with any other verdict cannot be judged and is passed over.
RANKS = ("disagree", "refused", "agree")
# Below a thousandth of a gate is rounding noise, and two values within a factor of two are alike.
FLOOR, FACTOR = 1e-3, 2.0
CONFIRM = 2
ENDED = {
    "alike": "both ends are alike, there is nothing to search",
    "swapped": "the ends are the wrong way round: swap --good and --bad, or change --find",
    "unjudged": "an end could not be judged, so there is nothing to search between",
    "unstable": "different results when repeated, so no release is blamed",
}
"""How a search ended that found nothing."""
SAYS = {True: "shows the change", False: "does not show it", None: "could not be judged"}
"""Of a package alone."""
Likeness = bool | None
"""What a candidate says: like the first end (False), like the last (True), or nothing (None)."""


@dataclass(frozen=True)
class Measurement:
    """What a check found in one environment; `verdict` and `headroom` as in a result row, None if not finite."""

    verdict: str
    headroom: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    message: str = ""


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search. found: `low` answers like the first end, `high` like the last, everything in `between` could
    not be judged. alike, swapped, unjudged: the ends do not allow a search; `low` and `high` are the ends. unstable:
    `low` or `high` answered otherwise when it was measured again. `by`: what decided, "verdict" or "headroom";
    `measured`: every measurement, in the order made; `answer`: how one is read."""

    outcome: Outcome
    low: str
    high: str
    between: tuple[str, ...]
    by: By
    measured: list[tuple[str, Measurement]]
    answer: Callable[[Measurement], Likeness] | None

    @property
    def answers(self) -> dict[str, Measurement]:
        """The first of each candidate."""
        return dict(reversed(self.measured))


def find_change(count: int, ask: Callable[[int, int], Likeness]) -> tuple[int, int]:
    """Neighbours low < high of which low says False, high says True, and all between None. Candidate 0 is known to say
    False, candidate count-1 True. `ask(index, left)` is called at most once an index; `left` is how many further questions
    are expected. Among answers that change more than once, one change is found."""
    low, high, asked = 0, count - 1, set[int]()
    while True:
        gaps: list[list[int]] = [[]]
        for index in range(low + 1, high):
            if index in asked:
                gaps.append([])
            else:
                gaps[-1].append(index)
        # The middle of the longest stretch nobody asked: it leaves a block of unknowns behind in a few jumps.
        longest = max(gaps, key=len)
        if not longest:
            return low, high
        middle = longest[(len(longest) - 1) // 2]
        asked.add(middle)
        answer = ask(middle, math.ceil(math.log2(sum(map(len, gaps)) + 1)) - 1)
        if answer:
            high = middle
        elif answer is False:
            low = middle


def bisect(
    candidates: Sequence[str], measure: Callable[[str, int | None], Measurement], *, find: Find = "broken"
) -> SearchResult:
    """Finds two neighbours among `candidates` (oldest first) between which the answer of `measure` changed.
    find="broken": the first is good and the last bad; "fixed": the other way round. Both ends are measured first.
    `measure(candidate, left)`: with the number of steps expected after it, or None: a pair is measured `CONFIRM` times more
    before it is believed. ValueError for fewer than two candidates."""
    if len(candidates) < 2:
        raise ValueError(f"bisect over {len(candidates)} releases: a search needs two different ends")
    measured: list[tuple[str, Measurement]] = []

    def look(index: int, left: int | None = None) -> Measurement:
        measured.append((candidates[index], measure(candidates[index], left)))
        return measured[-1][1]

    expected = math.ceil(math.log2(len(candidates) - 1))
    first, last = look(0, expected + 1), look(-1, expected)
    outcome, by, answer = reading(first, last, find)
    if answer is None:
        return SearchResult(outcome, candidates[0], candidates[-1], (), by, measured, answer)
    low, high = find_change(len(candidates), lambda index, left: answer(look(index, left)))
    for index, said in ((low, False), (high, True)) * CONFIRM:
        if outcome == "found" and answer(look(index)) is not said:
            outcome = "unstable"
    between = tuple(candidates[low + 1 : high])
    return SearchResult(outcome, candidates[low], candidates[high], between, by, measured, answer)


def reading(
    first: Measurement, last: Measurement, find: Find
) -> tuple[Outcome, By, Callable[[Measurement], Likeness] | None]:
    """How measurements are to be read, given the ends; no reading where the ends do not allow a search."""
    if first.verdict not in RANKS or last.verdict not in RANKS:
        return "unjudged", "verdict", None
    if first.verdict != last.verdict:
        worsened = RANKS.index(first.verdict) > RANKS.index(last.verdict)
        if worsened != (find == "broken"):
            return "swapped", "verdict", None
        sides = {first.verdict: False, last.verdict: True}
        return "found", "verdict", lambda one: sides.get(one.verdict)

    start, end = _level(first), _level(last)
    if start is None or end is None or start == end or abs(start - end) < math.log(FACTOR):
        return "alike", "headroom", None

    def nearer(one: Measurement) -> Likeness:
        level = _level(one)
        if level is None:
            return None
        if math.isinf(level):
            # Beyond every finite value: with an end that is infinite too if there is one, else with the greater end.
            return end > start
        # Of an infinite end every finite value is equally far: it belongs to the other.
        return abs(level - end) < abs(level - start)

    return "found", "headroom", nearer


def _level(one: Measurement) -> float | None:
    """Logarithm of the headroom; a disagreement without a finite one is infinite, anything else unknown."""
    if one.verdict not in RANKS:
        return None
    if one.headroom is None:
        return math.inf if one.verdict == "disagree" else None
    return math.log(max(one.headroom, FLOOR))


@dataclass(frozen=True)
class Report:
    """How a search ended. `moved`: package -> (version before, version after) between the
    pair; `trials`: (package, whether it alone shows the change, measured). What else: the parameters of `search`."""

    package: str
    about: str
    find: Find
    held: Sequence[str]
    reproduce: str
    found: SearchResult
    moved: dict[str, tuple[str, str]]
    trials: list[tuple[str, Likeness, Measurement]]

    @property
    def cause(self) -> tuple[str, ...]:
        """The packages of which each alone shows the change, empty where nothing had to be tried, or only all together do."""
        return tuple(name for name, answer, _ in self.trials if answer)

    @property
    def text(self) -> str:
        package, found, answers, moved = self.package, self.found, self.found.answers, self.moved
        low, high = answers[found.low], answers[found.high]
        if found.outcome != "found":
            ends = f"{package} {found.low}: {_told(low)}; {package} {found.high}: {_told(high)}"
            if found.outcome == "unstable":
                again = [f"{at} {made.verdict}" for at, made in found.measured if at in (found.low, found.high)]
                ends = f"{ends}; in order: {', '.join(again)}"
            return f"{self.about}: {ENDED[found.outcome]}. {ends}"
        change = (
            {"broken": "broke in", "fixed": "became right in"}[self.find] if found.by == "verdict" else "changed in"
        )
        named = (package, "torch", "triton", *PARTNERS)
        rows = [("", found.low, found.high), ("verdict", low.verdict, high.verdict)]
        none = {"agree": "not finite", "disagree": "not finite"}  # of another verdict there is none
        size, then = (none.get(m.verdict, "none") if m.headroom is None else f"{m.headroom:.3g}" for m in (low, high))
        rows += [("headroom", size, then)]
        rows += [(name, *pair) for name, pair in moved.items() if name in named]
        wide = [max(len(row[column]) for row in rows) for column in range(2)]
        by = "".join(f", with {name} {moved[name][1]}" for name in self.cause if name != package)
        lines = [f"{self.about} {change} {package} {found.high}{by}", ""]
        lines += [*(f"  {row[0]:{wide[0]}}  {row[1]:{wide[1]}}  {row[2]}" for row in rows), ""]
        if beside := [name for name in moved if name not in named]:
            lines.append(f"moved too: {', '.join(beside)}")
        lines += [f"not judged: {package} {version}: {_told(answers[version])}" for version in found.between]
        times = sum(version == found.low for version, _ in found.measured)
        lines.append(f"measured: {len(answers)} releases, decided by {found.by}, the pair {times} times")
        for name, answer, made in self.trials:
            lines.append(f"alone: {name} {' -> '.join(moved[name])} {SAYS[answer]} ({_told(made)})")
        if self.trials and not self.cause:
            lines.append("no single package shows the change alone: it takes them together")
        said = self.reproduce.format(high=f"{package}=={found.high}")
        return "\n".join([*lines, f"reproduce: {said}" + "".join(f" --hold {one}" for one in self.held)])


def search(
    package: str,
    *,
    good: str,
    bad: str,
    check: Callable[[Environment], Measurement],
    about: str,
    find: Find = "broken",
    hold: Sequence[str] = (),
    reproduce: str,
    say: Callable[[str], None],
) -> Report:
    """Finds the neighbouring releases of `package` between which what `check` finds changed.

    find="broken": `good` is the older end; "fixed": `bad` is. `about` names the check in the report. `reproduce` is the line
    that ends the report ({high}: the spec of the release that shows it). Partners that moved with it are tried alone.
    UsageError for ends in the wrong order; EnvironmentUnusable for an end that does not exist. An environment that cannot be
    made or imported inside the range is passed over.
    """
    check_ends(package, good, bad, find)
    held = [str(one) for one in parse_all(hold)]
    candidates = [one.version for one in releases(package, *((good, bad) if find == "broken" else (bad, good)))]

    def measured(version: str, hold: Sequence[str] = ()) -> Measurement:
        try:
            environment = Environment.of((f"{package}=={version}",), (*held, *hold))
            return replace(check(environment), versions=environment.versions)
        except EnvironmentUnusable as error:
            return Measurement("unsupported", message=str(error))

    def measure(version: str, left: int | None) -> Measurement:
        if left is not None:
            say(f"{package} {version}: measuring ({left} step{'' if left == 1 else 's'} left after it)")
        made = measured(version)
        say(f"{package} {version}: {_told(made)}{' (again)' if left is None else ''}")
        return made

    found = bisect(candidates, measure, find=find)
    low, high = found.answers[found.low], found.answers[found.high]
    names = sorted({*low.versions, *high.versions}, key=lambda name: (name != package, name not in PARTNERS, name))
    pairs = {name: (low.versions.get(name, "absent"), high.versions.get(name, "absent")) for name in names}
    moved = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]} if found.outcome == "found" else {}

    def alone(name: str, version: str, hold: list[str]) -> tuple[str, Likeness, Measurement]:
        say(f"{name} alone: {package} {version} with {', '.join(hold)}")
        made = measured(version, hold)
        return name, found.answer and found.answer(made), made

    # Who did it, where partners moved with the package: the package alone, and if not it, each partner alone.
    partners = [name for name in PARTNERS if name in moved and name != package and "absent" not in moved[name]]
    trials = [alone(package, found.high, [f"{name}=={moved[name][0]}" for name in partners])] if partners else []
    if trials and not trials[0][1]:
        trials += [alone(name, found.low, [f"{name}=={moved[name][1]}"]) for name in partners]
    return Report(package, about, find, held, reproduce, found, moved, trials)


def check_ends(package: str, good: str, bad: str, find: Find) -> None:
    """Refuses ends between which there is nothing to search, before anything is measured. Raises UsageError: an end is
    no version, both are the same, or they are in the wrong order for `find`."""
    ends = []
    for label, text in (("good", good), ("bad", bad)):
        try:
            ends.append(Version(text))
        except InvalidVersion:
            raise UsageError(f"--{label} {text!r} is not a version of {package}; write one such as 0.27.2") from None
    if ends[0] == ends[1]:
        raise UsageError(f"--good and --bad are both {package} {good}; name two releases")
    if (ends[0] < ends[1]) != (find == "broken"):
        order, when = ("older", "became right add") if find == "broken" else ("newer", "broke drop")
        raise UsageError(
            f"--good {good} is not the {order} end (--bad {bad}): swap them, or for when it {when} --find fixed"
        )


def _told(made: Measurement) -> str:
    headroom = "" if made.headroom is None else f", headroom {made.headroom:.3g}"
    return f"{made.verdict}{headroom}" + (f": {made.message}" if made.message else "")
