"""A box with a GPU says why it cannot use it, and each worker sees what it should."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.oracles import oracle_of
from fixtures.pretended_cuda import pretended
from parity import process
from parity.case.profiles import SHARDS, SHARDS_CUDA
from parity.errors import NOTHING, Unsupported
from parity.protocol import process_state
from parity.protocol.call import execute
from parity.protocol.process_state import matmul_precision
from parity.registry import family
from parity.running import gpu, one_kernel, outcome, run, supervisor
from parity.running.plan import Options, planned
from parity.trainers.rig import ranks


@pytest.fixture
def box(monkeypatch, tmp_path):
    """A box with the device file of a GPU."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpu, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is new enough here")
def test_a_driver_too_old_ends_the_run_with_its_cause(box, monkeypatch, tmp_path):
    def old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", old)
    monkeypatch.setattr(run, "_follow", lambda *_: pytest.fail("it runs on the CPU instead"))
    found = run.execute(Options(profile="quick", reports=tmp_path), lambda *_: None)
    assert found.exit_code == NOTHING and not found.rows
    assert "driver on your system is too old (found version 12040)" in found.reasons[0]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch was built without CUDA" in gpu.unusable()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.unusable() is None  # as the caller wished
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").unlink()
    assert gpu.unusable() is None


def test_a_kernel_that_cannot_be_compiled_ends_the_run(monkeypatch, tmp_path):
    said = "Traceback\nRuntimeError: Failed to find C compiler. Please specify via CC environment variable.\n"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **kwargs: failed)
    assert "Failed to find C compiler" in gpu.no_triton() and "apt-get install gcc python3-dev" in gpu.no_triton()
    assert "Failed to find C compiler" in outcome.cannot(Options(), "cuda")
    assert outcome.cannot(Options(implementations=("honest",)), "cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: there is a GPU")
def test_the_one_kernel_is_right_in_the_interpreter():
    assert one_kernel.main("cpu") == 0


def test_kernels_are_required_on_cuda():
    kernels = outcome.required_kernels(Options())
    assert "trl.chunked_logprob_kernel" in kernels and "cce.default" in kernels
    code, reasons = outcome.judge_run(Options(), [], [], "cuda")
    assert code == NOTHING and any("required on CUDA: cce.default" in r for r in reasons)
    assert not any("required on CUDA" in r for r in outcome.judge_run(Options(), [], [], "cpu")[1])


def test_the_environment_of_a_worker(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_gpu = gpu.child("cuda", "2")
    assert "TRITON_INTERPRET" not in on_gpu and on_gpu["CUDA_VISIBLE_DEVICES"] == "2"
    other = gpu.child("cuda", "3")  # the same cache folders: what one compiled is there for all
    assert {**other, "CUDA_VISIBLE_DEVICES": "2"} == on_gpu

    def begun(command, env, **_):
        assert {name: value for name, value in env.items() if name not in (process.WATCHED, process.SCRATCH)} == on_gpu
        raise InterruptedError

    monkeypatch.setattr(supervisor.subprocess, "Popen", begun)
    with pytest.raises(InterruptedError):
        supervisor.Worker({"device": "cuda", "gpu": "2"}).begin()
    on_cpu = gpu.child("cpu")
    assert on_cpu["TRITON_INTERPRET"] == "1" and on_cpu["CUDA_VISIBLE_DEVICES"] == ""


def test_a_process_on_cuda_interprets_no_kernel(monkeypatch):
    """The header says "compiled"; a user's TRITON_INTERPRET=1 would say otherwise."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"TRITON_INTERPRET": "1"})
    process.prepare("cuda")
    assert "TRITON_INTERPRET" not in os.environ


FUSED = "raise InterpreterError('no')"
LACKS = "raise InterpreterError('no') from NotImplementedError('inline_asm not supported in interpreter mode')"
REFUSED = """raise InterpreterError(repr(ValueError("Expected dtype ['fp32', 'fp64'] but got fp16")))"""


@pytest.mark.parametrize(
    ("line", "fields", "interprets", "verdict"),
    [
        (FUSED, {"family": "grpo-trainer"}, "1", "unsupported"),
        (FUSED, {"family": "grpo-trainer"}, "0", "crashed"),
        (LACKS, {"interpreted": True}, "1", "unsupported"),
        (LACKS, {"interpreted": True}, "0", "crashed"),
        (REFUSED, {"interpreted": True}, "1", "crashed"),
    ],
)
def test_what_fails_in_the_interpreter_is_told_by_its_switch(monkeypatch, line, fields, interprets, verdict):
    """Not by whether there is a GPU: a box with one runs `--device cpu` in the interpreter. Liger 0.5.2 and 0.5.9 end in
    `InterpreterError` in a trainer's fused path. A dtype that Triton itself refuses is no limit of its interpreter: Liger's
    kl_div up to 0.8.2 in 16 bits, for tl.exp takes float32 and float64 alone, compiled too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: interprets == "1")
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    call = {"InterpreterError": type("InterpreterError", (Exception,), {})}
    exec(compile(f"def call(x):\n    {line}", "/packages/triton/interpreter.py", "exec"), call)
    one = dataclasses.replace(control("control.logprobs.plain"), call=call["call"], **fields)
    found = execute(one, oracle_of(family("logprobs").case(3, "fp32", {"V": 5})).inputs)
    assert found.verdict == verdict, found
    assert found.message.startswith("Triton's interpreter: ") == (verdict == "unsupported"), found


