"""A probe is held to CPU time, its children's included; what burns none is ended by the clock, six times as late."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from parity.running import cpu_limit
from parity.versions import look
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment

SPIN = "while True: pass"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def patient(monkeypatch):
    """No backstop: on a loaded machine the clock must not come before the CPU time."""
    monkeypatch.setattr(cpu_limit, "BACKSTOP", 1000.0)


def python(program, **how):
    return cpu_limit.run([sys.executable, "-S", "-c", program], **how, **PIPES)


def test_an_answer_comes_through_with_all_that_was_asked():
    program = "import sys, time; time.sleep(0.8); print(sys.stdin.read()[::-1]); sys.exit('because')"
    done = python(program, cpu=30, stdin="x" * 200_000 + "y")
    assert (done.returncode, done.stdout, done.stderr) == (1, "y" + "x" * 200_000 + "\n", "because\n")


def test_waiting_is_no_cpu_time():
    """As on a loaded machine: three times its limit on the clock, and an answer all the same."""
    start = time.monotonic()
    assert python("import time; time.sleep(1.5); print(1)", cpu=0.5).stdout == "1\n"
    assert time.monotonic() - start > 1.5


@pytest.mark.usefixtures("patient")
def test_one_that_spins_is_ended_by_its_cpu_time():
    with pytest.raises(cpu_limit.LimitExceeded, match=r"^used [\d.]+ s of CPU time, its limit is 1 s$"):
        python(SPIN, cpu=1.0)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count it")
def test_what_waits_for_a_core_is_told_from_what_sleeps():
    """Two that share one core want it all the time; together they wait as long as either computes."""
    core = min(os.sched_getaffinity(0))
    program = f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\n"
    programs = [program + SPIN, program + SPIN, program + "time.sleep(60)"]
    running = [subprocess.Popen([sys.executable, "-S", "-c", p], stdout=subprocess.PIPE) for p in programs]
    try:
        for process in running:
            process.stdout.readline()
        until = time.monotonic() + 20
        while time.monotonic() < until and cpu_limit.starved(running[0].pid) < 0.3:
            time.sleep(0.1)
        assert cpu_limit.starved(running[0].pid) >= 0.3
        assert cpu_limit.starved(running[2].pid) < 0.3
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_one_that_sleeps_is_ended_by_the_clock():
    with pytest.raises(cpu_limit.LimitExceeded, match=r"^no answer in \d+ s, having used 0.\d s of CPU time$"):
        python("import time; time.sleep(60)", cpu=2 / cpu_limit.BACKSTOP)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("reaped", [False, True])
def test_children_count_living_or_waited_for(reaped, tmp_path):
    child = "import time\nwhile time.process_time() < 1.5: pass" if reaped else SPIN
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait(); time.sleep(60)\n"
    )
    with pytest.raises(cpu_limit.LimitExceeded, match="^used .* s of CPU time, its limit is 1 s$"):
        python(program, cpu=1.0)
    until = time.monotonic() + 10
    while running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < until, "the child of an ended probe goes on"
        time.sleep(0.05)


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("script", "backstop", "message"),
    [
        ("while :; do :; done", 1000.0, r"used [\d.]+ s of CPU time, its limit is 0\.4 s"),
        ("sleep 60", cpu_limit.BACKSTOP, r"no answer in \d+ s, having used 0\.\d s of CPU time"),
        ("echo no such luck >&2; exit 1", cpu_limit.BACKSTOP, "no such luck"),
    ],
)
def test_a_probe_says_which_limit_it_was(tmp_path, monkeypatch, script, backstop, message):
    monkeypatch.setattr(cpu_limit, "BACKSTOP", backstop)
    monkeypatch.setattr(look, "CPU_LIMIT", 0.4)
    root = tmp_path / "made-by-hand"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(root / "bin" / "python", 0o755)
    made = Environment(root, {}, {}, None)
    with pytest.raises(EnvironmentUnusable, match=f"^environment made-by-hand: {message}$"):
        look.look(made, [], [])
