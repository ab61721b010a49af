"""What came of a call: its quantities, or what the exception means that ended it."""

import dataclasses
import importlib.util
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import parity
from parity.errors import HarnessError, OracleError, Returned, Unsupported
from parity.implementations.implementation import Implementation
from parity.judge.protocol import same_bits
from parity.process import installed, packaged
from parity.protocol import faults

OWN = str(Path(parity.__file__).parent)
STDLIB = sysconfig.get_path("stdlib")
FIXES = f"{OWN}{os.sep}fixes{os.sep}"
"""Our corrected losses stand beside the libraries: what they refuse, their adapters did not."""
PROTOCOL = f"{OWN}{os.sep}protocol{os.sep}"
"""What fails below it, in no adapter, is a backward pass."""
MODELS = f"transformers{os.sep}models{os.sep}"
"""What a model's forward refuses is what its trainer gave it, and no setting of the trainer."""
REFUSALS = (ValueError, NotImplementedError, AssertionError, TypeError, KeyError)


@dataclasses.dataclass(frozen=True)
class Outcome:
    verdict: str  # "ran", or why there is nothing to judge: refused, unsupported, crashed, out-of-memory
    # outputs and gradients by name; None for a gradient that should be there and is not
    quantities: Mapping[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    message: str = ""  # of the exception
    blame: str | None = None  # "harness" where the exception came from the adapter itself
    leaks: tuple[str, ...] = ()  # what the call left changed in the process; it is put back
    unknown: tuple[str, ...] = ()  # names of what a user's function returned besides, which its family does not have
    differentiable: frozenset[str] = frozenset()  # the outputs that carry a gradient
    elsewhere: bool = False  # whether it may run elsewhere: this environment lacks something

    def same_as(self, other: "Outcome") -> bool:
        """Whether both ran and every quantity of this one is in the other to the last bit."""
        ran = self.verdict == other.verdict == "ran"
        theirs = other.quantities
        return ran and all(name in theirs and same_bits(x, theirs[name]) for name, x in self.quantities.items())


def ended_by(error: BaseException, implementation: Implementation) -> Outcome:
    """The verdict on a call that raised. Raises Ctrl-C again, and the time limit of a test that the call was in; sys.exit(0) in a
    loss is no success of the harness."""
    text = _first_line(error)
    if not isinstance(error, Exception) and text.endswith("from pytest-timeout."):
        raise error
    if isinstance(error, Unsupported):
        return Outcome("unsupported", message=str(error))
    if isinstance(error, OracleError | HarnessError):
        whose = "the harness's own oracle" if isinstance(error, OracleError) else "the harness itself"
        return Outcome("crashed", message=f"{whose}: {text}", blame="harness")
    if isinstance(error, KeyboardInterrupt):
        if "raise" not in (traceback.extract_tb(error.__traceback__)[-1].line or ""):  # no statement: Ctrl-C
            raise error
        return _classified(implementation, error)
    scarce = isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in faults.MEMORY)
    if scarce or isinstance(error, torch.OutOfMemoryError | MemoryError):
        faults.released()
        return Outcome("out-of-memory", message=text)
    if faults.sticky(error):
        message = f"{type(error).__name__}: {text}, at {deepest(traceback.extract_tb(error.__traceback__))}"
        faults.lose(message)
        return Outcome("crashed", message=message)
    return _classified(implementation, error)


