"""A case's tensors as lines of a stand-alone script: literals, or where these are long `parity.case.case`'s index hash."""

import hashlib
import math
import textwrap
from types import SimpleNamespace

import torch

from parity.case.case import Case, normal
from parity.case.inputs import Inputs

WIDTH = 120
LITERAL = 6
"""Lines of a literal that a call of the hash is not preferred to."""
NORMAL = """\
def normal(key, *shape):  # a counter-based hash: splitmix64 of (key, i, j, ...), as a bell-shaped number
    h = torch.tensor(key)
    for n in shape:
        h = h[..., None] - torch.arange(1, n + 1) * 7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            h = (h ^ (h >> shift & (1 << 64 - shift) - 1)) * factor
    return (sum(h >> k & 0x3FFF for k in (0, 16, 32, 48)) - 32766).double() * 115 / 2**20
"""
"""`parity.case.case.normal` in torch's wrapping int64 arithmetic."""


def wrapped(line: str) -> list[str]:
    """A line of code of at most 120 columns, broken at spaces inside its brackets."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def assigned(name: str, tensor: torch.Tensor, inputs: Inputs) -> list[str]:
    """Lines that give `name` the tensor's bits and strides."""
    lines = wrapped(f"{name} = {literal(tensor)}")
    if len(lines) > LITERAL:
        lines = _hashed(name, tensor, inputs) or lines
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


def _hashed(name: str, tensor: torch.Tensor, inputs: Inputs) -> list[str]:
    """The line that makes the tensor by the hash, if that gives its bits (what is derived or recorded has no hash)."""
    case, s = inputs.case, inputs.settings
    label, factor = name, _factors(case, s).get(name, 1.0)
    narrow = "" if not name.startswith("cotangent_") else ".bfloat16().double()"
    if narrow:
        label, factor = f"cotangent/{name.removeprefix('cotangent_')}", _factors(case, s)["cotangent"]
    value = normal(case.seed, label, tensor.shape)
    value = (value.bfloat16().double() if narrow else value) * factor
    if not torch.equal(value.to(tensor.dtype), tensor):
        return []
    digest = hashlib.blake2b(f"{case.seed}/{label}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    shape = ", ".join(map(str, tensor.shape))
    return [f"{name} = (normal({key}, {shape}){narrow} * {factor!r}).to({tensor.dtype})"]


def _factors(case: Case, s: SimpleNamespace) -> dict[str, float]:
    """Tensor -> what the hash's numbers are multiplied by; a guess, which `_hashed` checks."""
    scaled = 1.0 if getattr(s, "cotangent", "") != "scaled" else 1024.0 if case.dtype == "fp16" else 65536.0
    peak = getattr(s, "peak", 1.0)
    return {"weight": peak / getattr(s, "H", 1) ** 0.5, "lora_b": peak / 2, "cotangent": scaled}
