"""Asynchronous GRPO's check on windows of other seeds; its mistakes are in `test_beneath`."""

import threading

from parity.registry import run_case, select
from parity.trainers import catalogue


def test_a_window_of_any_size_has_a_row_and_leaves_no_thread():
    case = catalogue.family("async-grpo-trainer").case(58, "fp32", {"check": "rollout-queue", "budget": True})
    before = set(threading.enumerate())
    assert {row.verdict for row in run_case(case, select(["async-grpo-trainer.released"]))} == {"agree"}
    assert not [thread for thread in threading.enumerate() if thread not in before and "trace" in thread.name]


def test_of_a_completion_that_is_all_a_tools_no_share_is_asked():
    case = catalogue.family("async-grpo-trainer").case(20, "fp32", {"check": "rollout-queue", "tools": True})
    rows = {row.quantity: row for row in run_case(case, select(["async-grpo-trainer.released"]))}
    assert rows["clip_ratio/low_min"].value_oracle is not None and rows["clip_ratio/low_min"].verdict == "agree"
