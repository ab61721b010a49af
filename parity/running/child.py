"""A process of this package and what it reports; the code in it may print, fork and end as it likes."""

import contextlib
import json
import math
import os
import secrets
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parity.process import WATCHED, interpreter
from parity.running import cpu_limit

GRACE = 5.0
"""Seconds that are read on after the process ended: a fork of it may write for ever."""
LOOK = 0.1
"""Seconds between two looks whether a process has ended whose descendants hold the pipe open."""


class Ended(Exception):
    """The process ended without an answer: `how`, and the user's file that it was importing then, if any."""

    def __init__(self, how: str, importing: str | None):
        self.how, self.importing = how, importing
        where = f"importing {importing} ended the process" if importing else "the process ended before it was done"
        super().__init__(f"{where} ({how})")


class Child:
    """A process, begun as by `subprocess.Popen`.

    It reports with `process.tell`. What a fork of it, a library or an implementation writes to the same descriptor is no event.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (), **popen: Any
    ):
        self._nonce = secrets.token_hex(8)
        self._channel, theirs = os.pipe()
        env = {**(os.environ if env is None else env), WATCHED: f"{theirs}:{self._nonce}:{os.getpid()}"}
        try:
            self.process = subprocess.Popen(list(command), env=env, pass_fds=[theirs, *pass_fds], **popen)
        except BaseException:
            os.close(self._channel)
            raise
        finally:
            os.close(theirs)

    def events(self, seconds: float | None = None) -> Iterator[bytes]:
        """The events as JSON, until the process is over, whatever its descendants hold open.

        Raises:
            TimeoutError: when `seconds` have passed before.
        """
        head, rest = f"{self._nonce} {self.process.pid} ".encode(), b""
        until, over = time.monotonic() + (math.inf if seconds is None else seconds), False
        with open(self._channel, "rb", buffering=0) as channel:
            while time.monotonic() < until:
                if not over and self.process.poll() is not None:  # what it has told is in the pipe now
                    until, over = time.monotonic() + GRACE, True
                if select.select([channel], [], [], 0.0 if over else LOOK)[0]:
                    if chunk := channel.read(1 << 16):
                        *lines, rest = (rest + chunk).split(b"\n")
                        yield from (line[len(head) :] for line in lines if line.startswith(head))
                        continue
                    time.sleep(0.0 if over else LOOK)  # its end of the pipe is closed
                if over:
                    return
        if not over:
            raise TimeoutError

    def end(self) -> None:
        """Kill it and what it started."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.process.poll() is None:
            cpu_limit.end(self.process.pid)
        self.process.wait()

    @property
    def how(self) -> str:
        """How it ended."""
        code = self.process.returncode
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def call(target: str, arguments: Sequence[str], seconds: float | None = None, **popen: Any) -> Any:
    """What `target`, "module:function" of this package, told as `process.tell(answer=…)`; an exit code anyone can give.

    Raises:
        Ended: when the process is over, or `seconds` have passed, and there is no answer.
    """
    child, told, how = Child([*interpreter(target), *arguments], **popen), dict[str, Any](), ""
    try:
        for event in child.events(seconds):
            told |= json.loads(event)
            if "answer" in told:  # a thread that is left may keep it from its end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(GRACE)
                break
    except TimeoutError:
        how = f"no answer in {seconds:.0f} s"
    finally:
        child.end()
    if "answer" in told:
        return told["answer"]
    raise Ended(how or child.how, told.get("path"))
