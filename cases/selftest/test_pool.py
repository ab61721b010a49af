"""An implementation that hangs or takes the process down is a verdict, and the run goes on."""

from pathlib import Path

import pytest

from parity import data, limited, pool
from parity.runner import frozen_cases


def run(tmp_path: Path, names: list[str], timeout: float) -> list[dict]:
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
    return list(pool.run([plan], timeout, 120.0))


def verdicts(events: list[dict], name: str) -> list[str]:
    return [e["row"]["verdict"] for e in events if "row" in e and e["row"]["implementation"] == f"kernels.py:{name}"]


def test_death_is_crashed_and_the_others_go_on(tmp_path):
    events = run(tmp_path, ["dies", "right"], 60.0)
    assert "crashed" in verdicts(events, "dies")
    assert any("exit code 7" in e["row"]["message"] for e in events if "row" in e and e["row"]["verdict"] == "crashed")
    assert verdicts(events, "right").count("agree") >= 5
    assert not [e for e in events if "lost" in e]


@pytest.mark.parametrize(("name", "backstop"), [("hangs", 1.5), ("spins", 1000.0)])
def test_a_hang_is_timed_out_and_the_others_go_on(tmp_path, monkeypatch, name, backstop):
    """One that sleeps by the clock, one that computes by its CPU time, however long that takes."""
    monkeypatch.setattr(limited, "BACKSTOP", backstop)
    events = run(tmp_path, [name, "right"], 4.0)
    assert "timed-out" in verdicts(events, name)
    assert verdicts(events, "right").count("agree") >= 5
    told = [e["row"]["message"] for e in events if "row" in e and e["row"]["verdict"] == "timed-out"]
    assert all("s of them CPU time" in message for message in told)


def test_an_exception_is_crashed(tmp_path):
    events = run(tmp_path, ["raises"], 60.0)
    assert set(verdicts(events, "raises")) <= {"crashed", "unsupported"}
    assert "crashed" in verdicts(events, "raises")
