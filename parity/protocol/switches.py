"""What is watched beside names: the environment, random states, and torch's modes, defaults and switches."""

import operator
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.utils._device import DeviceContext


def _put_variables(value: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(value)


def _numpy_rng() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 the global one is what is watched
    return kind, np.asarray(keys).tobytes(), *rest


def _put_numpy_rng(value: tuple[Any, ...]) -> None:
    kind, keys, *rest = value
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _state(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _cuda_rng() -> list[bytes]:
    return [*map(_bytes, torch.cuda.get_rng_state_all())] if torch.cuda.is_initialized() else []


def _put_cuda_rng(value: list[bytes]) -> None:
    if value:
        torch.cuda.set_rng_state_all([*map(_state, value)])


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


def _saved_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _put_saved_hooks(value: Any) -> None:
    while (now := _saved_hooks()) is not None and now != value:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _module_hooks() -> dict[str, Any]:
    """Hooks on every module of the process."""
    tables = vars(nn_module).items()
    return {name: dict(table) for name, table in tables if name.startswith("_global_") and isinstance(table, dict)}


def _put_module_hooks(value: dict[str, Any]) -> None:
    for name, hooks in value.items():
        vars(nn_module)[name].clear()
        vars(nn_module)[name].update(hooks)


def _autocast() -> tuple[Any, ...]:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _put_autocast(value: tuple[Any, ...]) -> None:
    for device, enabled, dtype in value:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def matmul_precision() -> str:
    """`torch.get_float32_matmul_precision()`; "mixed" where it raises: somebody set torch's newer `fp32_precision`."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


_TINY = [5e-324]


def _flushes() -> bool:
    """Whether subnormal numbers count as 0 on this thread: torch can set it and not say it."""
    return _TINY[0] * 1.0 == 0.0


SWITCHES = """
backends.cudnn.enabled backends.cudnn.benchmark backends.cudnn.deterministic backends.cudnn.allow_tf32
backends.cuda.matmul.allow_tf32 backends.cuda.matmul.allow_fp16_reduced_precision_reduction
backends.cuda.matmul.allow_bf16_reduced_precision_reduction backends.mkldnn.enabled
utils.deterministic.fill_uninitialized_memory
""".split()
"""Attributes below `torch` that are true or false."""
SDP = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def _switch(path: str) -> bool | str:
    """A switch; "mixed" where somebody set torch's newer `fp32_precision`, beside which `allow_tf32` raises."""
    try:
        return bool(operator.attrgetter(path)(torch))
    except RuntimeError:
        return "mixed"


def _switches() -> dict[str, bool | str]:
    out = {f"torch.{path}": _switch(path) for path in SWITCHES}
    return out | {f"torch.backends.cuda.{name}": getattr(torch.backends.cuda, f"{name}_enabled")() for name in SDP}


def _put_switches(value: dict[str, bool | str]) -> None:
    for path in SWITCHES:
        owner, _, name = path.rpartition(".")
        if _switch(path) != value[f"torch.{path}"]:
            setattr(operator.attrgetter(owner)(torch), name, value[f"torch.{path}"])
    for name in SDP:
        getattr(torch.backends.cuda, f"enable_{name}")(value[f"torch.backends.cuda.{name}"])


WATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "torch modes": (_modes, _put_modes),  # first: an entered mode changes what later entries do
    "environment variable": (
        lambda: dict(vars(os.environ)["_data"]),
        _put_variables,
    ),  # as bytes: `environ` decodes each
    "python RNG": (random.getstate, random.setstate),
    "numpy RNG": (_numpy_rng, _put_numpy_rng),
    "torch RNG": (lambda: _bytes(torch.get_rng_state()), lambda v: torch.set_rng_state(_state(v))),
    "CUDA RNG": (_cuda_rng, _put_cuda_rng),
    "inference mode": (torch.is_inference_mode_enabled, None),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda v: torch.set_anomaly_enabled(*v),
    ),
    "hooks on saved tensors": (_saved_hooks, _put_saved_hooks),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        lambda: str(torch.get_default_device()),
        lambda d: torch.set_default_device(None if d == "cpu" else d),
    ),
    "float32_matmul_precision": (matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    "switch": (_switches, _put_switches),
    "autocast": (_autocast, _put_autocast),
    "flushing of subnormal numbers": (_flushes, torch.set_flush_denormal),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "hooks on every module": (_module_hooks, _put_module_hooks),
}
"""What a call must leave alone, in the order in which it is put back: one function reads it, one restores what that gave. Without
the second nothing can undo it. Of a table the entries that changed are named."""
LEFT = 10
"""Changes of one kind that are named one by one."""


def told(name: str, before: Any, now: Any) -> list[str]:
    """How a change of an entry is named."""
    if not isinstance(before, dict) or name == "hooks on every module":
        return [f"{name} changed"]
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{name} {os.fsdecode(key)} changed" for key in keys[:LEFT]]
