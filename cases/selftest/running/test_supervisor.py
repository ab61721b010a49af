"""An implementation that hangs or takes the process down is a verdict, and the run goes on."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parity import data
from parity.results.row import Row
from parity.running import cpu_limit, supervisor
from parity.running.events import Event, Judged, Lost
from parity.running.run import frozen_cases


def run(tmp_path: Path, names: list[str], timeout: float) -> list[Event]:
    plan = {
        "device": "cpu",
        "threads": 1,
        "profile": "quick",
        "dtypes": ["fp32"],
        "implementations": [f"fixtures/kernels.py:{n}" for n in names],
        "exclude": ["trl.selective_log_softmax"],
        "ledger": str(data.ledger_file()),
        "findings": str(tmp_path / "findings"),
        "frozen": [c for c in frozen_cases(data.ledger_file()) if c[0] == "one-token.json"],
        "shards": [{"family": "logprobs", "index": 0, "count": 12, "seed": 1}],
    }
    return list(supervisor.run([plan], timeout, 120.0))


def rows(events: list[Event], name: str) -> list[Row]:
    own = f"fixtures/kernels.py:{name}"
    return [e.row for e in events if isinstance(e, Judged) and e.row.implementation == own]


def verdicts(events: list[Event], name: str) -> list[str]:
    return [row.verdict for row in rows(events, name)]


def test_death_is_crashed_and_the_others_go_on(tmp_path):
    events = run(tmp_path, ["dies", "right"], 60.0)
    assert "crashed" in verdicts(events, "dies")
    assert any("exit code 7" in row.message for row in rows(events, "dies") if row.verdict == "crashed")
    assert verdicts(events, "right").count("agree") >= 5
    assert not [e for e in events if isinstance(e, Lost)]


def test_a_hang_is_timed_out_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_limit, "BACKSTOP", 1.5)
    events = run(tmp_path, ["hangs", "right"], 4.0)
    assert "timed-out" in verdicts(events, "hangs")
    assert verdicts(events, "right").count("agree") >= 5


@pytest.mark.parametrize(
    ("program", "backstop", "message"),
    [
        ("while True: pass", 1000.0, r"no answer for \d+ s, [12] s of them CPU time"),
        ("import time; time.sleep(60)", 3.0, r"no answer for 3 s, 0 s of them CPU time"),
    ],
)
def test_a_silent_worker_has_its_cpu_time_and_then_the_clock(monkeypatch, program, backstop, message):
    """Under a limit of 1 s: one that computes at 1 s of CPU time, however late; one that sleeps at 3 s of the clock."""
    monkeypatch.setattr(cpu_limit, "BACKSTOP", backstop)
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as process:
        try:
            worker = supervisor.Worker({}, [], process, last=time.monotonic())
            while not (told := supervisor._silent(worker, 1.0)):
                time.sleep(0.1)
            assert re.fullmatch(message, told)
        finally:
            process.kill()


def test_waiting_for_a_core_is_no_hang(monkeypatch):
    monkeypatch.setattr(cpu_limit, "BACKSTOP", 1000.0)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        try:
            assert supervisor._silent(supervisor.Worker({}, [], process, last=time.monotonic() - 600), 180.0) == ""
        finally:
            process.kill()


def test_an_exception_is_crashed(tmp_path):
    events = run(tmp_path, ["raises"], 60.0)
    assert set(verdicts(events, "raises")) <= {"crashed", "unsupported"}
    assert "crashed" in verdicts(events, "raises")
