"""What a process has of torch and numpy: modes, random states, switches, hooks."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.utils._device import DeviceContext

from parity.world.watch import Watch

_numpy: dict[bytes, Any] = {}
"""The last state of numpy's generator that was read in full, by its memory."""
_MT19937 = 4 * 625
"""Bytes of 624 keys and a position."""


def _numpy_state() -> Any:
    """In full only where its memory is another than last time: numpy copies key by key, which takes 40 µs.

    A normal number that it holds back for the next call is in no memory that can be seen, so then it is read in full too.
    """
    generator = np.random.mtrand._rand._bit_generator
    memory = b""
    if type(generator) is np.random.MT19937:
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937)
        if (known := _numpy.get(memory)) is not None and not known[3]:
            return known
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 the global one is what is watched
    state = kind, np.asarray(keys).tobytes(), *rest
    _numpy.clear()
    if memory:
        _numpy[memory] = state
    return state


def _put_numpy(value: Any) -> None:
    kind, keys, *rest = value
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002


def _put_torch_rng(value: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def _cuda_rng() -> tuple[bytes, ...]:
    return tuple(s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()


def _put_cuda_rng(value: tuple[bytes, ...]) -> None:
    if value:
        torch.cuda.set_rng_state_all([torch.frombuffer(bytearray(v), dtype=torch.uint8) for v in value])


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


SWITCHES: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.mkldnn, "enabled"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)
_SDP = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def _switches() -> tuple[bool | str, ...]:
    sdp = [getattr(torch.backends.cuda, f"{name}_enabled")() for name in _SDP]
    return tuple(_switch(owner, name) for owner, name in SWITCHES) + tuple(sdp)


def _switch(owner: Any, name: str) -> bool | str:
    """A switch; "mixed" where somebody set torch's newer `fp32_precision`, beside which `allow_tf32` raises."""
    try:
        return bool(getattr(owner, name))
    except RuntimeError:
        return "mixed"


def _put_switches(value: tuple[bool | str, ...]) -> None:
    for (owner, name), on in zip(SWITCHES, value, strict=False):
        if _switch(owner, name) != on:
            setattr(owner, name, on)
    for name, on in zip(_SDP, value[len(SWITCHES) :], strict=True):
        getattr(torch.backends.cuda, f"enable_{name}")(on)


def _named_switches(before: tuple[bool | str, ...], now: tuple[bool | str, ...]) -> list[str]:
    names = [
        f"{owner.__name__ if hasattr(owner, '__name__') else 'torch.backends.cuda.matmul'}.{name}"
        for owner, name in SWITCHES
    ]
    names += [f"torch.backends.cuda.{name}" for name in _SDP]
    return [f"switch {n} changed" for n, a, b in zip(names, before, now, strict=True) if a != b]


_TINY = [5e-324]


def _flushes() -> bool:
    """Whether subnormal numbers count as 0 on this thread: torch can set it and not say it."""
    return _TINY[0] * 1.0 == 0.0


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


HOOKS = tuple(n for n in vars(nn_module) if n.startswith("_global_") and isinstance(vars(nn_module)[n], dict))
"""Hooks on every module of the process."""


def _put_hooks(value: tuple[dict[int, Any], ...]) -> None:
    for name, hooks in zip(HOOKS, value, strict=True):
        table = vars(nn_module)[name]
        table.clear()
        table.update(hooks)


def _put_printing(value: tuple[dict[str, Any], dict[str, Any]]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(value[0])
    np.set_printoptions(**value[1])


def _saved_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _put_saved_hooks(value: Any) -> None:
    while (now := _saved_hooks()) is not None and now != value:
        torch._C._autograd._pop_saved_tensors_default_hooks()


WATCHES: tuple[Watch, ...] = (
    Watch(
        "print options",
        lambda: (dict(vars(torch._tensor_str.PRINT_OPTS)), dict(np.get_printoptions())),
        _put_printing,
    ),
    Watch("numpy RNG", _numpy_state, _put_numpy, kept=False),
    Watch(
        "numpy error handling",
        lambda: (np.geterr(), np.geterrcall()),
        lambda how: (np.seterr(**how[0]), np.seterrcall(how[1])),
    ),
    Watch("torch RNG", lambda: torch.get_rng_state().numpy().tobytes(), _put_torch_rng, kept=False),
    Watch("CUDA RNG", _cuda_rng, _put_cuda_rng, kept=False),
    Watch("inference mode", torch.is_inference_mode_enabled, None, kept=False),
    Watch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Watch(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda v: torch.set_anomaly_enabled(*v),
    ),
    Watch("hooks on saved tensors", _saved_hooks, _put_saved_hooks),
    Watch(
        "profiler", torch.autograd._profiler_enabled, lambda on: on or torch.autograd._disable_profiler(), kept=False
    ),
    Watch("torch.set_warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    Watch("autograd threads", torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    Watch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Watch(
        "default device",
        lambda: str(torch.get_default_device()),
        lambda d: torch.set_default_device(None if d == "cpu" else d),
    ),
    Watch("float32_matmul_precision", matmul_precision, torch.set_float32_matmul_precision),
    Watch(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]),
    ),
    Watch("switches", _switches, _put_switches, _named_switches),
    Watch("autocast", _autocast, _put_autocast),
    Watch("flushing of subnormal numbers", _flushes, torch.set_flush_denormal),
    Watch("number of threads", torch.get_num_threads, torch.set_num_threads),
    Watch("hooks on every module", lambda: tuple(dict(vars(nn_module)[n]) for n in HOOKS), _put_hooks),
)

MODES = Watch("torch modes", _modes, _put_modes)
"""Put back before everything else: an entered mode changes what later entries do."""
