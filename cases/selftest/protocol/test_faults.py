"""Which errors of CUDA end its context, and which do not."""

import dataclasses
import importlib
import sys

import pytest
import torch

from parity import process
from parity.protocol import call, exceptions, faults
from parity.registry import load


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 TiB"), False),
        (ValueError("misaligned address"), False),
    ],
)
def test_what_ends_a_context(error, ends):
    assert faults.sticky(error) is ends


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_a_library_is_one_wherever_pip_put_it(packages):
    """Debian's own Python has dist-packages."""
    folder, mine = f"/usr/local/lib/python3.12/{packages}", "/home/me/lib/mine.py"
    others = (f"{folder}/torch/nn/functional.py", exceptions.__file__, dataclasses.__file__)
    assert exceptions.is_library(f"{folder}/trl/losses.py") and exceptions.is_library(mine)
    assert not any(map(exceptions.is_library, others))
    assert process.packaged(f"{folder}/trl/losses.py") == "trl/losses.py" and process.packaged(mine) is None


def guarded(run, trainer=True):
    """How a call by a trainer ends, or by a loss."""
    return call.guarded(next(i for i in load().values() if i.is_trainer is trainer), run)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_too_little_memory_is_no_crash(error):
    def run():
        raise error

    assert guarded(run).verdict == guarded(run, False).verdict == "out-of-memory"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a module; what calls one of its functions."""

    def module(name, text, function, folder=""):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return lambda: getattr(importlib.import_module(name), function)()

    return module


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (ImportError("nowhere is not installed. Please install it with `pip install nowhere`."), "nowhere"),
        (ImportError("this needs a server: pip install no-where"), "no-where"),
        (ModuleNotFoundError("No module named 'nowhere.client'", name="nowhere.client"), "nowhere"),
        (ModuleNotFoundError("No module named 'torch.nowhere'", name="torch.nowhere"), ""),
        (ImportError("pytest is not installed"), ""),
        (ImportError("cannot import name 'x'"), ""),
        (RuntimeError("nowhere is not installed"), ""),
    ],
)
def test_a_package_that_is_not_installed_is_nobodys_failure(error, needed):
    def run():
        raise error

    outcome = guarded(run, trainer=False)
    assert (outcome.verdict == "unsupported") is bool(needed) and (not needed or f"needs {needed}," in outcome.message)


def test_a_library_that_does_not_import_here_is_said_once_and_is_no_crash(written):
    """Liger 0.5.4 asks for torch.hip where there is no CUDA."""
    written("needs_a_gpu", "def infer():\n    return torch.hip\n\n\nimport torch\n\ninfer()\n", "infer")
    text = "def loss():\n    import needs_a_gpu\n\n\ndef wrong():\n    loss.nowhere\n"
    outcome = guarded(written("imports_later", text, "loss"), trainer=False)
    assert outcome.verdict == "unsupported"
    assert outcome.message.startswith("needs_a_gpu does not import here: AttributeError")
    assert guarded(written("imports_later", text, "wrong"), trainer=False).verdict == "crashed"


@pytest.mark.parametrize(
    ("line", "verdict"),
    [("{}['x']", "refused"), ("loss(mask=1, **{'mask': 2})", "crashed"), ("1 / None", "crashed")],
)
def test_a_type_error_of_a_trainer_is_no_refusal(line, verdict, written):
    """TRL 0.19.0's DPO on Liger with an adapter, 0.23.0's dft in evaluation. Another format of the data is a refusal."""
    text = f"def loss(mask):\n    return mask\n\n\ndef step():\n    {line}\n"
    outcome = guarded(written("some_trainer", text, "step"))
    assert outcome.verdict == verdict, outcome


@pytest.mark.parametrize(("folder", "verdict"), [("trainers", "refused"), ("transformers/models", "crashed")])
def test_what_a_model_refuses_is_a_crash_of_its_trainer(folder, verdict, written, tmp_path):
    """A step that lost input_ids: no setting was refused."""
    text = "def forward():\n    raise ValueError('no input_ids')\n"
    outcome = guarded(written("refusing", text, "forward", folder))
    where = f", at {tmp_path}/{folder}/refusing.py:2 forward" * (verdict == "crashed")
    assert (outcome.verdict, outcome.message) == (verdict, f"ValueError: no input_ids{where}")


def test_the_time_limit_of_a_test_is_no_verdict_on_what_it_calls():
    """It was "unsupported" of the trainer that ran at that moment."""
    with pytest.raises(pytest.fail.Exception, match="pytest-timeout"):
        guarded(lambda: pytest.fail("Timeout (>600.0s) from pytest-timeout."))


def test_what_torchs_compiler_says_names_the_cache_that_a_kill_may_have_broken(monkeypatch):
    """Its own first line says nothing: `backend='inductor' raised:`."""
    from torch._dynamo.exc import BackendCompilerFailed

    def inductor():
        raise AssertionError

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/cache")
    with pytest.raises(BackendCompilerFailed) as raised:
        raise BackendCompilerFailed(inductor, RuntimeError("C++ compile error\n\nCommand: g++"), None)
    said = exceptions.ended_by(raised.value, load()["cce.torch_compile"]).message
    assert "RuntimeError: C++ compile error; " in said
    assert "remove /the/cache" in said
