"""An implementation that hangs or takes the process down is a verdict, and the run goes on."""

from pathlib import Path

from parity import data, pool
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
    return [
        e["row"]["verdict"]
        for e in events
        if "row" in e and e["row"]["implementation"] == f"fixtures/kernels.py:{name}"
    ]


def test_death_is_crashed_and_the_others_go_on(tmp_path):
    events = run(tmp_path, ["dies", "right"], 60.0)
    assert "crashed" in verdicts(events, "dies")
    assert any("exit code 7" in e["row"]["message"] for e in events if "row" in e and e["row"]["verdict"] == "crashed")
    assert verdicts(events, "right").count("agree") >= 5
    assert not [e for e in events if "lost" in e]


def test_a_hang_is_timed_out_and_the_others_go_on(tmp_path):
    events = run(tmp_path, ["hangs", "right"], 4.0)
    assert "timed-out" in verdicts(events, "hangs")
    assert verdicts(events, "right").count("agree") >= 5


def test_an_exception_is_crashed(tmp_path):
    events = run(tmp_path, ["raises"], 60.0)
    assert set(verdicts(events, "raises")) <= {"crashed", "unsupported"}
    assert "crashed" in verdicts(events, "raises")