def _classified(implementation: Implementation, error: BaseException) -> Outcome:
    """refused: the library raised a clear error itself; crashed: something below it failed; unsupported: our adapter did."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    message = f"{type(error).__name__}: {_first_line(error)}"
    ours = [i for i, f in enumerate(files) if f.startswith(OWN)]
    theirs = [i for i, f in enumerate(files) if is_library(f)]
    lenient = implementation.is_trainer and not isinstance(error, TypeError)  # which is of the code, not of its data
    raised = bool(theirs) and theirs[-1] == len(files) - 1 and (lenient or _on_purpose(error))
    raised &= not (implementation.is_trainer and MODELS in files[-1])
    if lacking := _not_installed(error):
        return Outcome("unsupported", message=f"needs {lacking}, which is not installed", elsewhere=True)
    if files[-1].startswith(FIXES) and isinstance(error, REFUSALS) and _on_purpose(error):
        return Outcome("refused", message=message)
    if isinstance(error, Returned):
        return Outcome("crashed", message=message)
    module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if ours and not theirs and module and module.partition(".")[0] == implementation.library.replace("-", "_"):
        return Outcome("unsupported", message=f"no {module} in the installed version", elsewhere=True)
    interpreted = implementation.interpreted or type(error).__name__ == "InterpreterError"  # in a trainer's fused path
    in_triton = interpreted and any("triton" in Path(f).parts for f in files[-4:])
    if in_triton and os.environ.get("TRITON_INTERPRET") == "1" and (implementation.is_trainer or _lacked(error)):
        return Outcome("unsupported", message=f"Triton's interpreter: {message}", elsewhere=True)
    if implementation.is_function:  # its adapter is the harness's for every function: what fails is the user's
        clear = raised and isinstance(error, REFUSALS) and not isinstance(error, TypeError | KeyError)
        return Outcome("refused", message=message) if clear else Outcome("crashed", message=message + _place(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    importing = [f for f in frames if f.f_code.co_name == "<module>" and is_library(f.f_code.co_filename)]
    if importing:  # as where a release imports with a GPU only
        said = f"{importing[-1].f_globals['__name__']} does not import here: {message}"
        return Outcome("unsupported", message=said, elsewhere=True)
    if ours and (not theirs or theirs[-1] < ours[-1]) and not files[ours[-1]].startswith(PROTOCOL):
        said = f"the adapter {implementation.id} does not fit this version: {message}"
        if implementation.user_class:  # its fault, or that of the check that reads what it did
            place = deepest([traceback.extract_tb(error.__traceback__)[ours[-1]]])
            return Outcome("unsupported", message=f"the check cannot follow this class: {message}, at {place}")
        return Outcome("unsupported", message=said, blame="harness")
    if raised and isinstance(error, REFUSALS):
        return Outcome("refused", message=message)
    return Outcome("crashed", message=message + _place(error))


def _not_installed(error: BaseException) -> str:
    """The package that an ImportError names as missing and that this environment has not; empty for any other error."""
    if not isinstance(error, ImportError):
        return ""
    named = re.search(r"([\w.-]+)`? is not installed|pip install ([\w.-]+)", str(error))
    name = error.name or next(filter(None, named.groups() if named else ()), "")
    package = name.partition(".")[0]
    missing = package and importlib.util.find_spec(package) is None and installed(package) is None
    return package if missing else ""


def _lacked(error: BaseException) -> bool:
    """Whether Triton's interpreter has not an operation of a kernel: what else fails there fails compiled too."""
    *_, error = _causes(error)
    of = type(error.obj).__module__ if isinstance(error, AttributeError) else ""
    return isinstance(error, NotImplementedError) or of == "triton.runtime.interpreter"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it was raised from, the first of them last: of a kernel, which Triton's interpreter runs."""
    while error is not None:
        yield error
        error = error.__cause__


def _on_purpose(error: BaseException) -> bool:
    """Whether it was raised by a statement: a lookup or a conversion that failed on the way is no refusal. torch raises
    NotImplementedError below Python, for a dtype without a kernel. What fails inside a trainer may be the release's other
    data format, which its check does not know."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or "raise"
    return isinstance(error, NotImplementedError) or re.search(r"\b(raise|assert)\b", line) is not None


def is_library(filename: str) -> bool:
    """Whether a frame is of code under test: not of the standard library, torch, triton or the harness."""
    if filename.startswith((OWN, "<")):
        return False
    inside = packaged(filename)
    if inside is None:
        return not filename.startswith(STDLIB)
    return not {"torch", "triton", "importlib", "contextlib.py", "threading.py"} & set(inside.split("/"))


def _place(error: BaseException) -> str:
    """Where code under test was when it failed; of what torch alone ran, as of a backward pass, nothing is known."""
    frames = [frame for one in _causes(error) for frame in traceback.extract_tb(one.__traceback__)]
    return f", at {deepest(frames)}" if any(is_library(frame.filename) for frame in frames) else ""


def deepest(frames: Iterable[Iterable[Any]]) -> str:
    """`file:line function` of the deepest frame (these three) of code under test, or of the deepest; the outermost is first."""
    every = [tuple(frame) for frame in frames]
    file, line, name, *_ = ([f for f in every if is_library(f[0])] or [("", "", ""), *every])[-1]
    return f"{packaged(file) or file}:{line} {name}" if file else ""


def _first_line(error: BaseException) -> str:
    """The first line of its message, as any report can hold it; empty if it has none."""
    try:
        text = str(error).strip()
    except Exception:
        return "(its message cannot be read)"
    line = text.splitlines()[0][:300] if text else ""
    if line == "backend='inductor' raised:":
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cause = text.splitlines()[1][:200]
        line = f"{cause}; a process that is killed while it compiles may leave this behind: remove {cache_dir()}"
    return "".join(c if c.isprintable() else "\ufffd" for c in line)
