"""A case's tensors as lines of a stand-alone script."""

import math
import textwrap

import torch

WIDTH = 120


def wrapped(line: str) -> list[str]:
    """A line of code of at most 120 columns, broken at spaces inside its brackets."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def assigned(name: str, tensor: torch.Tensor) -> list[str]:
    """Lines that give `name` the tensor's bits and strides."""
    lines = wrapped(f"{name} = {literal(tensor)}")
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if (offset or not tensor.is_contiguous()) and tensor.numel():
        span = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        index = ", ".join(":1" if step == 0 else ":" for step in strides)
        sizes = tuple(1 if step == 0 else n for n, step in zip(shape, strides, strict=True))
        memory = f"torch.zeros({span}, dtype={tensor.dtype}).as_strided({sizes}, {strides}, {offset})"
        lines += wrapped(f"{name} = {memory}.copy_({name}[{index or '...'}]).expand({shape})")
    return lines


def literal(tensor: torch.Tensor) -> str:
    """An expression that makes the tensor's values."""
    values = [number(v, tensor.dtype) for v in tensor.flatten().tolist()]
    if len(set(values)) == 1 < len(values):
        return f"torch.full({tuple(tensor.shape)}, {values[0]}, dtype={tensor.dtype})"
    if not tensor.dim():
        return f"torch.tensor({values[0]}, dtype={tensor.dtype})"
    view = "" if tensor.dim() == 1 else f".view({', '.join(map(str, tensor.shape))})"
    return f"torch.tensor([{', '.join(values)}], dtype={tensor.dtype}){view}"


def number(value: float, dtype: torch.dtype) -> str:
    """The shortest decimal that `dtype` rounds to `value`."""
    if not dtype.is_floating_point or not math.isfinite(value):
        return str(value)
    if value == 0:
        return "-0.0" if math.copysign(1.0, value) < 0 else "0"
    for digits in range(1, 17):
        text = f"{value:.{digits}g}"
        if torch.tensor(float(text), dtype=dtype).item() == value:
            return text
    return repr(value)