ASSERTED = "torch.AcceleratorError: CUDA error: device-side assert triggered"


def test_shards_do_not_depend_on_workers_and_gpus_are_dealt_out(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def plan_of(device, workers):
        return planned(Options(profile="quick", workers=workers, reports=tmp_path), device, 1)

    few, many = plan_of("cuda", 2), plan_of("cuda", 5)
    assert few.shards == many.shards and {one["gpu"] for one in few.workers} == {"3", "5"}
    assert len({s.index for s in many.shards if (s.family, s.kind) == ("policy", "drawn")}) == SHARDS_CUDA
    on_cpu = plan_of("cpu", 3)
    assert len({s.index for s in on_cpu.shards if (s.family, s.kind) == ("policy", "drawn")}) == SHARDS
    assert not any("gpu" in one for one in on_cpu.workers)


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        (
            f"x.cu:12: block: Assertion failed.\nTraceback\n  File\n{ASSERTED}\nCompile with `TORCH_USE_CUDA_DSA`",
            ASSERTED,
        ),
        ("Traceback\nCUDA error: an illegal memory access\nSearch for `cudaErrorIllegalAddress`", "illegal"),
        ("Traceback\nValueError: no\n\nduring handling\nKeyError: 'x'", "KeyError: 'x'"),
        ("Killed", "Killed"),
        ("", ""),
    ],
)
def test_the_line_that_says_why_a_process_died(stderr, why):
    told = supervisor.death("killed by signal 6", stderr)
    assert told.startswith("the process ended (killed by signal 6)") and why in told


def test_torchs_newer_precision_switch_is_seen_and_put_back(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = process_state.take()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # beside cudnn.allow_tf32, which raises now
        assert matmul_precision() == "mixed"
    finally:
        leaks = before.restore()
    assert {"float32_matmul_precision changed", "switch torch.backends.cudnn.conv.fp32_precision changed"} <= set(leaks)
    assert torch.backends.cudnn.allow_tf32 is True
    assert matmul_precision() == "highest" and torch.backends.cuda.matmul.allow_tf32 is False


def test_a_state_in_which_torchs_switches_contradict_each_other_is_put_back():
    """A user's file may set the newer switch when it is imported: the state before each of its calls."""
    clean = process_state.take()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        mixed = process_state.take()
        assert mixed.states["switch"]["torch.backends.cuda.matmul.allow_tf32"] == "mixed"
        clean.restore()
        assert mixed.restore() and not list(mixed.differing())
    finally:
        clean.restore()
    assert not list(clean.differing())


def test_what_a_gpu_has_of_its_own_is_watched_and_put_back():
    matmul = torch.backends.cuda.matmul
    switches = [
        f"allow_{name}" for name in ("tf32", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")
    ]

    def state():
        own = torch.cuda.get_rng_state().tolist(), torch.is_autocast_enabled("cuda")
        return *own, *(getattr(matmul, name) for name in switches)

    with pretended():
        before, was = process_state.take(), state()
        torch.rand(1, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        for name in switches:
            setattr(matmul, name, not getattr(matmul, name))
        leaks = before.restore()
        assert state() == was
    named = {f"switch torch.backends.cuda.matmul.{name} changed" for name in switches[1:]}
    assert named | {"CUDA RNG changed", "autocast changed", "float32_matmul_precision changed"} <= set(leaks)


def test_ranks_on_the_cpu_see_no_gpu(monkeypatch):
    """Rank 1 would take a GPU that a box has not."""
    seen = []

    def started(command, env, **_):
        seen.append(env)
        raise Unsupported("nothing is started")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setattr(ranks.subprocess, "Popen", started)
    with pytest.raises(Unsupported):
        ranks.launch("", {}, "none", 2)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == [""]


def test_workers_hash_text_alike():
    """Else the order of a set in transformers decides the random errors of a replica."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | process.environment("cpu")
    command = [sys.executable, "-c", "print(hash('sliding_attention'))"]
    told = {subprocess.run(command, env=env, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(told) == 1
