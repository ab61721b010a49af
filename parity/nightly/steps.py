"""The commands of a night besides the long run, each in a process of its own with a limit on the clock."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parity.process import stopping

COMMAND = (sys.executable, "-P", "-m", "parity")
GRACE = 10.0
"""Seconds to end in after SIGTERM."""
TAIL = 12
"""Lines of its output that a step's place in the report shows."""


@dataclasses.dataclass(frozen=True)
class CommandOutcome:
    """One command and what came of it; `exit_code` is None where the time was over before its end."""

    name: str
    command: str
    exit_code: int | None
    seconds: float
    tail: str

    @property
    def verdict(self) -> str:
        """One or two words for the page."""
        if self.exit_code is None:
            return "stopped: the time was over"
        return {0: "as expected", 1: "RED", 2: "wrong usage", 3: "not run: no environment", 4: "stale"}.get(
            self.exit_code, f"failed ({self.exit_code})"
        )


def run(name: str, words: Sequence[str], log: Path, limit: float, module: str = "") -> CommandOutcome:
    """Run `parity WORDS`, or another module, with its output in `log`; after `limit` seconds it and its children are ended."""
    command = [*((sys.executable, "-m", module) if module else COMMAND), *words]
    begun = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and Path(p).is_dir())}
    with log.open("wb") as out, stopping():
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code: int | None = process.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        except BaseException:
            _end(process)
            raise
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return CommandOutcome(
        name, " ".join([module or "parity", *words]), code, time.monotonic() - begun, "\n".join(lines[-TAIL:])
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its whole session, in order if that takes no more than `GRACE`."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
