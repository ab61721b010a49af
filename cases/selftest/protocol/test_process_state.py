"""Everything that is watched: a call that changes it is named, and the next party finds it as it was."""

import builtins
import gc
import os
import random
import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch

from cases.selftest.controls.correct import control
from parity.implementations.implementation import Implementation
from parity.protocol import bindings, process_state
from parity.protocol.call import execute
from parity.protocol.process_state import WATCHES
from parity.registry import family, from_file, run_case

LOGPROBS = family("logprobs")
PLAIN = control("control.logprobs.plain")
CASE = LOGPROBS.case(3, "fp32", {"V": 11, "H": 5, "bias": "random"})


class Mode(torch.overrides.TorchFunctionMode):
    """Left entered, it sees every call of torch."""


EFFECTS = {
    "environment variable": lambda: os.environ.update(UNSLOTH_RETURN_HIDDEN_STATES="1"),
    "python RNG": lambda: random.seed(1),
    "numpy RNG": lambda: np.random.seed(1),  # noqa: NPY002
    "torch RNG": lambda: torch.manual_seed(1),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "torch modes": lambda: Mode().__enter__(),
    "default dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "default device": lambda: torch.set_default_device("meta"),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "switch": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}
WATCHED_ONLY = {"inference mode"}
ON_CUDA = {"CUDA RNG"}


def after(effect):
    """The honest implementation, and an effect that outlives the call."""

    def call(x):
        out = PLAIN.call(x)
        effect()
        return out

    return Implementation("own.leaves", "logprobs", "candidate", call, PLAIN.recipe, outputs=PLAIN.outputs)


def test_every_entry_is_tried_here():
    assert WATCHES.keys() == EFFECTS.keys() | WATCHED_ONLY | ON_CUDA


@pytest.mark.parametrize("name", EFFECTS)
def test_an_entry_is_named_and_put_back(name):
    before = process_state.take()
    found = execute(after(EFFECTS[name]), LOGPROBS.build(CASE))
    assert not list(before.differing())
    says = {"environment variable": "environment variable UNSLOTH_RETURN_HIDDEN_STATES", "switch": "cudnn.benchmark"}
    assert any(says.get(name, f"{name} changed") in leak for leak in found.leaks), found.leaks
    assert not process_state.broken()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((torch, name) for name in ("log_softmax", "exp", "where", "float64", "inf")),
        *((torch.Tensor, name) for name in ("gather", "__matmul__", "backward")),
        *((torch.nn.functional, "logsigmoid"), (torch.special, "expm1"), (torch.nn.Linear, "forward")),
        *((builtins, "sum"), (sys.modules["parity.judging.oracle"], "exact")),
    ],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_a_rebound_name_is_named_and_put_back(owner, name):
    inherited = name not in vars(owner)
    was = getattr(owner, name)
    value = {"float64": torch.float32, "inf": 0.0}.get(name, max)
    found = execute(after(lambda: setattr(owner, name, value)), LOGPROBS.build(CASE))
    assert getattr(owner, name) is was or getattr(owner, name) == was
    assert (name not in vars(owner)) == inherited
    assert any(leak.startswith("rebound ") and leak.endswith(f".{name}") for leak in found.leaks), found.leaks


REAL = torch.log_softmax


def test_what_a_file_patches_at_import_holds_in_its_own_calls_only(tmp_path):
    file = tmp_path / "patching.py"
    file.write_text(
        "import os, torch\nreal = torch.log_softmax\n"
        "torch.log_softmax = lambda *a, **k: real(*a, **k)\nmine = torch.log_softmax\n"
        "os.environ['SET_AT_IMPORT'] = '1'\ntorch.manual_seed(3)\nseen = []\n"
        "def own(hidden, weight, ids, bias, temperature=1.0):\n"
        "    seen.append((torch.log_softmax is mine, os.environ.get('SET_AT_IMPORT')))\n"
        "    z = (hidden.float() @ weight.float().T + bias.float()) / temperature\n"
        "    return torch.log_softmax(z, -1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)\n"
    )
    rng = torch.get_rng_state()
    (own,) = from_file(f"{file}:own")
    assert torch.log_softmax is REAL and "SET_AT_IMPORT" not in os.environ
    assert torch.equal(rng, torch.get_rng_state())
    rows = list(run_case(CASE, [own, PLAIN]))
    assert {r.verdict for r in rows} == {"agree"}, [r for r in rows if r.verdict != "agree"]
    assert set(sys.modules["parity_user_patching"].seen) == {(True, "1")}
    assert torch.log_softmax is REAL and "SET_AT_IMPORT" not in os.environ


def test_code_that_torch_compile_drops_is_no_change(monkeypatch):
    module = ModuleType("parity.compiled")
    exec("def twice(x):\n    return x * 2\n", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.compile(module.twice, backend="eager")(torch.ones(2))
    before = bindings.take()
    compiled = [name for name in vars(module) if name.startswith(bindings.COMPILED)]
    torch.compiler.reset()
    gc.collect()
    if not compiled:
        pytest.skip(f"torch {torch.__version__} keeps compiled code elsewhere")
    assert not set(compiled) & set(vars(module))
    assert not list(before.changes())


def test_what_no_list_names_makes_the_process_unfit(monkeypatch):
    """A kernel registered for `aten::tanh`: no name is rebound, and every definition computes something else."""
    monkeypatch.setattr(process_state, "_broken", [])
    library = torch.library.Library("aten", "IMPL")

    def effect():
        if not done:
            done.append(library.impl("tanh", lambda x: torch.ops.aten.mul.Tensor(x, 0.5), "CPU"))

    done: list = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = list(run_case(CASE, [after(effect), PLAIN]))
    finally:
        library._destroy()
    assert [(r.implementation, r.quantity, r.verdict) for r in rows] == [("own.leaves", "protocol", "disagree")]
    assert "operations of torch compute something else" in rows[0].message
    assert process_state.broken()


def test_who_exchanges_the_code_of_a_function_is_named_and_the_process_given_up(monkeypatch):
    """The name leads to the same function, so nothing is rebound."""
    monkeypatch.setattr(process_state, "_broken", [])
    code = from_file.__code__
    try:
        rows = list(
            run_case(CASE, [after(lambda: setattr(from_file, "__code__", (lambda *args: None).__code__)), PLAIN])
        )
    finally:
        from_file.__code__ = code
    assert [(r.implementation, r.quantity, r.verdict) for r in rows] == [("own.leaves", "protocol", "disagree")]
    assert rows[0].message == "parity.registry.from_file has other code since own.leaves was called"
