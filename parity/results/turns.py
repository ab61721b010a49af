"""Whose turn it is: what a command looks at, in the order of when it was looked at last.

A command whose time is short so comes to everything over several nights: first what was never begun, then in turn what
was wrong at last and what came to its end longest ago, what was cut on the way among them. The file is written before and
after each unit: killed at any moment, it says what is known.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import field

from parity.decoding import convert, json_of, save_json, text_of
from parity.errors import UsageError

Ending = Literal["", "right", "wrong", "not run"]
RIGHT: Ending = "right"
WRONG: Ending = "wrong"
NOT_RUN: Ending = "not run"
TRIES = 3
"""A unit that was begun so often in vain needs more time than it is given."""
Result = TypeVar("Result")


class Turn(msgspec.Struct):
    """A unit: when it was begun last and when it last came to its end (UTC), with what outcome; `tries`: begun since then."""

    begun: str = ""
    ended: str = ""
    outcome: Ending = ""
    tries: int = 0

    @property
    def sort_key(self) -> str:
        """What units are sorted by: one that was cut keeps its place before those that came to an end since, `TRIES` times."""
        return self.ended if self.tries < TRIES else self.begun


class Turns(msgspec.Struct):
    """The turns of a command's units; `units` are those that it has now. Without `path` nothing is kept."""

    units: list[str] = field(default_factory=list)
    known: dict[str, Turn] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def read(cls, path: Path | None) -> Turns:
        """What a file remembers; nothing where there is none.

        Raises:
            UsageError: for a file that is none of these.
        """
        if path is None or not path.exists():
            return cls(path=path)
        found: Turns = convert(cls, json_of(text_of(path, "turns"), str(path)), str(path))
        found.path = path
        return found

    def order(self, units: Sequence[str]) -> list[str]:
        """The units in their turn; as they were given where nothing is remembered."""
        self.units = list(units)
        turn = {unit: self.known.get(unit, Turn()) for unit in units}
        fresh = [unit for unit in units if not turn[unit].begun]
        seen = sorted((unit for unit in units if turn[unit].begun), key=lambda unit: turn[unit].sort_key)
        wrong = [unit for unit in seen if turn[unit].outcome == WRONG]
        others = [unit for unit in seen if turn[unit].outcome != WRONG]
        mixed = itertools.chain.from_iterable(itertools.zip_longest(wrong, others))
        self._write()
        return fresh + [unit for unit in mixed if unit is not None]

    def begin(self, unit: str) -> None:
        """A unit is looked at now."""
        turn = self.known.setdefault(unit, Turn())
        turn.begun, turn.tries = _now(), turn.tries + 1
        self._write()

    def end(self, unit: str, outcome: Ending) -> None:
        """It has come to its end."""
        turn = self.known.setdefault(unit, Turn())
        turn.ended, turn.outcome, turn.tries = _now(), outcome, 0
        self._write()

    def reached(self, since: datetime.datetime) -> list[str]:
        """The units that came to their end since then."""
        return [unit for unit in self.units if self._of(unit).ended >= since.isoformat()]

    def having(self, outcome: Ending) -> list[str]:
        """The units with this outcome, whenever they were looked at last."""
        return [unit for unit in self.units if self._of(unit).outcome == outcome]

    def starved(self) -> list[str]:
        """The units that were begun `TRIES` times and never came to their end."""
        return [unit for unit in self.units if self._of(unit).tries >= TRIES]

    def oldest(self) -> str:
        """The day on which the unit that was not looked at for longest came to its end; nothing where one never did."""
        return min((self._of(unit).ended[:10] for unit in self.units), default="")

    def _of(self, unit: str) -> Turn:
        return self.known.get(unit, Turn())

    def _write(self) -> None:
        if self.path is None:
            return
        save_json(self.path, {"units": self.units, "known": self.known})


def set_aside(path: Path) -> str:
    """Moves a file of turns that cannot be read out of the way; what to say of it, nothing where all is well."""
    try:
        Turns.read(path)
        return ""
    except UsageError as error:
        aside = path.replace(path.with_name(f"{path.name}.unreadable"))
        return f"{error}: set aside as {aside.name}, everything counts as never looked at"


def in_turn(
    turns: Turns,
    jobs: Mapping[str, Sequence[Any]],
    call: Callable[..., Result],
    outcome: Callable[[Result], Ending],
    pool: concurrent.futures.Executor | None = None,
    workers: int = 1,
) -> Iterator[Result]:
    """`call(*jobs[unit])` of every unit in its turn, each result as it is there: in this process, or in a pool of so many
    workers, where a unit begins when one of them is free."""
    if pool is None:
        for unit in turns.order(list(jobs)):
            turns.begin(unit)
            result = call(*jobs[unit])
            turns.end(unit, outcome(result))
            yield result
        return
    left, running = turns.order(list(jobs)), dict[concurrent.futures.Future[Result], str]()
    while left or running:
        while left and len(running) < workers:
            unit = left.pop(0)
            turns.begin(unit)
            running[pool.submit(call, *jobs[unit])] = unit
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for job in done:
            result = job.result()
            turns.end(running.pop(job), outcome(result))
            yield result


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
