"""A command of a night besides the long run, and what came of it."""

import msgspec

CUT = "its time was over"


class CommandOutcome(msgspec.Struct, frozen=True):
    """One command and what came of it.

    `exit_code`: None where it was stopped before its end and had found nothing. `tail`: the last lines that it printed.
    `reached`: where its time was over before its end, how far it came.
    """

    name: str
    command: str
    exit_code: int | None
    seconds: float
    tail: str
    reached: str = ""

    @property
    def counts(self) -> int:
        """The exit code that the night has of it: 3 where it did not come to its end."""
        return 3 if self.exit_code is None else self.exit_code

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
        said = words.get(self.exit_code, f"failed ({self.exit_code})")
        return f"{said}, but {CUT}: {self.reached}" if self.reached else said
