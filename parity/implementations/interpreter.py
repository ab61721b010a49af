"""Replacements, in the Triton language, for libdevice functions that Triton's interpreter lacks; numbers as a compiled kernel
has them; and a faster reduction."""

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh x, from exp(-2|x|); odd, and exact to rounding away from 0 (a short series near it)."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    large = (1.0 - e) / (1.0 + e)
    square = a * a
    small = a * (1.0 - square * (0.33333333 - square * (0.13333333 - square * 0.05396825)))
    y = tl.where(a < 0.15, small, large)
    return tl.where(x < 0, -y, y)


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, with the rounding of 1 + x corrected (Kahan)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def rsqrt(x):
    """1/√x."""
    return 1.0 / tl.sqrt(x)


@triton.jit
def _to_bfloat16(x_ptr, y_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets).to(tl.bfloat16))


@functools.cache
def truncates_bfloat16() -> bool:
    """Whether the interpreter cuts float32 to bfloat16 instead of rounding it (3.9.0 does: 0.3 % low on average).
    Hardware rounds to nearest, so a kernel that stores bfloat16 cannot be judged there."""
    x = 1 + torch.arange(256, dtype=torch.float32) / 256 / 64
    y = torch.empty(256, dtype=torch.bfloat16)
    _to_bfloat16[(1,)](x, y, 256)
    return not torch.equal(y, x.bfloat16())


def completed() -> None:
    """The interpreter with all of this, which is done once; without effect on what is compiled."""
    if triton.knobs.runtime.interpret:
        faster()
        typed_floats()
        without_libdevice()


@functools.cache
def without_libdevice() -> None:
    """Have a function of libdevice fail where a kernel calls it: its stub gives None, at which the kernel fails further on,
    as if it were wrong."""
    from triton.language.extra import libdevice

    for stub in vars(libdevice).values():
        if inspect.isfunction(stub) and stub.__module__ == libdevice.__name__:
            stub.__code__ = _absent.__code__  # kernels have imported it by name


def _absent(*_: Any, **__: Any) -> None:
    raise NotImplementedError("Triton's interpreter has no libdevice")


@functools.cache
def faster() -> None:
    """Have the interpreter leave out what changes no result.

    It computes every sum and product of integers once more to see an overflow, which it tells only when it debugs. And at
    every call of a kernel it looks for the functions that it exchanges among all members of five modules and classes: here
    once, for their names do not change. Which of them are exchanged already is still asked.
    """
    from triton.runtime import interpreter

    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    original, core = getattr(interpreter, "_patch_builtin", None), tl.core
    if original is None:
        return
    found = [tl, core, core.tensor, tl.math, *filter(None, [getattr(core, "tensor_descriptor_base", None)])]
    known = {id(one): [name for name, member in inspect.getmembers(one) if core.is_builtin(member)] for one in found}

    def patch(one: Any, *rest: Any) -> None:
        if id(one) not in known:
            original(one, *rest)
        for name in known.get(id(one), ()):
            if core.is_builtin(member := getattr(one, name)):
                interpreter._patch_attr(one, name, member, *rest)

    interpreter._patch_builtin = patch


@functools.cache
def typed_floats() -> None:
    """Have the interpreter give a kernel its float arguments as float32 scalars, as its compiler does."""
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(given: Any) -> Any:
        if not isinstance(given, float):
            return convert(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = with_floats


@functools.cache
def reducing_at_once(combine: Any) -> None:
    """Have the interpreter reduce a whole block by `combine`, a bitwise "and", in numpy, as it does a sum or a maximum.
    Its own way calls `combine` for one entry after the other: seconds for the blocks of one backward pass. An "and" has
    one result in any order."""
    from triton.runtime import interpreter

    original = interpreter.ReduceOps.apply_impl

    def apply_impl(self: Any, given: Any) -> Any:
        if self.combine_fn is not combine or self.axis is not None or self.keep_dims:
            return original(self, given)
        return self.to_tensor(np.bitwise_and.reduce(given[0].handle.data, axis=None), given[0].dtype)

    interpreter.ReduceOps.apply_impl = apply_impl
