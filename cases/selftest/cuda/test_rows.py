"""Rows tell the device that was used: a check that runs on the CPU says so on a GPU box."""

import dataclasses

import pytest

from parity.registry import load
from parity.trainers import catalogue, execute
from parity.trainers.check import CHECKS, holds


@pytest.mark.parametrize(("moves", "used"), [(False, "cpu"), (True, "cuda")])
def test_a_row_has_the_device_that_its_check_was_given(moves, used, monkeypatch):
    load()
    seen = []

    def run(call):
        seen.append(call.device)
        yield holds("something", True)

    case = next(c for c in catalogue.cases("grpo-trainer", "pr", 0) if c.settings["check"] == "gradient-flow")
    monkeypatch.setitem(CHECKS, "gradient-flow", dataclasses.replace(CHECKS["gradient-flow"], run=run, moves=moves))
    ways = [i for i in catalogue.implementations().values() if i.id == "grpo-trainer.released"]
    rows = list(execute.rows(case, ways, "cuda"))
    assert seen == [used] and [r.device for r in rows] == [used]
