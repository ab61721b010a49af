"""A case's tensors as lines of a stand-alone script: literals where they are small, else `parity.case.case`'s index hash."""

import hashlib
import math
import textwrap
from collections.abc import Callable
from types import SimpleNamespace

import torch

from parity.case.case import Case, normal, uniform
from parity.case.inputs import Inputs

WIDTH = 120
STYLES = ("decimal", "integer", "hash")
"""How values are written: as decimals, as multiples of the hash's grid (half as long in fp32), or by the hash."""
HASH_FROM = 2
"""Lines of literal from which style "hash" prefers a call."""

BITS = """\
def bits(key, *shape):  # a counter-based hash: splitmix64 of (key, i, j, ...)
    h = torch.tensor(key)
    for n in shape:
        h = h[..., None] - torch.arange(1, n + 1) * 7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            h = (h ^ (h >> shift & (1 << 64 - shift) - 1)) * factor
    return h
def normal(key, *shape):
    h = bits(key, *shape)
    return (sum(h >> k & 0x3FFF for k in (0, 16, 32, 48)) - 32766).double() * 115 / 2**20
"""
"""`parity.case.case.hashes` and `parity.case.case.normal` in torch's wrapping int64 arithmetic."""
UNIT = 115 / 2**20


def wrapped(line: str) -> list[str]:
    """A line of code of at most 120 columns, broken at spaces inside its brackets."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def helpers(lines: list[str]) -> list[str]:
    """The hash functions that the lines call, in one function where they only ask for bell-shaped values."""
    text = "\n".join(lines)
    if "normal(" not in text and "bits(" not in text:
        return []
    if "bits(" in text:
        return BITS.splitlines()
    head, *body = BITS.splitlines()
    return [head.replace("bits(", "normal("), *body[: body.index("    return h")], body[-1]]


def assigned(name: str, tensor: torch.Tensor, inputs: Inputs, style: str) -> list[str]:
    """Lines that give `name` the tensor's bits and strides."""
    lines = wrapped(f"{name} = {_constant(tensor) or _decimals(tensor)}") if tensor.numel() < 4000 else []
    if style != "decimal" and len(lines) != 1 and tensor.numel() < 4000:
        lines = _integers(name, tensor, inputs) or lines
    if style == "hash" and len(lines) != 1 and not 0 < len(lines) < HASH_FROM:
        lines = _hashed(name, tensor, inputs) or lines
    if not lines:
        return ["# too large to be written down" + " " * WIDTH]
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if (offset or not tensor.is_contiguous()) and tensor.numel():
        span = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        index = ", ".join(":1" if step == 0 else ":" for step in strides)
        sizes = tuple(1 if step == 0 else n for n, step in zip(shape, strides, strict=True))
        memory = f"torch.zeros({span}, dtype={tensor.dtype}).as_strided({sizes}, {strides}, {offset})"
        lines += wrapped(f"{name} = {memory}.copy_({name}[{index or '...'}]).expand({shape})")
    return lines


def _view(tensor: torch.Tensor) -> str:
    return "" if tensor.dim() == 1 else f".view({', '.join(map(str, tensor.shape))})"


def _decimals(tensor: torch.Tensor) -> str:
    values = ", ".join(number(v, tensor.dtype) for v in tensor.flatten().tolist())
    fractional = any(c in values for c in ".enf")
    implied = tensor.dtype == torch.int64 or (tensor.dtype == torch.float32 and fractional)
    dtype = "" if implied else f", dtype={tensor.dtype}"
    return f"torch.tensor({values}{dtype})" if tensor.dim() == 0 else f"torch.tensor([{values}]{dtype}){_view(tensor)}"


def _constant(tensor: torch.Tensor) -> str | None:
    if tensor.numel() < 2 or not bool((tensor == tensor.flatten()[0]).all()):
        return None
    value = number(tensor.flatten()[0].item(), tensor.dtype)
    return f"torch.full({tuple(tensor.shape)}, {value}, dtype={tensor.dtype})"


