"""Bisect the releases of a package: the search, with a real index, environments and a check."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from parity.errors import UsageError
from parity.versions.bisect import Find, Likeness, Measurement, SearchResult, bisect
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.releases import parse_all, releases
from parity.versions.resolve import PARTNERS

Check = Callable[[Environment], Measurement]
ENDED = {
    "alike": "both ends are alike, there is nothing to search",
    "swapped": "the ends are the wrong way round: swap --good and --bad, or change --find",
    "unjudged": "an end could not be judged, so there is nothing to search between",
    "unstable": "different results when repeated, so no release is blamed",
}
"""How a search ended that found nothing."""
SAYS = {True: "shows the change", False: "does not show it", None: "could not be judged"}
"""Of a package alone."""


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
    check: Check,
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
