"""What a night has done so far, as a file: it goes on after it was killed, and others see that it is alive."""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import field

from parity.decoding import convert, json_of, text_of
from parity.errors import UsageError
from parity.nightly.proof import Proof
from parity.nightly.steps import CommandOutcome

HEARTBEAT, FILE = "heartbeat.json", "night.json"


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
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        beat = {"time": now, "state": state, "exit_code": self.exit_code, "pid": os.getpid()}
        data = msgspec.to_builtins(self)
        data["steps"] = [one | {"verdict": step.verdict} for one, step in zip(data["steps"], self.steps, strict=True)]
        for name, content in ((FILE, data), (HEARTBEAT, beat)):
            draft = reports / f".{name}"
            draft.write_text(json.dumps(content, indent=1) + "\n")
            draft.replace(reports / name)

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
