"""What cases/cuda does on a GPU box, here on the pretended device and smaller: a mistake in it costs no hour there."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases.cuda import test_contexts, test_faults, test_large
from fixtures.pretended_cuda import pretended
from parity.cli import doctor
from parity.registry import load
from parity.running import gpu

RIGHT = {
    "logprobs": "trl.selective_log_softmax",
    "policy": "fixes.FusedLinearGRPOLoss",
    "divergence": "trl.generalized_jsd_loss",
}
ROOT = Path(__file__).parents[3]
SHAPES = {"B": 2, "T": 3, "V": 11, "H": 4}


class Graph:
    """What is captured has run; a replay gives the same."""

    def replay(self):
        pass


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The pretended device, on which nothing compiles or is captured, and one implementation of each family."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(test_contexts, "SETTINGS", {n: s | SHAPES for n, s in test_contexts.SETTINGS.items()})
    monkeypatch.setattr(test_contexts, "chosen", lambda name: [load()[RIGHT[name]]])
    monkeypatch.setattr(test_large, "ours", lambda: [load()[RIGHT["logprobs"]]])


@pytest.mark.parametrize("name", RIGHT)
def test_contexts_of_each_family(name, monkeypatch):
    assert test_contexts.SETTINGS.keys() == RIGHT.keys()
    if name in test_contexts.COMPILED:
        with pretended(), monkeypatch.context() as patch:
            patch.setattr(torch, "compile", lambda call: call)
            test_contexts.test_inductor(name, "bf16")
    with pretended():
        test_contexts.test_deterministic_algorithms(name, monkeypatch)
        test_contexts.test_float32_master_weights_under_autocast(name)
        if name == "logprobs":
            test_contexts.test_a_captured_graph_gives_the_same(load()[RIGHT[name]])


def test_sizes(monkeypatch):
    monkeypatch.setattr(test_large, "SIZE", 11)
    monkeypatch.setattr(test_large, "ROWS", 9)
    with pretended():
        test_large.test_real_vocabularies(11, "fp32")
        test_large.test_beyond_2_31_logits("trl.selective_log_softmax")


def test_too_much_memory(monkeypatch):
    """The body of the tests of faults, with the one fault that a CPU has."""
    monkeypatch.setattr(test_faults, "DEVICE", "cpu")
    test_faults.test_a_fault_is_one_verdict_and_the_run_goes_on("takes_too_much", "out-of-memory", "memory")


@pytest.mark.parametrize(("triton", "late"), [("3.8.1", True), ("3.9.0", False), (None, False)])
def test_a_lock_that_is_released_too_early_is_named(monkeypatch, triton, late):
    monkeypatch.setattr(doctor, "installed", {"cut-cross-entropy": "25.1.1", "triton": triton}.get)
    assert bool(doctor.unsafe_lock()) is late


def test_our_own_kernels_compile():
    command = [sys.executable, "-m", "fixtures.compiled"]
    done = subprocess.run(command, env=gpu.child("cuda"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
