"""An implementation that hangs or takes the process down is a verdict, and the run goes on."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from cases.selftest.running.test_child import running
from fixtures import warm
from parity import data, process
from parity.process import SCRATCH, scratch_folder
from parity.running import shard_queue, supervisor
from parity.running.plan import At, Event, Judged, Lost, Shard, Sought, Started
from parity.running.shard_queue import ShardQueue

pytestmark = pytest.mark.usefixtures("warm_workers")


REFERENCE = ("trl.selective_log_softmax",)


def followed(plan: dict, count: int, timeout: float, exclude=REFERENCE) -> list[Event]:
    """The events of a plan on one shard of so many cases."""
    shard = Shard(family="logprobs", kind="drawn", count=count, of=count, seed=2, exclude=tuple(exclude))
    return [event for _, event in supervisor.run([plan], ShardQueue([shard]), timeout, 120.0)]


def test_a_sleeper_is_timed_out_once_and_the_others_go_on(tmp_path):
    own = [f"fixtures/kernels.py:{name}" for name in ("hangs", "right")]
    events = followed(plan_of(own), 12, 4.0)
    assert [r.verdict for r in rows_of(events, "hangs")].count("timed-out") == 1
    message = next(row.message for row in rows_of(events, "hangs") if row.verdict == "timed-out")
    assert re.search(r"no answer for .*; in .*fixtures/kernels\.py:\d+ hangs, in its forward pass", message), message
    assert [r.verdict for r in rows_of(events, "right")].count("agree") >= 5


FAULTS = """
import os, signal, sys, threading, time, torch
from types import SimpleNamespace
from fixtures.kernels import right
{setup}

def own(hidden, weight, ids, temperature=1.0):
    {counted}
    {act}
    return right(hidden, weight, ids, temperature)
