"""A night of logprobs in a second."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity.nightly import night, steps
from parity.results import notify
from parity.running import findings, provenance, supervisor
from parity.running.plan import Options

PLAYED = Path(supervisor.__file__).parents[2] / "fixtures" / "played_worker.py"


@pytest.fixture
def versions(monkeypatch):
    """Of the libraries of a night, for a test to change."""
    told = {"trl": "1.0", "liger-kernel": "0.8"}
    monkeypatch.setattr(provenance, "versions", lambda: dict(told))
    return told


@pytest.fixture
def run(tmp_path, monkeypatch, versions):
    """A night of logprobs in a second: its workers pretend, its other commands are written down."""
    asked = []

    def step(name, words, log, limit):
        asked.append(words)
        return steps.CommandOutcome(name, "parity " + " ".join(words), 0, 1.0, "what it found")

    monkeypatch.setattr(supervisor, "interpreter", lambda target: [sys.executable, "-S", str(PLAYED)])
    monkeypatch.setattr(night, "proof", lambda *_: (True, ""))
    monkeypatch.setattr(steps, "run", step)
    monkeypatch.setattr(findings, "case_of", lambda row: SimpleNamespace(to_json=dict))

    def one(resume=False, **options):
        given = {"profile": "quick", "families": ("logprobs",), "implementations": ("fixes",), "reports": tmp_path}
        others = (("history", ("history",), 0.2), ("upstream", ("upstream", "--all"), 0.1))
        asked.clear()
        given |= {"resume": tmp_path / "results.ndjson"} if resume else {}
        code, changed = night.run(Options(**given | options), lambda line: None, lambda *_: None, others)
        return code, notify.title(changed) if changed else "", list(asked)

    return one
