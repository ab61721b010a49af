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
    folder = f"/usr/local/lib/python3.12/{packages}"
    assert exceptions.is_library(f"{folder}/trl/losses.py") and not exceptions.is_library(
        f"{folder}/torch/nn/functional.py"
    )
    assert (
        process.packaged(f"{folder}/trl/losses.py") == "trl/losses.py"
        and process.packaged("/home/me/lib/mine.py") is None
    )
    assert exceptions.is_library("/home/me/lib/mine.py")
    assert not exceptions.is_library(exceptions.__file__) and not exceptions.is_library(dataclasses.__file__)


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

    implementation = next(i for i in load().values() if not i.is_trainer)
    outcome = call.guarded(implementation, run)
    assert (outcome.verdict == "unsupported") is bool(needed) and (not needed or f"needs {needed}," in outcome.message)


def test_a_library_that_does_not_import_here_is_said_once_and_is_no_crash(tmp_path, monkeypatch):
    """Liger 0.5.4 asks for torch.hip where there is no CUDA."""
    (tmp_path / "needs_a_gpu.py").write_text("def infer():\n    return torch.hip\n\n\nimport torch\n\ninfer()\n")
    (tmp_path / "imports_later.py").write_text(
        "def loss():\n    import needs_a_gpu\n\n\ndef wrong():\n    loss.nowhere\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    implementation = next(i for i in load().values() if not i.is_trainer)
    outcome = call.guarded(implementation, lambda: importlib.import_module("imports_later").loss())
    assert outcome.verdict == "unsupported"
    assert outcome.message.startswith("needs_a_gpu does not import here: AttributeError")
    outcome = call.guarded(implementation, lambda: importlib.import_module("imports_later").wrong())
    assert outcome.verdict == "crashed"


@pytest.mark.parametrize(
    ("line", "verdict"),
    [("{}['x']", "refused"), ("loss(mask=1, **{'mask': 2})", "crashed"), ("1 / None", "crashed")],
)
def test_a_type_error_of_a_trainer_is_no_refusal(line, verdict, tmp_path, monkeypatch):
    """TRL 0.19.0's DPO on Liger with an adapter, 0.23.0's dft in evaluation. Another format of the data is a refusal."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_trainer.py").write_text(f"def loss(mask):\n    return mask\n\n\ndef step():\n    {line}\n")
    trainer = next(i for i in load().values() if i.is_trainer)
    monkeypatch.delitem(sys.modules, "some_trainer", raising=False)
    outcome = call.guarded(trainer, lambda: importlib.import_module("some_trainer").step())
    assert outcome.verdict == verdict, outcome


@pytest.mark.parametrize(("folder", "verdict"), [("trainers", "refused"), ("transformers/models", "crashed")])
def test_what_a_model_refuses_is_a_crash_of_its_trainer(folder, verdict, tmp_path, monkeypatch):
    """A step that lost input_ids: no setting was refused."""
    place = tmp_path / folder
    place.mkdir(parents=True)
    (place / "refusing.py").write_text("def forward(inputs):\n    raise ValueError('no input_ids')\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "refusing", raising=False)
    trainer = next(i for i in load().values() if i.is_trainer)
    outcome = call.guarded(trainer, lambda: importlib.import_module("refusing").forward({}))
    where = f", at {place}/refusing.py:2 forward" * (verdict == "crashed")
    assert (outcome.verdict, outcome.message) == (verdict, f"ValueError: no input_ids{where}")


def test_the_time_limit_of_a_test_is_no_verdict_on_what_it_calls():
    """It was "unsupported" of the trainer that ran at that moment."""
    trainer = next(i for i in load().values() if i.is_trainer)
    with pytest.raises(pytest.fail.Exception, match="pytest-timeout"):
        call.guarded(trainer, lambda: pytest.fail("Timeout (>600.0s) from pytest-timeout."))


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
