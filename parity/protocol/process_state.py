"""The state of the process that all parties share: taken before a call, put back after it, and who left it changed.

What is watched beside names: the environment, random states, and torch's modes, defaults and switches.
"""

import contextlib
import dataclasses
import operator
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._device import DeviceContext

from parity.protocol import bindings

SWITCHES = """
backends.cudnn.enabled backends.cudnn.benchmark backends.cudnn.deterministic backends.cudnn.allow_tf32
backends.cuda.matmul.allow_tf32 backends.cuda.matmul.allow_fp16_reduced_precision_reduction
backends.cuda.matmul.allow_bf16_reduced_precision_reduction backends.mkldnn.enabled
utils.deterministic.fill_uninitialized_memory
backends.fp32_precision backends.cuda.matmul.fp32_precision backends.cudnn.fp32_precision
backends.cudnn.conv.fp32_precision backends.cudnn.rnn.fp32_precision backends.mkldnn.matmul.fp32_precision
""".split()
"""Attributes below `torch` that are true or false, and its newer precisions, in words."""
SDP = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
Changed = tuple[list[bindings.Change], dict[str, Any]]
"""Names that were rebound, and entries of `WATCHES` with what they are now."""
_kept: dict[str, Changed] = {}
"""What a file or a library patched when it was imported."""
_belongs: dict[str, str] = {}
_broken: list[str] = []
_reference: list[bytes] = []
_called: list[str] = []
"""Who was called since arithmetic was last tried."""
_X = torch.linspace(-1.5, 2.0, 16, dtype=torch.float64).view(4, 4)
_IDS = torch.arange(4).unsqueeze(-1)


