"""What is measured in each version: one case through one implementation, and the result for bisect and history."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from parity.case.case import Case
from parity.errors import UsageError
from parity.results.row import Row
from parity.sampling.find import followed
from parity.versions.bisect import Measurement
from parity.versions.environment import Environment
from parity.versions.look import rows


@dataclass(frozen=True)
class CaseCheck:
    """A case, an implementation, and which of its quantities count (patterns; by default all).

    `failure`: the verdict that counts as wrong when a search asks; "crashed" where the crash is what is looked for and
    not an inability to judge.
    """

    name: str
    case: Case
    implementation: str
    quantities: tuple[str, ...] = ("*",)
    failure: str = "disagree"
    device: str = "cpu"

    @property
    def about(self) -> str:
        """What is followed, on one line."""
        only = "" if self.quantities == ("*",) else f", {', '.join(self.quantities)}"
        where = "" if self.device == "cpu" else f", on {self.device}"
        return f"{self.name}, {self.implementation}{only}{where}"

    def measure(self, made: Environment) -> Measurement:
        """The answer of `judged` in an environment; EnvironmentUnusable when the process dies there."""
        return self.judged(rows(made, [self.case], [self.implementation], self.device))

    def judged(self, found: Iterable[Row]) -> Measurement:
        """`answer`, with this check's own failure read as a disagreement."""
        answer = self.answer(found)
        return replace(answer, verdict="disagree") if answer.verdict == self.failure else answer

    def answer(self, found: Iterable[Row]) -> Measurement:
        """agree when every quantity that counts agrees, disagree with the greatest headroom when one does not.

        A verdict about the whole case (refused, unsupported, crashed, …) is the answer, with its message.
        """
        mine = [r for r in found if r.case == self.case.id and r.implementation == self.implementation]
        if whole := next((r for r in mine if r.quantity is None), None):
            return Measurement(whole.verdict, message=whole.message)
        mine = [r for r in mine if any(fnmatchcase(str(r.quantity), p) for p in self.quantities)]
        if not mine:
            lacks = f"{self.implementation} hands out no {', '.join(self.quantities)}"
            return Measurement("unsupported", message=lacks)
        failing = [r for r in mine if r.verdict != "agree"]
        said = [f"{r.quantity} {amount(r.value)} instead of {amount(r.value_oracle)}" for r in failing[:3]]
        sizes = [r.headroom for r in failing or mine]
        size = None if None in sizes else max(filter(None, sizes), default=0.0)
        return Measurement(failing[0].verdict if failing else "agree", size, message="; ".join(said))


def amount(value: float | None) -> str:
    """A number as reports print it."""
    return "not finite" if value is None else f"{value:.4g}"


def only_implementation(case: Case, named: Sequence[str], found_with: str | None) -> str:
    """The one implementation that a search follows: the named one, else the one that the case was found with.

    Raises:
        UsageError: when there is none, or several.
    """
    chosen = followed(named, found_with, case)
    if len(chosen) != 1:
        had = "no implementation" if not chosen else f"{len(chosen)} implementations"
        raise UsageError(
            f"case {case.id}: a search follows one implementation, got {had}; name it with --implementation"
        )
    return chosen[0]
