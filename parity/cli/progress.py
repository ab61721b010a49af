"""How far a run is: two live lines on a terminal, a line every half minute elsewhere, both on standard error."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console

from parity.results.row import Row

EVERY = 30.0  # seconds between two lines where there is no terminal
EARLY = 0.03
"""Share of the work before which nothing is said about the time left: the first, frozen cases, take longest."""


class Shown(contextlib.AbstractContextManager["Shown"]):
    """Called as `parity.running.run.execute` tells; shown from then until it is left. `clock` gives seconds; lines of a
    pipe come from a thread, so that a hung kernel does not silence them."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.clock = clock
        self.begun = self.moved = clock()
        self.done, self.of, self.share, self.read, self.now = 0, 0, 0.0, 0, "starting"
        self.until = math.inf
        self.new: set[str] = set()
        self.known: set[str] = set()
        self.display: contextlib.ExitStack | None = None
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = self.console.status("") if terminal else None

    def __call__(
        self, rows: Sequence[Row], done: int, of: int, share: float, now: str, seconds: float | None = None
    ) -> None:
        self.until = math.inf if seconds is None else self.clock() + seconds
        if self.display is None:
            self._start()
        for row in rows[self.read :]:
            if row.new:
                self.new.add(row.implementation)
            elif row.known:
                self.known.add(row.known)
        self.moved = self.moved if share == self.share else self.clock()
        self.read, self.done, self.of, self.share, self.now = len(rows), done, of, share, now or self.now
        if self.live is not None:
            self.live.update(f"{self.figures()}\n{self.now}".replace("[", r"\["))

    def figures(self) -> str:
        """Per cent of the work, cases done and planned, time left, findings so far."""
        new = f"NEW in {', '.join(sorted(self.new)[:2])}{' …' * (len(self.new) > 2)}" if self.new else "NEW none"
        share, cases = f"{math.floor(100 * self.share + 1e-6)} %", f"{self.done:,} of {self.of:,} cases"
        return " · ".join([share, cases, self.left(), new, f"KNOWN {len(self.known) or 'none'}"])

    def left(self) -> str:
        """Time left at the speed so far, at most until no more cases are dealt; how long findings then take, nobody knows."""
        if self.done == self.of > 0:
            return "finishing"
        early = self.share < EARLY
        seconds = math.inf if early else (1.0 / self.share - 1.0) * (self.clock() - self.begun)
        seconds = math.inf if seconds < self.clock() - self.moved else seconds  # it has passed: the rest takes longer
        seconds = min(seconds, self.until - self.clock())
        if seconds == math.inf:
            return "time left not known yet"
        if seconds <= 0:
            return "its time is over"
        time_left = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f"{'at most' if early else 'about'} {time_left} {'of cases ' if self.new else ''}left"

    def line(self) -> str:
        """What a pipe gets."""
        return f"{self.clock() - self.begun:.0f} s: {self.figures()} · now {self.now}"

    def say(self, line: str) -> None:
        """Print a line about something else; the display ends until the next call."""
        self._stop()
        self.console.print(line, markup=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _start(self) -> None:
        self.display, ended = contextlib.ExitStack(), threading.Event()

        def lines() -> None:
            while not ended.wait(EVERY):
                self.console.print(self.line(), markup=False, soft_wrap=True)

        if self.live is not None:
            self.display.enter_context(self.live)
        else:
            thread = threading.Thread(target=lines, daemon=True)
            thread.start()
            self.display.callback(thread.join)  # a line of it must not come after what is said next
            self.display.callback(ended.set)

    def _stop(self) -> None:
        if self.display is not None:
            self.display.close()
            self.display = None