def _put_variables(value: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(value)


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _state(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _modes() -> tuple[int, int]:
    """How many are entered; the default device, which torch keeps at the bottom as a mode, is an entry of its own."""
    depth = torch._C._len_torch_function_stack()
    functions = sum(not isinstance(torch._C._get_function_stack_at(k), DeviceContext) for k in range(depth))
    return functions, torch._C._len_torch_dispatch_stack()


def _put_modes(value: tuple[int, int]) -> None:
    while _modes()[0] > value[0]:
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack() > value[1]:
        torch._C._pop_torch_dispatch_stack(None)


def _put_autocast(value: list[Any]) -> None:
    for device, enabled, dtype in value:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`; "mixed" where it raises: somebody set torch's newer `fp32_precision`."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def _switch(path: str) -> bool | str:
    """A switch; "mixed" where somebody set torch's newer `fp32_precision`, beside which `allow_tf32` raises."""
    try:
        value = operator.attrgetter(path)(torch)
    except RuntimeError:
        return "mixed"
    return value if isinstance(value, str) else bool(value)


def _switches() -> dict[str, bool | str]:
    out = {f"torch.{path}": _switch(path) for path in SWITCHES}
    return out | {f"torch.backends.cuda.{name}": getattr(torch.backends.cuda, f"{name}_enabled")() for name in SDP}


def _put_switches(value: dict[str, bool | str]) -> None:
    for path in SWITCHES:
        owner, _, name = path.rpartition(".")
        if _switch(path) != value[f"torch.{path}"] != "mixed":
            setattr(operator.attrgetter(owner)(torch), name, value[f"torch.{path}"])
    for name in SDP:
        getattr(torch.backends.cuda, f"enable_{name}")(value[f"torch.backends.cuda.{name}"])


WATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "torch modes": (_modes, _put_modes),  # first: an entered mode changes what later entries do
    "environment variable": (  # as bytes: `environ` decodes each
        lambda: dict(vars(os.environ)["_data"]),
        _put_variables,
    ),
    "python RNG": (random.getstate, random.setstate),
    "numpy RNG": (  # pickled: its arrays cannot be compared as they are
        lambda: pickle.dumps(np.random.get_state(legacy=True)),  # noqa: NPY002 the global one is what is watched
        lambda v: np.random.set_state(pickle.loads(v)),  # noqa: NPY002
    ),
    "torch RNG": (lambda: _bytes(torch.get_rng_state()), lambda v: torch.set_rng_state(_state(v))),
    "CUDA RNG": (
        lambda: [*map(_bytes, torch.cuda.get_rng_state_all())] if torch.cuda.is_initialized() else [],
        lambda v: torch.cuda.set_rng_state_all([*map(_state, v)]) if v else None,
    ),
    "inference mode": (torch.is_inference_mode_enabled, None),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        lambda: str(torch.get_default_device()),
        lambda d: torch.set_default_device(None if d == "cpu" else d),
    ),
    "float32_matmul_precision": (
        matmul_precision,
        lambda v: None if v == "mixed" else torch.set_float32_matmul_precision(v),
    ),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    "switch": (_switches, _put_switches),
    "autocast": (
        lambda: [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        _put_autocast,
    ),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
}
"""What a call must leave alone, in the order in which it is put back: one function reads it, one restores what that gave. Without
the second nothing can undo it. Of a table the entries that changed are named."""
LEFT = 10
"""Changes of one kind that are named one by one."""


def told(name: str, before: Any, now: Any) -> list[str]:
    """How a change of an entry is named."""
    if not isinstance(before, dict):
        return [f"{name} changed"]
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{name} {os.fsdecode(key)} changed" for key in keys[:LEFT]]


def arithmetic() -> bytes:
    """The bits of a small float64 computation of every operation that the definitions are made of, and of a gradient. It
    tells whether arithmetic still is what it was, for whatever is not watched."""
    x = _X.detach().requires_grad_()
    z = torch.tanh(x @ x.T)
    total = torch.log_softmax(z, -1).gather(-1, _IDS).exp().mean() + torch.logsumexp(z, -1).sum()
    (gradient,) = torch.autograd.grad(total, x)
    z, total = z.detach(), total.detach()
    p, picked = torch.softmax(z, -1), z.gather(-1, _IDS).squeeze(-1)
    least = torch.min(picked, torch.clamp(picked, 0.8, 1.2))
    rest = torch.sigmoid(picked) + torch.nn.functional.softplus(picked) + least
    roots = torch.bmm(p[None], z[None]).abs().sqrt().sum()
    mixed = torch.where(picked > 1, picked, rest).mean() + torch.log1p(p).sum() + roots
    narrow = z.to(torch.bfloat16).float() + z.to(torch.float16).float()
    product = torch.nn.functional.linear(narrow, narrow).double()
    return torch.cat([total.view(1), mixed.view(1), gradient.flatten(), product.flatten()]).numpy().tobytes()


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything of `WATCHES` and `bindings`."""

    states: dict[str, Any]
    names: bindings.Names
    modules: int

    def differing(self) -> Iterator[tuple[str, Any]]:
        """Each entry of `WATCHES` that is not as it was, with what it is now."""
        for name, (get, _) in WATCHES.items():
            if (now := get()) != self.states[name]:
                yield name, now

    def restore(self, whose: str = "") -> list[str]:
        """Put everything back; the names of what was changed. `whose`: the implementation that was called. What an import
        rebound is not named: it stays in force for calls of the same library (`its_own`), and only there. Where what
        cannot be put back was left, the process is `broken`."""
        rebound = list(self.names.changes())
        for _, (owner, name, before, _) in rebound:
            bindings.put(owner, name, before)
        imported = bool(whose) and len(sys.modules) != self.modules
        if rebound and imported:
            _kept.setdefault(_key(whose), ([], {}))[0].extend(change for _, change in rebound)
        found = [] if imported else [f"rebound {name}" for name, _ in rebound[:LEFT]]
        for name, now in self.differing():  # one after the other: a mode that is left would see the next reading
            found += told(name, self.states[name], now)
            if put := WATCHES[name][1]:
                put(self.states[name])
            else:
                abandon(f"{whose} left a change that nothing undoes: {name} changed")
        _called.append(whose)
        return found


def take() -> Snapshot:
    if not _reference:
        _reference.append(arithmetic())
    return Snapshot({name: get() for name, (get, _) in WATCHES.items()}, bindings.take(), len(sys.modules))


def abandon(reason: str) -> None:
    """Nobody else may be judged in this process."""
    _broken.append(reason)


def broken() -> list[str]:
    """Why this process must not judge anybody else any more; empty where all is well. Asked after the calls of each party."""
    same = False
    with contextlib.suppress(Exception):  # an operation that raises since is none that still computes the same
        same = not _called or arithmetic() == _reference[0]
    if not same:
        abandon(f"operations of torch compute something else since {_called[-1]} was called")
    if _called and (name := bindings.recoded()):
        abandon(f"{name} has other code since {_called[-1]} was called")
    _called.clear()
    return list(_broken)


def _key(whose: str) -> str:
    return _belongs.get(whose, whose)


@contextlib.contextmanager
def importing(file: str) -> Iterator[None]:
    """Around the import of a user's file: what it patches or sets, random states apart, holds in calls of what it defines."""
    before = take()
    try:
        yield
    finally:
        states = {name: now for name, now in before.differing() if WATCHES[name][1] and not name.endswith("RNG")}
        _kept[file] = [change for _, change in before.names.changes()], states
        before.restore()


def belongs(id: str, file: str) -> None:
    _belongs[id] = file


def its_own(whose: str) -> Snapshot | None:
    """Put in force what `whose` file or library patched when it was imported; the state then, None where that is nothing.
    The caller restores the one that it had before."""
    names, states = _kept.get(_key(whose), ([], {}))
    for owner, name, _, value in names:
        bindings.put(owner, name, value)
    for name, now in states.items():
        WATCHES[name][1](now)  # type: ignore[misc]
    return take() if names or states else None