"""


DRAWN, TAKEN = 8, 4
"""Cases of a run, and those of them that a function of hidden, weight and ids takes."""


def planted(tmp_path, act: str, timeout=60.0, setup="", exclude=REFERENCE) -> list[Event]:
    """Events of a run over `right` and one that acts from its second call on, in all processes together."""
    counter = str(tmp_path / "calls")
    counted = f"open({counter!r}, 'a').write('x'); calls = os.path.getsize({counter!r})"
    (tmp_path / "own.py").write_text(FAULTS.format(counted=counted, act=act, setup=setup))
    return followed(plan_of([f"{tmp_path}/own.py:own", "fixtures/kernels.py:right"]), DRAWN, timeout, exclude)


def plan_of(implementations) -> dict:
    """What a worker is told of a quick run in fp32."""
    return {
        "device": "cpu",
        "profile": "quick",
        "dtypes": ["fp32"],
        "implementations": implementations,
        "ledger": str(data.ledger_file()),
        "frozen": [],
    }


def rows_of(events, name):
    return [e.row for e in events if isinstance(e, Judged) and e.row.implementation.endswith(f":{name}")]


def whole_beside(events):
    """The neighbour has all its rows, nobody is given up, and nothing is there twice."""
    assert {r.verdict for r in rows_of(events, "right")} == {"agree"}
    assert len({r.case for r in rows_of(events, "right")}) == TAKEN
    assert not [e for e in events if isinstance(e, Lost)]
    told = [e.row for e in events if isinstance(e, Judged) and not e.row.minimised]
    keys = [(row.case, row.implementation, row.quantity) for row in told]
    assert len(keys) == len(set(keys)), "a row stands twice"


BACKWARD = """
class Ends(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: os.kill(os.getpid(), signal.SIGSEGV))
"""
SEGMENTATION = (
    r"\(killed by signal 11\) at .*own\.py:\d+ .*: Fatal Python error: Segmentation fault, in its backward pass$"
)


@pytest.mark.parametrize(
    ("setup", "act", "excluded", "blame", "said"),
    [
        ("", "if calls > 1: os._exit(0)", [], "candidate", r"^the process ended \(exit code 0\), in its forward pass$"),
        (BACKWARD, "hidden = Ends.apply(hidden)", [], "candidate", SEGMENTATION),
        (
            "",
            "os._exit(7)",
            REFERENCE,
            None,
            "in its forward pass; whose fault is not known: no reference ran this case$",
        ),
    ],
    ids=["forward", "backward", "alone"],
)
def test_whose_fault_it_is_that_a_process_ended(tmp_path, setup, act, excluded, blame, said):
    """The candidate's, where it ended inside its call and the reference ran the case; nobody's where none did. It has so many
    chances and no more."""
    events = planted(tmp_path, act, setup=setup, exclude=excluded)
    stopped = [r for r in rows_of(events, "own") if r.verdict == "crashed"]
    assert 0 < len(stopped) <= shard_queue.THRICE
    whole_beside(events)
    for row in stopped:
        assert row.blame == blame and re.search(said, row.message), row.message
        assert (row.against is not None) == (blame == "candidate")


def test_a_process_that_ends_outside_a_call_blames_nobody_and_says_so():
    case = {"schema": 1, "family": "logprobs", "seed": 1, "dtype": "fp32", "settings": {}}
    at = Started("one", "fixtures/kernels.py:right", case)
    row = supervisor.lost_row(at, "crashed", "the process ended (exit code 7)", "cpu", "", "trl.selective_log_softmax")
    assert row.blame is None and row.message.endswith("; whose fault is not known: its process ended between two calls")
    row = supervisor.lost_row(replace(at, implementation="trl.selective_log_softmax"), "crashed", "", "cpu", "call")
    assert row.blame == "reference"


LOSES = (
    "raise torch.AcceleratorError('CUDA error: device-side assert triggered' + os.getenv('CUDA_LAUNCH_BLOCKING', '0'))"
)


@pytest.mark.parametrize(
    ("at", "said", "judged"),
    [
        (
            (2,),
            r"triggered0, at .*own\.py:9 own; not again with CUDA_LAUNCH_BLOCKING=1; whose fault is not known",
            True,
        ),
        ((2, 3), r"triggered1, at .*own\.py:9 own$", False),
    ],
    ids=["once", "again"],
)
def test_a_lost_cuda_context_is_one_verdict_with_the_line_of_the_launch(tmp_path, at, said, judged):
    """And a fresh process goes on. One that is not lost again is a verdict too: a race, or a fault that waiting hides."""
    events = planted(tmp_path, f"if calls in {at}: {LOSES}")
    (row,) = (r for r in rows_of(events, "own") if r.verdict not in ("agree", "unsupported"))
    assert row.verdict == "crashed" and re.search("CUDA error: device-side assert " + said, row.message)
    assert (row.case in [r.case for r in rows_of(events, "own") if r.verdict == "agree"]) == judged
    whole_beside(events)


def test_a_watcher_that_is_killed_leaves_no_worker(tmp_path):
    root = str(Path(supervisor.__file__).parents[2])
    worker = (
        f"import os, sys, time; sys.path.append({root!r}); from parity.process import under_watch; "
        "under_watch(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    program = (
        "import sys, time\nfrom parity.running import supervisor\n"
        "worker = supervisor.Worker({'device': 'cpu', 'threads': 1})\n"
        f"supervisor.interpreter = lambda target: [sys.executable, '-c', {worker!r}, sys.argv[1]]\n"
        "worker.begin()\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "pid")]) as watcher:
        told = tmp_path / "pid"
        until = time.monotonic() + 60
        while not (told.exists() and told.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        watcher.kill()
    until = time.monotonic() + 10
    while running(int(told.read_text())):
        assert time.monotonic() < until, "the worker goes on"
        time.sleep(0.05)


IDLE = """
import json, sys, time
from parity.process import tell, under_watch
under_watch()
for line in sys.stdin:
    shard = json.loads(line)
    time.sleep(shard["index"])
    tell(event="sharddone", cases=1, seconds=0.1)
    if shard["kind"] == "drawn" and not shard["index"]:
        break
"""


def told(monkeypatch, program, queue, workers=1):
    """What comes of workers that run this program."""
    program = f"import sys; sys.path.append({os.getcwd()!r})\n{program}"
    monkeypatch.setattr(supervisor, "interpreter", lambda target: [sys.executable, "-S", "-c", program])
    return list(supervisor.run([{"device": "cpu"}] * workers, queue, 30.0, 30.0))


def test_a_process_that_ended_while_it_waited_costs_no_finding(monkeypatch):
    drawn = [Shard(family="logprobs", kind="drawn", count=1, of=1, index=n, seed=1) for n in (0, 1)]
    sought = Sought(implementation="own", subjects=[("logps", "logic")], gate=None, cases=[])
    finding = Shard(family="logprobs", kind="finding", count=1, seed=1, sought=sought)
    events = told(monkeypatch, IDLE, ShardQueue(drawn, more=lambda: [finding]), 2)
    assert [shard.kind for shard, _ in events] == ["drawn", "drawn", "finding"]


SAYS = """
import os, time
from parity.process import WATCHED
channel, nonce, _ = os.environ[WATCHED].split(":")
for event in {events!r}:
    os.write(int(channel), f"{{nonce}} {{os.getpid()}} {{event}}".encode())
