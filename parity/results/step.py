"""A command of a night besides the long run, and what came of it."""

import dataclasses
import re

CUT = "its time was over"
_FOUND = re.compile(r" (?:broke|became right|changed) in \S+ \S+(?:, with .+)?$")


@dataclasses.dataclass(frozen=True)
class CommandOutcome:
    """One command and what came of it.

    Attributes:
        name: of the step.
        command: the command line.
        exit_code: None where it was stopped before it had looked at anything.
        seconds: on the clock.
        tail: the last lines that it printed.
        reached: where its time was over before its end, how far it came.
    """

    name: str
    command: str
    exit_code: int | None
    seconds: float
    tail: str
    reached: str = ""

    @property
    def search(self) -> bool:
        """Whether it looks for the release of a finding: what it ends with says nothing about the night."""
        return self.name.startswith("bisect ")

    @property
    def search_result(self) -> str:
        """What a search found in a line: `CASE, IMPLEMENTATION broke in trl 1.14.0`; "" where it found nothing."""
        lines = self.tail.splitlines() if self.search and self.exit_code == 0 else ()
        return next((line for line in lines if _FOUND.search(line)), "")

    @property
    def counts(self) -> int | None:
        """The exit code that the night has of it: 3 where it had no time for anything, None of a search."""
        return None if self.search else 3 if self.exit_code is None else self.exit_code

    @property
    def whole(self) -> bool:
        """Whether it came to its end."""
        return self.exit_code is not None and not self.reached

    @property
    def verdict(self) -> str:
        """A few words for the page."""
        if self.exit_code is None:
            return f"stopped: {CUT}" + (f", {self.reached}" if self.reached else "")
        words = {0: "as expected", 1: "RED", 2: "wrong usage", 3: "not run: no environment", 4: "stale"}
        if self.search:
            words |= {0: "found", 1: "not found", 3: "could not be judged"}
        said = words.get(self.exit_code, f"failed ({self.exit_code})")
        return f"{said}, but {CUT}: {self.reached}" if self.reached else said
