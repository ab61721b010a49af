"""A process is held to CPU time, its children's included; what burns none is ended by the clock. What others say is no event."""

import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from parity.process import interpreter
from parity.running import child
from parity.versions import look
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment

SPIN = "while True: pass"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def python(program, **how):
    return child.run([sys.executable, "-S", "-c", program], **how, **PIPES)


def test_an_answer_comes_through_with_all_that_was_asked():
    program = "import sys, time; time.sleep(0.8); print('y' + 'x' * 200_000); sys.exit('because')"
    done = python(program, cpu=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "y" + "x" * 200_000 + "\n", "because\n")


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
        while time.monotonic() < until and child.starved(running[0].pid) < 0.3:
            time.sleep(0.1)
        assert child.starved(running[0].pid) >= 0.3
        assert child.starved(running[2].pid) < 0.3
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("reaped", [False, True])
def test_children_count_living_or_waited_for(reaped, tmp_path, monkeypatch):
    monkeypatch.setattr(child, "BACKSTOP", 1000.0)  # on a loaded machine the clock must not come before the CPU time
    spawned = "import time\nwhile time.process_time() < 1.5: pass" if reaped else SPIN
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {spawned!r}])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait(); time.sleep(60)\n"
    )
    with pytest.raises(child.LimitExceeded, match=r"s, [12]\.\d s of them CPU time$"):
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
    ("script", "message"),
    [
        ("sleep 60", r"no answer for \d+ s, 0\.\d s of them CPU time"),
        ("echo no such luck >&2; exit 1", "no such luck"),
    ],
)
def test_a_probe_says_which_limit_it_was(tmp_path, monkeypatch, script, message):
    monkeypatch.setattr(look, "CPU_LIMIT", 0.4)
    root = tmp_path / "made-by-hand"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(root / "bin" / "python", 0o755)
    made = Environment(root, {}, {})
    with pytest.raises(EnvironmentUnusable, match=f"^environment made-by-hand: {message}$"):
        look.look(made, [], [])


@pytest.mark.parametrize(
    ("limits", "spent", "waited", "over"),
    [
        ((1.0,), [0.0, 0.4], [0.0, 0.0], {5.5: "", 6.6: "no answer for 7 s, 0.4 s of them CPU time"}),
        ((180.0,), [0.0, 60.0], [0.0, 0.0], {600.0: ""}),
        ((180.0,), [0.0, 6.0], [10.0, 500.0], {600.0: ""}),
        ((math.inf, 120.0), [0.0, 60.5], [0.0, 180.0], {121.0: ""}),
        ((math.inf, 120.0, False), [0.0, 60.5], [0.0, 180.0], {121.0: "no answer for 121 s, 60.5 s of them CPU time"}),
    ],
    ids=["computes now and then", "one of ten on a core", "waits for a core", "two wait", "a limit on the clock"],
)
def test_who_computes_little_has_its_time_on_the_clock(monkeypatch, limits, spent, waited, over):
    """At BACKSTOP times the limit, less the time in which it waited for a core, which is no hang. A user's own limit on the clock
    holds for what waits too: two workers on busy cores wait longer together than the clock shows, and never ended."""
    now = 0.0
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: now))
    for name, values in (("cpu_time", spent), ("starved", waited)):
        monkeypatch.setattr(child, name, lambda pid, values=values: values[now > 0.0])
    clock = child.Clock(1)
    for now, why in over.items():  # noqa: B007
        assert (clock.over(*limits), clock.asleep) == (why, False)


WORDS = """
import os, sys
sys.path.append({root!r})
from parity import process
channel, nonce, _ = os.environ[process.WATCHED].split(":")
process.under_watch()
process.tell(number=1)
words = f'{{nonce}} {{os.getpid() + 1}} 2|aa {{os.getpid()}} 3|{{nonce}} 4|5|[6]'
os.write(int(channel), words.replace("|", "\\n").encode() + b"\\n")
if os.fork() == 0:
    process.tell(number=7)
    while True:
        os.write(int(channel), b"8\\n")
process.tell(number=9)
os._exit(3)
"""


def test_words_of_others_are_no_events_and_nobody_waits_for_a_fork_that_goes_on(monkeypatch):
    monkeypatch.setattr(child, "GRACE", 0.5)
    made = child.Child([sys.executable, "-S", "-c", WORDS.format(root=os.getcwd())], stderr=subprocess.DEVNULL)
    said, until = [], time.monotonic() + 60
    while None not in said:
        assert time.monotonic() < until
        said += [event for _, event in child.told([made])]
    made.end()
    assert [json.loads(event)["number"] for event in said[:-1]] == [1, 9] and made.how == "exit code 3"


def test_a_child_is_of_the_same_files_though_others_are_installed_or_stand_where_the_user_does(tmp_path):
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "__init__.py").write_text("raise SystemExit('other files')")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "msgspec.py").write_text("raise SystemExit('the folder, not the package')")
    env, command = os.environ | {"PYTHONPATH": str(tmp_path)}, [*interpreter("parity.decoding:short"), "it came back"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path / "here")
    assert done.stderr == "it came back\n"
