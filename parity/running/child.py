"""Processes that this package starts and watches, whose code may hang, print, fork or end as it likes: what they report, the
time that they get, their end."""

import contextlib
import json
import math
import os
import secrets
import select
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from parity.process import WATCHED, interpreter

GRACE = 5.0  # seconds that are read on after the process ended: a fork of it may write for ever
LOOK = 0.5  # seconds between two looks at processes that say nothing
BACKSTOP = 6.0
"""Wall-clock limit ÷ CPU limit: what a process waits for burns no CPU. Where the kernel does not say how long a process waited
for a core, one of six on a core is not yet hanging."""
SLEEPING, ASLEEP = 2.0, 0.05
"""The same for a process that sleeps, which uses less than this share of a core: it waits for something that does not come."""


class Ended(Exception):
    """The process ended without an answer; how."""


class LimitExceeded(Exception):
    """A process was ended because its time was over."""


class Clock:
    """The time that a process, its living descendants and those that it waited for have had since this was made."""

    def __init__(self, pid: int):
        self._pid, self._begun = pid, time.monotonic()
        self._cpu, self._starved = cpu_time(pid), starved(pid)
        self._spent = self._waited = 0.0
        self.asleep = False

    @property
    def passed(self) -> float:
        """Seconds on the clock."""
        return time.monotonic() - self._begun

    def over(self, limit: float, latest: float | None = None, waits: bool = True) -> str:
        """Whether it has had `limit` seconds of CPU time; or on the clock `latest`, by default BACKSTOP times as many, SLEEPING
        times for one `asleep`; where it `waits`, less the time in which it waited for a core. If so, how much; else nothing."""
        if self.passed <= min(limit, math.inf if latest is None else latest):
            return ""
        self._spent = max(self._spent, cpu_time(self._pid) - self._cpu)
        self._waited = max(self._waited, starved(self._pid) - self._starved)
        passed = self.passed - self._waited * waits
        self.asleep = latest is None and passed > SLEEPING * limit and self._spent < ASLEEP * passed
        over = self.asleep or self._spent > limit or passed > (BACKSTOP * limit if latest is None else latest)
        return f"no answer for {passed:.0f} s, {self._spent:.1f} s of them CPU time" if over else ""


class Child:
    """A process, begun as by `subprocess.Popen`. It reports with `process.tell`. What a fork of it, a library or an
    implementation writes to the same descriptor is no event."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (), **popen: Any
    ):
        nonce = secrets.token_hex(8)
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self.channel = open(ours, "rb", buffering=0)  # noqa: SIM115 closed by `end`
        self._rest, self._until = b"", math.inf
        env = {**(os.environ if env is None else env), WATCHED: f"{theirs}:{nonce}:{os.getpid()}"}
        try:
            self.process = subprocess.Popen(list(command), env=env, pass_fds=[theirs, *pass_fds], **popen)
        finally:
            os.close(theirs)
        self._head = f"{nonce} {self.process.pid} ".encode()

    def said(self) -> list[bytes | None]:
        """The events that it has told since the last call, as JSON, and None when it is over, whatever its descendants hold."""
        ended = self.process.poll() is not None  # what it has told is in the pipe now
        if ended:
            self._until = min(self._until, time.monotonic() + GRACE)
        chunk = self.channel.read(1 << 16)
        *lines, self._rest = (self._rest + (chunk or b"")).split(b"\n")
        events: list[bytes | None] = [line[len(self._head) :] for line in lines if line.startswith(self._head)]
        return [*events, None] if ended and (not chunk or time.monotonic() > self._until) else events

    def end(self) -> None:
        """Kill it and what it started."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.process.poll() is None:
            end(self.process.pid)
        self.process.wait()
        self.channel.close()

    @property
    def how(self) -> str:
        code = self.process.returncode
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def told(children: Collection[Child]) -> Iterator[tuple[Child, bytes | None]]:
    """What children say now, as `Child.said`; where none says anything, after LOOK seconds."""
    ready = select.select([child.channel for child in children], [], [], LOOK / 5)[0]
    events = [(child, event) for child in children for event in child.said()]
    if ready and not events:  # half a line, or the end of a pipe whose process goes on
        time.sleep(LOOK / 50)
    yield from events


def call(target: str, arguments: Sequence[str], **popen: Any) -> Any:
    """What `target`, "module:function" of this package, told as `process.tell(answer=…)`; an exit code anyone can give.
    Raises Ended when the process is over, and there is no answer."""
    child = Child([*interpreter(target), *arguments], **popen)
    try:
        while True:
            for _, event in told([child]):
                if event is None:
                    raise Ended(child.how)
                with contextlib.suppress(subprocess.TimeoutExpired):  # a thread that is left may keep it from its end
                    child.process.wait(GRACE)
                return json.loads(event)["answer"]
    finally:
        child.end()


def run(
    argv: Sequence[str], *, cpu: float, clock: float | None = None, **popen: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a text command, ended with all its children at `cpu` seconds of CPU time of them together, or
    at `clock` seconds on the clock, by default BACKSTOP times as many (`Clock`). `popen` goes to subprocess.Popen.
    Raises LimitExceeded when it was ended."""
    with subprocess.Popen(list(argv), text=True, **popen) as process:
        used = Clock(process.pid)
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=LOOK)
                    return subprocess.CompletedProcess(list(argv), process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    if why := used.over(cpu, BACKSTOP * cpu if clock is None else clock, waits=clock is None):
                        raise LimitExceeded(why) from None
        except BaseException:
            end(process.pid)
            raise


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_time(pid: int) -> float:
    """Seconds of CPU time that a process, its living descendants and those that it waited for have used so far."""
    total = 0.0
    for one in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # its parent has waited for it, and answers for it next time
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def starved(pid: int) -> float:
    """Seconds that the main threads of a process and its living descendants were ready and had no core; 0 where unknown."""
    total = 0.0
    for one in _tree(pid):
        with contextlib.suppress(OSError, IndexError):  # it has ended; no Linux, or one without these counts
            total += int(Path(f"/proc/{one.pid}/schedstat").read_text().split()[1]) * 1e-9
    return total


def end(pid: int) -> None:
    """Kill a process and its descendants: one that went on would hold the pipes open, and the reader with them."""
    for one in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