time.sleep({sleep})
sys.exit(7)
"""
FIRST, SECOND, CUT = '{"event": "at", "number": 1}\n', '{"event": "at", "number": 2}\n', '{"event"'


@pytest.mark.parametrize(
    ("lines", "sleep", "message"),
    [
        ([FIRST, f"{CUT}\n", SECOND], 600, "a worker's event: not readable JSON: Input data was truncated"),
        ([FIRST, CUT], 0, "the process ended (exit code 7)"),
    ],
    ids=["a line that is none", "a death within a line"],
)
def test_a_worker_that_tells_no_event_is_ended_at_once_and_given_up_where_it_does_so_again(
    monkeypatch, lines, sleep, message
):
    """Not after the limit of a silent worker; whoever ran is to blame, and here nobody did."""
    shard = Shard(family="logprobs", kind="drawn", count=1, of=1, seed=1)
    events = told(monkeypatch, SAYS.format(events=lines, sleep=sleep), ShardQueue([shard]))
    assert [event for _, event in events] == [At(1), At(1), Lost(message)]


def test_a_number_that_is_not_finite_is_an_error_of_the_worker(monkeypatch):
    monkeypatch.setattr(process, "_told", (1, "aa", os.getpid()))
    with pytest.raises(ValueError, match="JSON compliant"):
        process.tell(value=float("nan"))


TAKES_OVER = {
    "a kill from outside, once": "if calls == 2: os.kill(os.getpid(), signal.SIGKILL)",
    "a world that cannot be put back": "if calls == 2: globals().setdefault('k', torch.inference_mode()).__enter__()",
    "a fork and words on every descriptor": (
        "os.fork() if calls == 2 else None\n"
        "    for fd in range(3, 30):\n"
        "        try: os.write(fd, b'{\"done\": true}\\n')\n"
        "        except OSError: pass"
    ),
    "a thread that goes on": "calls > 1 and threading.Thread(target=time.sleep, args=(600,)).start()",
    "another serialiser": "sys.modules['parity.process'].json = SimpleNamespace(dumps=lambda *_, **__: '{')",
}
SHOWN = {"a kill from outside, once": [], "a world that cannot be put back": [("protocol", "disagree")]}


@pytest.mark.parametrize("what", TAKES_OVER)
def test_what_one_does_to_its_process_costs_its_neighbour_no_row(tmp_path, what):
    """And itself no more than what it did: a fresh process goes on."""
    events = planted(tmp_path, TAKES_OVER[what], timeout=200.0)
    wrong = [(r.quantity, r.verdict) for r in rows_of(events, "own") if r.verdict not in ("agree", "unsupported")]
    if what in SHOWN:
        assert wrong == SHOWN[what]
        assert {r.verdict for r in rows_of(events, "own")} == {"agree", *(verdict for _, verdict in wrong)}
    assert "timed-out" not in {verdict for _, verdict in wrong}, "somebody waited for its limit"
    whole_beside(events)


def test_a_folder_of_a_run_that_is_gone_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "gone"))
    assert Path(scratch_folder("own")).parent == tmp_path / "gone"


def test_a_folder_outside_a_run_goes_with_its_process():
    program = "from parity.process import scratch_folder; print(scratch_folder('own'))"
    outside = {name: value for name, value in os.environ.items() if name != SCRATCH}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=outside, check=True)
    assert "parity-own-" in done.stdout and not Path(done.stdout.strip()).exists()


def test_a_fork_has_the_temporary_folder_that_its_environment_names(tmp_path):
    """Else what a planted fault does there, it does to the folder that everybody shares."""
    program = "import tempfile; print(tempfile.gettempdir(), flush=True)"
    command = [sys.executable, "-P", "-c", program]
    fork = warm.popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}, text=True)
    with fork.stdout:
        assert fork.stdout.readline() == f"{tmp_path}\n"
    fork.wait()
