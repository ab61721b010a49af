"""What a night has done so far, as a file: it goes on after it was killed, and others see that it is alive."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import field

from parity.decoding import convert, json_of, save_json, saved, text_of
from parity.errors import UsageError
from parity.nightly.proof import Proof
from parity.nightly.steps import CommandOutcome

HEARTBEAT, FILE = "heartbeat.json", "night.json"
BEAT = 60.0
"""Seconds between two signs of life of the long run."""
SILENCE = 1800.0
"""Seconds without a sign of life, besides those that a command was given, after which a night is dead."""


class Record(msgspec.Struct, kw_only=True):
    """A night. `began`: seconds since the epoch; `run`: whether the long run came to its end; `kept`: the id under which it is
    kept in the history; `exit_code`: of the whole night."""

    seed: int
    device: str
    profile: str
    families: list[str]
    implementations: list[str]
    began: float
    proofs: list[Proof] = field(default_factory=list)
    run: bool = False
    kept: str = ""
    steps: list[CommandOutcome] = field(default_factory=list)
    exit_code: int | None = None

    def write(self, reports: Path, state: str, seconds: float = 0.0) -> None:
        """Keep it, whole or not at all, and say that the night is alive, and for how many seconds it may be silent now."""
        reports.mkdir(parents=True, exist_ok=True)
        data = msgspec.to_builtins(self)
        data["steps"] = [one | {"verdict": step.verdict} for one, step in zip(data["steps"], self.steps, strict=True)]
        save_json(reports / FILE, data)
        self._beat(reports, state, seconds)

    def beating(self, reports: Path, state: str) -> Callable[[], None]:
        """Says once a minute, however often it is called, that the night is alive."""
        last = time.monotonic()

        def alive() -> None:
            nonlocal last
            if time.monotonic() > last + BEAT:
                last = time.monotonic()
                self._beat(reports, state)

        return alive

    def _beat(self, reports: Path, state: str, seconds: float = 0.0) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        until = time.time() + seconds + SILENCE
        beat = _Beat(now, until, state, self.exit_code, os.getpid(), socket.gethostname())
        save_json(reports / HEARTBEAT, beat)

    @classmethod
    def read(cls, reports: Path, **given: Any) -> Record:
        """The night that was killed; `given`: what the command line says of it, or its default, None and empty.

        Raises:
            UsageError: where there is none, where it came to its end, and for an option that was another one then.
        """
        path = reports / FILE
        found: Record = convert(cls, json_of(text_of(path, "night"), str(path)), str(path))
        if found.exit_code is not None:
            raise UsageError(f"{path}: that night has ended, with exit code {found.exit_code}: start a new one")
        for name, value in given.items():
            then = getattr(found, name)
            if value and value != then:
                raise UsageError(f"{path}: that night had {name} {then}, not {value}: leave the option out")
        ended = max(p.stat().st_mtime for p in (path, reports / "results.ndjson") if p.exists())
        found.began += time.time() - ended  # the time between does not count
        return found


class _Beat(msgspec.Struct):
    time: str
    until: float
    state: str
    exit_code: int | None
    pid: int
    host: str


@dataclasses.dataclass(frozen=True)
class Standing:
    """Of the last night: the id of its kept run; whether it is under way; why it is as bad as none at all, or nothing."""

    kept: str = ""
    under_way: bool = False
    lost: str = ""


def standing(reports: Path, profile: str, kept: Collection[str]) -> Standing:
    """How the last night stands, `kept`: the ids of the runs in the history. A night of another profile tells nothing."""
    path = reports / FILE
    if not path.exists():
        return Standing()
    try:
        night: Record = convert(Record, json_of(text_of(path, "night"), str(path)), str(path))
    except UsageError as error:
        return Standing(lost=str(error))
    if night.profile != profile:
        return Standing()
    which = f"the night of {datetime.datetime.fromtimestamp(night.began, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if night.exit_code is None and alive(reports):
        return Standing(night.kept, under_way=True)
    if night.exit_code is None and not night.run:
        return Standing(night.kept, lost=f"{which} died, or was stopped, in its long run or before")
    if not night.run:
        why = [str(one) for one in night.proofs if not one.holds]
        return Standing(
            night.kept, lost=f"{which} ended with {night.exit_code}: {'; '.join(why) or 'nothing compared'}"
        )
    if night.kept and night.kept not in kept:
        return Standing(
            night.kept, lost=f"{which} ended, and its file in {reports / 'history'} is not there or unreadable"
        )
    return Standing(night.kept)


def alive(reports: Path) -> int:
    """The process of the night that writes into this folder; 0 where none does. Of another machine by its signs of life alone."""
    beat: _Beat | None = saved(_Beat, reports / HEARTBEAT)
    if beat is None or beat.exit_code is not None or time.time() > beat.until:
        return 0
    gone = beat.pid == os.getpid() or not psutil.pid_exists(beat.pid)
    return 0 if gone and beat.host == socket.gethostname() else beat.pid


def last_sign(reports: Path) -> str:
    """When a night last said that it was alive, and at what it was; nothing where none ever did."""
    beat: _Beat | None = saved(_Beat, reports / HEARTBEAT)
    return f"{beat.time}, at {beat.state}" if beat else ""
