"""Real faults on a CUDA device: each is one verdict that names its line, and the run goes on in a fresh process."""

import re

import pytest
import torch

from cases.selftest.running.test_supervisor import plan_of
from fixtures import kernels
from parity.case.drawing import cases, draws
from parity.implementations.user import from_function
from parity.registry import loss_family
from parity.running import supervisor
from parity.running.plan import Judged, Lost, Shard
from parity.running.shard_queue import ShardQueue
from parity.sampling.capabilities import refusal, second_pass

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, CASES, SEED = "cuda", 3, 2
RIGHT = from_function(kernels.right, "fixtures/kernels.py:right", [loss_family("logprobs")])
ANSWER, FIRST = 15.0, 60.0
"""Seconds that a silent implementation has, and the first of a process, which imports."""


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        ("asserts", "crashed", r"device-side assert triggered, at .*fixtures/"),
        ("writes_far_away", "crashed", r"illegal memory access was encountered, at .*fixtures/cuda_faults\.py"),
        ("takes_too_much", "out-of-memory", "memory"),
        ("hangs", "timed-out", r"no answer for .*fixtures/cuda_faults\.py:\d+ hangs"),
    ],
)
def test_a_fault_is_one_verdict_and_the_run_goes_on(name, verdict, said):
    plan = plan_of([f"fixtures/cuda_faults.py:{name}", "fixtures/kernels.py:right"]) | {"device": DEVICE}
    excluded = ("trl.selective_log_softmax",)
    shard = Shard(family="logprobs", kind="drawn", count=CASES, of=CASES, seed=SEED, exclude=excluded)
    events = [event for _, event in supervisor.run([plan], ShardQueue([shard]), ANSWER, FIRST)]
    rows = [e.row for e in events if isinstance(e, Judged)]
    failed = [r for r in rows if r.verdict not in ("agree", "unsupported")]
    assert failed and {(r.implementation.rpartition(":")[2], r.verdict) for r in failed} == {(name, verdict)}
    assert all(re.search(said, r.message) for r in failed), [r.message for r in failed]
    right = [r for r in rows if r.implementation.endswith(":right")]
    drawn = draws(cases(loss_family("logprobs"), ["fp32"], "quick"), f"{SEED}/logprobs/0", CASES)
    asked = (one for case in drawn for one in (case, *second_pass(case, DEVICE)))
    taken = {case.id for case in asked if refusal(RIGHT, case, DEVICE) is None}
    assert {r.verdict for r in right} == {"agree"} and {r.case for r in right} == taken and len(taken) > 1
    assert not [e for e in events if isinstance(e, Lost)]
