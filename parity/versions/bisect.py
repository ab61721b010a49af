"""The search for the release that changed a result. Pure: no index, no environment, no file.

`find_change` is the search proper, over True, False and unknown. `bisect` turns measurements into such answers: by verdict
where the ends differ in it, by headroom where they do not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Find = Literal["broken", "fixed"]
Outcome = Literal["found", "alike", "swapped", "unjudged", "unstable"]
By = Literal["verdict", "headroom"]
# From worst to best; a release with any other verdict cannot be judged and is passed over.
RANKS = ("disagree", "refused", "agree")
# Below a thousandth of a gate is rounding noise, and two values within a factor of two are alike.
FLOOR, FACTOR = 1e-3, 2.0
CONFIRM = 2


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
