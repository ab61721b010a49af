"""Where two runs of a trainer first differ: the first module whose output in the first micro-batch is not the same."""

import functools
from typing import Any

import torch
from torch import Tensor

from parity.trainers.rig import recorder

ALIKE = 1e-4
"""Largest relative difference of two float32 outputs that rounding explains: 2⁻²⁴ times the length of the model's sums."""

Outputs = list[tuple[str, Tensor]]


def outputs(trainer: Any) -> Outputs:
    """The name and output of every module in order of completion, first forward pass of the policy with gradients."""
    found: Outputs = []
    handles = [m.register_forward_hook(functools.partial(_keep, found, n)) for n, m in trainer.model.named_modules()]
    try:
        recorder.train(trainer)
    finally:
        for handle in handles:
            handle.remove()
    end = next((i for i, (name, _) in enumerate(found) if name == ""), len(found))
    return found[:end]


def _keep(found: Outputs, name: str, module: Any, args: Any, output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    if torch.is_grad_enabled() and torch.is_tensor(value) and value.is_floating_point():
        found.append((name, value.detach()))
    elif torch.is_grad_enabled() and name == "":
        found.append((name, torch.zeros(())))


def description(first: Outputs, second: Outputs) -> str:
    """The first output that differs between the plain run and its twin, or that none does."""
    for (name, a), (other, b) in zip(first, second, strict=False):
        if name != other:
            return f"the runs part at {name}, where the twin calls {other}"
        if a.shape != b.shape:
            return f"the runs part at {name} by their padding: {tuple(a.shape)} and {tuple(b.shape)}"
        error = float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-300))
        if not error <= ALIKE:
            return f"the runs part at {name} (relative difference {error:.3g})"
    return (
        "the forward passes of the first micro-batch agree: the runs part behind the model, in the loss or the backward"
    )
