"""A script of an issue in a fresh process that does not see this package."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from parity.running import child

SECONDS = 300.0
"""CPU seconds of a script: a busy machine makes none of them wrong."""
FAULT = 70
"""Stands for the 1 with which Python ends on an exception: a script that crashes shows nothing."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a script came to: 1 while the defect is there, 0 when it is gone, anything else is a fault of the script."""

    code: int
    output: str
    error: str = ""


def ran(text: str, seconds: float = SECONDS, first: Path | None = None) -> Ran:
    """Run a script with this interpreter, outside this package; `first` is a folder whose packages stand for the installed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"} | ({"PYTHONPATH": str(first)} if first else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, file.name]
        try:
            done = child.run(command, cpu=seconds, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except child.LimitExceeded as error:
            return Ran(124, "", str(error))
    failed = done.returncode == 1 and "Traceback (most recent call last)" in done.stderr
    return Ran(FAULT if failed else done.returncode, done.stdout, done.stderr)
