"""Run one implementation on one set of inputs, forward and backward. An exception is a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

import parity
from parity.case.family import LARGEST_CASE
from parity.case.inputs import Inputs
from parity.case.layouts import elsewhere
from parity.errors import HarnessError, OracleError, Returned, Unsupported
from parity.implementations.implementation import Implementation, Outputs
from parity.judge.timings import within
from parity.judging import faults
from parity.judging.oracle import gradient_name
from parity.process import packaged
from parity.protocol import process_state
from parity.protocol.switches import matmul_precision

OWN = str(Path(parity.__file__).parent)
STDLIB = sysconfig.get_path("stdlib")
FIXES = f"{OWN}{os.sep}fixes{os.sep}"
"""Our corrected losses stand beside the libraries: what they refuse, their adapters did not."""
REFUSALS = (ValueError, NotImplementedError, AssertionError, TypeError, KeyError)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of running an implementation.

    Attributes:
        verdict: "ran", or why there is nothing to judge: refused, unsupported, crashed, out-of-memory.
        quantities: outputs and gradients by name; None for a gradient that should be there and is not.
        message: of the exception.
        blame: "harness" where the exception came from the adapter itself.
        leaks: what the call left changed in the process; it is put back.
        unknown: names of what a user's function returned besides, which its family does not have.
        differentiable: the outputs that carry a gradient.
    """

    verdict: str
    quantities: Mapping[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    message: str = ""
    blame: str | None = None
    leaks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    differentiable: frozenset[str] = frozenset()

    def same_as(self, other: Outcome) -> bool:
        """Whether both ran and every quantity of this one is in the other to the last bit."""
        ran = self.verdict == other.verdict == "ran"
        theirs = other.quantities
        return ran and all(name in theirs and same_bits(x, theirs[name]) for name, x in self.quantities.items())


def fresh(inputs: Inputs) -> Inputs:
    """The same bits and strides, with leaves that have no history and no gradient."""
    tensors: dict[str, torch.Tensor | None] = {}
    for name, tensor in inputs.tensors.items():
        wanted = name in inputs.leaves
        if tensor is None:
            tensors[name] = None
        elif name in inputs.parameters:
            tensors[name] = torch.nn.Parameter(tensor.detach(), requires_grad=wanted)
        else:
            tensors[name] = tensor.detach().requires_grad_(wanted)
    return inputs.replace(**tensors)


@faults.running("forward pass")
@within("phase", "forward")
def forward(implementation: Implementation, x: Inputs) -> Outputs:
    """Call the adapter in the call context of the case: plain, tf32, autocast, torch.compile region, reentrant checkpoint."""
    context = x.context

    def call(x: Inputs) -> Outputs:
        outputs = implementation.call(x)
        for name, value in outputs.items():
            _judgeable(name, value, x)
        return outputs

    if context in ("plain", "tf32"):
        return call(x)
    if context == "autocast":
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return call(x)
    names: list[str] = []

    def on_leaves(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = call(x.replace(**dict(zip(x.leaves, leaves, strict=True))))
        names[:] = list(out)
        return tuple(out.values())

    leaves = [x.tensors[name] for name in x.leaves]
    if context == "checkpoint":
        values = torch.utils.checkpoint.checkpoint(on_leaves, *leaves, use_reentrant=True)
    elif context == "compile":
        torch.compiler.reset()
        values = torch.compile(on_leaves, backend="aot_eager")(*leaves)
    else:
        raise Unsupported(f"context {context!r} is unknown")
    return dict(zip(names, values, strict=True))


def _judgeable(name: str, value: object, x: Inputs) -> None:
    """Refuse what cannot be compared: no dense tensor of torch's class or the inputs', on another device, or too large."""
    known = {torch.Tensor, torch.nn.Parameter, *map(type, x.tensors.values())}
    if not isinstance(value, torch.Tensor) or type(value) not in known:
        raise Returned(f"returned {type(value).__name__} as {name}, expected a tensor")
    if value.layout is not torch.strided or value.is_quantized or value.is_complex():
        raise Returned(f"returned {value.layout} {value.dtype} as {name}, expected a dense tensor of real numbers")
    if value.dim() and value.device.type != x.device.type:  # a logged number may be anywhere
        raise Returned(f"returned {name} on {value.device}, the inputs are on {x.device}")
    if value.numel() > LARGEST_CASE:
        raise Returned(f"returned {name} of shape {tuple(value.shape)}")


@contextlib.contextmanager
def surroundings(implementation: Implementation, x: Inputs) -> Iterator[None]:
    """The context of both passes: the implementation's own, and tf32 products where the case says so."""
    before = matmul_precision()
    if x.context == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        with implementation.around():
            yield
    finally:
        if x.context == "tf32" and matmul_precision() == "high":
            torch.set_float32_matmul_precision(before)  # what else is left behind is for the protocol gate to see


def upstream(g: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The cotangent in dtype and device of the output, in its own memory layout."""
    return elsewhere(g, dtype=output.dtype, device=output.device)


def differentiated(x: Inputs, outputs: Outputs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and upstream gradient of every quantity that has one.

    An output of the wrong shape is left out: the structure gate names it, where autograd would only raise.
    """
    given = {name: (outputs[name], g) for name, g in x.cotangents.items() if name in outputs}
    return {n: (v, upstream(g, v)) for n, (v, g) in given.items() if v.requires_grad and v.shape == g.shape}


@faults.running("backward pass")
@within("phase", "backward")
def backward(x: Inputs, outputs: Outputs, retain_graph: bool = False) -> list[str]:
    """Accumulate the gradients of every output into the leaves; which upstream gradients were changed on the way."""
    pairs = differentiated(x, outputs)
    if not pairs or not x.leaves:
        return []
    torch.autograd.backward(*zip(*pairs.values(), strict=True), retain_graph=retain_graph)
    changed = [n for n, (out, g) in pairs.items() if not same_bits(g, upstream(x.cotangents[n], out))]
    return [f"upstream gradient of {name} was changed in place" for name in changed]


def gradients(x: Inputs) -> dict[str, torch.Tensor | None]:
    """`.grad` of every leaf, None included; a gradient where none was asked for shows as an extra quantity."""
    out = {gradient_name(name): x.tensors[name].grad for name in x.leaves}  # type: ignore[union-attr]
    for name, tensor in x.tensors.items():
        if tensor is not None and name not in x.leaves and tensor.grad is not None:
            out[gradient_name(name)] = tensor.grad
    return out


def execute(implementation: Implementation, inputs: Inputs) -> Outcome:
    """Forward and backward on fresh leaves. Never raises for what the implementation does."""
    x = fresh(inputs)
    return guarded(implementation, lambda: _both(implementation, x), inputs)


def _both(implementation: Implementation, x: Inputs) -> Outcome:
    with surroundings(implementation, x):
        outputs = forward(implementation, x)
        leaks = backward(x, outputs)
        faults.synchronised(x.device.type)
    detached: dict[str, torch.Tensor | None] = {k: v.detach() for k, v in outputs.items()}
    differentiable = frozenset(k for k, v in outputs.items() if v.requires_grad)
    unknown = getattr(outputs, "unknown", ())
    return Outcome("ran", detached | gradients(x), leaks=tuple(leaks), unknown=unknown, differentiable=differentiable)


def copies(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Copies of every input tensor and upstream gradient ("d logps"), to compare with afterwards."""
    return {k: v.detach().clone() for k, v in _shared(inputs).items()}


def _shared(inputs: Inputs) -> dict[str, torch.Tensor]:
    named = {k: v for k, v in inputs.tensors.items() if v is not None}
    return named | {f"d {k}": v for k, v in inputs.cotangents.items()}


def damaged(inputs: Inputs, kept: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of inputs whose bits changed; they are put back."""
    out = []
    for name, now in _shared(inputs).items():
        old, storage = kept[name], now.untyped_storage()
        needed = sum((n - 1) * step for n, step in zip(now.shape, now.stride(), strict=True)) + now.storage_offset() + 1
        if now.numel() and storage.nbytes() < needed * now.element_size():  # freed: nothing to be compared
            storage.resize_(needed * now.element_size())
            with torch.no_grad():
                now.detach().zero_()
        if not same_bits(now, old):
            out.append(f"input {name} was changed in place")
            memory = tuple(slice(0, 1) if step == 0 else slice(None) for step in now.stride())  # expanded: one for all
            with torch.no_grad():
                now.detach()[memory].copy_(old[memory])
    return out


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in dtype, shape and every entry, a NaN equal to a NaN; or neither is there."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def guarded(implementation: Implementation, run: Callable[[], Outcome], *shared: Inputs) -> Outcome:
    """Run, restore the state of the process and the `shared` inputs, and turn any exception into a verdict."""
    if faults.lost():  # a call before this one lost the context: what another would say is about that
        return Outcome("crashed", message=faults.lost())
    kept = [(inputs, copies(inputs), dict(vars(inputs.settings))) for inputs in shared]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = process_state.take()
        inside = process_state.its_own(implementation.id)
        with faults.running("call"):
            outcome = _caught(implementation, run)
        if faults.lost():  # nothing on the device can be read any more
            process_state.abandon(faults.lost())
            return outcome
        leaks = (inside or before).restore(implementation.id)
        if inside is not None:
            before.restore()
    for inputs, tensors, settings in kept:
        leaks += damaged(inputs, tensors)
        leaks += [
            f"setting {name} changed" for name, value in vars(inputs.settings).items() if settings.get(name) != value
        ]
        vars(inputs.settings).clear()
        vars(inputs.settings).update(settings)
    return dataclasses.replace(outcome, leaks=(*outcome.leaks, *leaks))


def _caught(implementation: Implementation, run: Callable[[], Outcome]) -> Outcome:
    try:
        return run()
    except Unsupported as error:
        return Outcome("unsupported", message=str(error))
    except (torch.OutOfMemoryError, MemoryError) as error:
        faults.released()
        return Outcome("out-of-memory", message=_first_line(error))
    except OracleError as error:
        return Outcome("crashed", message=f"the harness's own oracle: {_first_line(error)}", blame="harness")
    except HarnessError as error:
        return Outcome("crashed", message=f"the harness itself: {_first_line(error)}", blame="harness")
    except KeyboardInterrupt as error:
        if "raise" not in (traceback.extract_tb(error.__traceback__)[-1].line or ""):  # Ctrl-C, and no statement
            raise
        return _classified(implementation, error)
    except BaseException as error:  # sys.exit(0) in a loss is no success of the harness
        if isinstance(error, RuntimeError) and any(words in str(error) for words in faults.MEMORY):
            return Outcome("out-of-memory", message=_first_line(error))
        if faults.sticky(error):
            message = f"{type(error).__name__}: {_first_line(error)}, at {faults.place(error, _is_library)}"
            faults.lose(message)
            return Outcome("crashed", message=message)
        return _classified(implementation, error)


def _classified(implementation: Implementation, error: BaseException) -> Outcome:
    """refused: the library raised a clear error itself; crashed: something below it failed; unsupported: our adapter did."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    message = f"{type(error).__name__}: {_first_line(error)}"
    ours = [i for i, f in enumerate(files) if f.startswith(OWN)]
    theirs = [i for i, f in enumerate(files) if _is_library(f)]
    raised = bool(theirs) and theirs[-1] == len(files) - 1 and (implementation.is_trainer or _on_purpose(error))
    if lacking := _not_installed(error):
        return Outcome("unsupported", message=f"needs {lacking}, which is not installed")
    if files[-1].startswith(FIXES) and isinstance(error, REFUSALS) and _on_purpose(error):
        return Outcome("refused", message=message)
    if isinstance(error, Returned):
        return Outcome("crashed", message=message)
    if ours and not theirs and isinstance(error, ModuleNotFoundError) and _of_library(error.name, implementation):
        return Outcome("unsupported", message=f"no {error.name} in the installed version")
    if implementation.is_function:  # its adapter is the harness's for every function: what fails is the user's
        clear = raised and isinstance(error, REFUSALS) and not isinstance(error, TypeError | KeyError)
        return Outcome("refused" if clear else "crashed", message=message)
    if module := _not_importable(error):
        return Outcome("unsupported", message=f"{module} does not import here: {message}")
    if (
        implementation.interpreted
        and any("triton" in Path(f).parts for f in files[-4:])
        and os.environ.get("TRITON_INTERPRET") == "1"
    ):
        return Outcome("unsupported", message=f"Triton's interpreter: {message}")
    if ours and (not theirs or theirs[-1] < ours[-1]):
        return Outcome(
            "unsupported",
            message=f"the adapter {implementation.id} does not fit this version: {message}",
            blame="harness",
        )
    if raised and isinstance(error, REFUSALS):
        return Outcome("refused", message=message)
    return Outcome("crashed", message=message)


def _not_installed(error: BaseException) -> str:
    """The package that an ImportError names as missing and that this environment has not; empty for any other error."""
    if not isinstance(error, ImportError):
        return ""
    named = re.search(r"([\w.-]+)`? is not installed|pip install ([\w.-]+)", str(error))
    name = error.name or next(filter(None, named.groups() if named else ()), "")
    package = name.partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return ""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return package
    return ""


def _not_importable(error: BaseException) -> str:
    """The module of a library in whose import it was raised, as where a release imports with a GPU only; else empty."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    importing = [f for f in frames if f.f_code.co_name == "<module>" and _is_library(f.f_code.co_filename)]
    return str(importing[-1].f_globals["__name__"]) if importing else ""


def _of_library(module: str | None, implementation: Implementation) -> bool:
    """Whether a module would be in the package of the implementation's library."""
    return (module or "").partition(".")[0] == implementation.library.replace("-", "_")


def _on_purpose(error: BaseException) -> bool:
    """Whether it was raised by a statement: a lookup or a conversion that failed on the way is no refusal.

    torch raises NotImplementedError below Python, for a dtype without a kernel. What fails inside a trainer may be the
    release's other data format, which its check does not know.
    """
    line = traceback.extract_tb(error.__traceback__)[-1].line or "raise"
    return isinstance(error, NotImplementedError) or re.search(r"\b(raise|assert)\b", line) is not None


def _is_library(filename: str) -> bool:
    """A frame of code under test: not the standard library, torch, triton or the harness."""
    if filename.startswith((OWN, "<")):
        return False
    inside = packaged(filename)
    if inside is None:
        return not filename.startswith(STDLIB)
    return not {"torch", "triton", "importlib", "contextlib.py", "threading.py"} & set(inside.split("/"))


def _first_line(error: BaseException) -> str:
    """The first line of its message, as any report can hold it; empty if it has none."""
    try:
        text = str(error).strip()
    except Exception:
        return "(its message cannot be read)"
    line = text.splitlines()[0][:300] if text else ""
    return "".join(c if c.isprintable() else "\ufffd" for c in line)
