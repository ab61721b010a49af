"""What a night has done so far, as a file: it goes on after it was killed, and others see that it is alive."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from parity.decoding import convert, json_of, text_of
from parity.errors import UsageError
from parity.nightly.proof import Proof
from parity.nightly.steps import CommandOutcome

HEARTBEAT, FILE = "heartbeat.json", "night.json"
BEAT = 60.0
"""Seconds between two signs of life of the long run."""


class Record(msgspec.Struct, kw_only=True):
    """A night. `began`: seconds since the epoch; `run`: whether the long run came to its end; `exit_code`: of the whole night."""

    seed: int
    device: str
    profile: str
    families: list[str]
    implementations: list[str]
    began: float
    proofs: list[Proof] = field(default_factory=list)
    run: bool = False
    steps: list[CommandOutcome] = field(default_factory=list)
    exit_code: int | None = None

    def write(self, reports: Path, state: str) -> None:
        """Keep it, whole or not at all, and say that the night is alive."""
        reports.mkdir(parents=True, exist_ok=True)
        data = msgspec.to_builtins(self)
        data["steps"] = [one | {"verdict": step.verdict} for one, step in zip(data["steps"], self.steps, strict=True)]
        _written(reports / FILE, data)
        self._beat(reports, state)

    def beating(self, reports: Path, state: str) -> Callable[[], None]:
        """Says once a minute, however often it is called, that the night is alive."""
        last = time.monotonic()

        def alive() -> None:
            nonlocal last
            if time.monotonic() > last + BEAT:
                last = time.monotonic()
                self._beat(reports, state)

        return alive

    def _beat(self, reports: Path, state: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        _written(reports / HEARTBEAT, {"time": now, "state": state, "exit_code": self.exit_code, "pid": os.getpid()})

    @classmethod
    def read(cls, reports: Path, **given: Any) -> Record:
        """The night that was killed; `given`: what the command line says of it, or its default, None and empty.

        Raises:
            UsageError: where there is none, where it came to its end, and for an option that was another one then.
        """
        path = reports / FILE
        found: Record = convert(cls, json_of(text_of(path, "night"), str(path)), str(path))
        if found.exit_code is not None:
            raise UsageError(f"{path}: that night came to its end with exit code {found.exit_code}: begin a new one")
        for name, value in given.items():
            then = getattr(found, name)
            if value and value != then:
                raise UsageError(f"{path}: that night had {name} {then}, not {value}: leave the option out")
        ended = max(p.stat().st_mtime for p in (path, reports / "results.ndjson") if p.exists())
        found.began += time.time() - ended  # the time between does not count
        return found


def last_sign(reports: Path) -> str:
    """When a night last said that it was alive, and at what it was; nothing where none ever did."""
    try:
        beat = json.loads((reports / HEARTBEAT).read_text())
        return f"{beat['time']}, at {beat['state']}"
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _written(path: Path, content: Any) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)
