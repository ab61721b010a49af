"""Memory layouts: the same values elsewhere in memory, as views of larger tensors give them.

A gap holds what no reader may take for the value beside it: NaN, or another legal integer.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from parity.case.inputs import Inputs, Setting
from parity.judge.values import integers

KINDS = ("contiguous", "offset", "flat", "strided", "transposed", "expanded")
HIDDEN = Setting(
    "contiguous", "memory layout of the hidden states", ("contiguous", "strided", "transposed", "offset", "flat")
)
OTHERS = Setting(
    "contiguous",
    "memory layout of every other tensor and upstream gradient: offset as ids[:, 1:], flat a part of a buffer, "
    "expanded where values repeat, mixed each its own",
    (*KINDS, "mixed"),
)
DRAWN = ["contiguous"] * 6 + ["mixed"] * 3 + ["offset", "flat", "strided", "transposed", "expanded"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of `x` in the layout of one of `KINDS`; `x` itself where its shape or values do not allow it."""
    if layout == "strided":
        return torch.stack([x, _other(x)], -1)[..., 0]
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "offset" and x.dim():
        axis = min(x.dim() - 1, 1)
        return torch.cat([_other(x.narrow(axis, 0, 1)), x], axis).narrow(axis, 1, x.shape[axis])
    if layout == "flat" or (layout == "offset" and not x.dim()):
        return torch.cat([_other(x).flatten()[:1], x.flatten()])[min(x.numel(), 1) :].view(x.shape)
    if layout == "expanded":
        first = [x.narrow(d, 0, min(n, 1)) for d, n in enumerate(x.shape)]
        apart = tuple(slice(0, 1 if torch.equal(f.expand_as(x), x) else None) for f in first)
        return x[apart].clone().expand(x.shape)
    return x


def _other(x: Tensor) -> Tensor:
    """What stands in a gap: NaN, or an integer in [0, max x] that is not the value, where there is one."""
    if x.is_floating_point():
        return torch.full_like(x, torch.nan)
    largest = x.amax().clamp(min=0) if x.numel() else 0
    return torch.where(x == 0, largest, 0).to(x.dtype)


def arranged(inputs: Inputs) -> Inputs:
    """Inputs whose tensors beside the hidden states, and upstream gradients, have the layout of the setting `layouts`."""
    kind, seed = inputs.settings.layouts, inputs.case.seed

    def put(name: str, x: Tensor | None) -> Tensor | None:
        layout = KINDS[int(integers(seed, f"layout/{name}", (), len(KINDS)))] if kind == "mixed" else kind
        if layout == "expanded" and name in inputs.leaves:  # a leaf has memory for each entry
            layout = "flat"
        return x if x is None or name == "hidden" else laid_out(x, layout)

    if kind == "contiguous":
        return inputs
    cotangents = {n: put(f"d {n}", g) for n, g in inputs.cotangents.items()}
    out = inputs.replace(**{n: put(n, x) for n, x in inputs.tensors.items()})
    return dataclasses.replace(out, cotangents=cotangents)


def elsewhere(x: Tensor, **to: Any) -> Tensor:
    """`x.to(**to)` with strides, storage offset and gaps of `x`; `Tensor.to` compacts a view."""
    same = to.get("dtype", x.dtype) == x.dtype and torch.device(to.get("device", x.device)).type == x.device.type
    if same or not x.numel():
        return x if same else x.to(**to)
    return _memory(x).to(**to).as_strided(x.shape, x.stride(), x.storage_offset())


def like(values: Tensor, x: Tensor) -> Tensor:
    """Values in the memory layout of `x`, in memory of their own; as they are where they do not repeat as `x` does."""
    apart = tuple(slice(0, 1 if step == 0 else None) for step in x.stride())
    once = values[apart]
    if not x.numel() or (once.shape != x.shape and not torch.equal(once.expand(x.shape), values)):
        return values
    copied = _memory(x).clone().as_strided(x.shape, x.stride(), x.storage_offset())
    copied[apart].copy_(once)
    return copied


def _memory(x: Tensor) -> Tensor:
    """The entries in memory from the first of its storage to the last of `x`, gaps among them."""
    span = x.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((span,), (1,), 0)