def _integers(name: str, tensor: torch.Tensor, inputs: Inputs) -> list[str] | None:
    """Multiples of the hash's grid, for the tensors that the hash makes, in fp32; multiples of 2⁻¹⁰ for log-probs."""
    if tensor.dtype != torch.float32 or tensor.dim() == 0:
        return None
    recipe = RECIPES.get(name)
    factor = recipe(inputs.case, inputs.settings, name)[0] if recipe else 1.0
    unit, scale = (UNIT, "115 / 2**20") if recipe else (2.0**-10, "2**-10")
    scale += f" * {factor!r}" if factor != 1.0 else ""
    if not bool(tensor.isfinite().all()):
        return None
    values = (tensor.double() / (unit * factor)).round().long()
    literal = f"torch.tensor([{', '.join(map(str, values.flatten().tolist()))}])"
    forms = [(f"{scale} * {{}}", ""), (f"({scale} * {{}}.double())", ".float()")]
    for form, tail in forms:
        if torch.equal(eval(form.format("values") + tail, {"values": values}), tensor):
            return wrapped(f"{name} = {form.format(literal)}{tail}{_view(tensor)}")
    return None


def number(value: float, dtype: torch.dtype) -> str:
    """The shortest decimal that `dtype` rounds to `value`."""
    if not dtype.is_floating_point or not math.isfinite(value):
        return str(int(value)) if math.isfinite(value) else str(value)
    if value == 0:
        return "-0.0" if math.copysign(1.0, value) < 0 else "0"
    for digits in range(1, 17):
        text = f"{value:.{digits}g}"
        if torch.tensor(float(text), dtype=dtype).item() == value:
            return text
    return repr(value)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hashed(name: str, tensor: torch.Tensor, inputs: Inputs) -> list[str] | None:
    """Lines that regenerate the tensor by hash, if they do so to the last bit (a recording's tensors have no hash)."""
    case, s = inputs.case, inputs.settings
    if name == "bias" and s.bias == "banned":
        return _banned(tensor, inputs)
    recipe = RECIPES.get(name)
    if recipe is None and name.startswith("cotangent_"):
        recipe = _cotangent
    if recipe is None:
        return None
    factor, label = recipe(case, s, name)
    value = normal(case.seed, label, tensor.shape)
    text = f"normal({_key(case.seed, label)}, {', '.join(map(str, tensor.shape))})"
    if label.startswith("cotangent/"):
        value, text = value.to(torch.bfloat16).double(), f"{text}.bfloat16().double()"
    value, text = value * factor, text if factor == 1.0 else f"{text} * {factor!r}"
    if not torch.equal(value.to(tensor.dtype), tensor):
        return None
    return [f"{name} = ({text}).to({tensor.dtype})"]


def _banned(bias: torch.Tensor, inputs: Inputs) -> list[str] | None:
    """A bias with -inf entries: those that a second hash names, but for the token ids of the case."""
    seed, size = inputs.case.seed, bias.numel()
    value = normal(seed, "bias", bias.shape).to(bias.dtype)
    chosen = uniform(seed, "banned", bias.shape) < 0.3
    banned = bias == -torch.inf
    if bool((banned & ~chosen).any()) or not torch.equal(value[~banned], bias[~banned]):
        return None
    kept = (chosen & ~banned).nonzero().flatten().tolist()
    return [
        f"bias = normal({_key(seed, 'bias')}, {size}).to({bias.dtype})",
        f"banned = (bits({_key(seed, 'banned')}, {size}) >> 40 & 0xFFFFFF) * 2**-24 < 0.3",
        *(wrapped(f"banned[{kept}] = False") if kept else []),
        "bias[banned] = -inf",
    ]


def _cotangent(case: Case, s: SimpleNamespace, name: str) -> tuple[float, str]:
    factor = 1.0 if s.cotangent != "scaled" else 1024.0 if case.dtype == "fp16" else 65536.0
    return factor, f"cotangent/{name.removeprefix('cotangent_')}"


RECIPES: dict[str, Callable[[Case, SimpleNamespace, str], tuple[float, str]]] = {
    "hidden": lambda case, s, name: (1.0, "hidden"),
    "weight": lambda case, s, name: (s.peak / s.H**0.5, "weight"),
    "bias": lambda case, s, name: (1.0, "bias"),
    "lora_b": lambda case, s, name: (s.peak / 2, "lora_b"),
}
"""Tensor -> factor and hash name of `parity.case.case.normal` that make it; checked against the tensor before use."""
