"""`device`, and on a CPU what Triton's interpreter (3.9.0) lacks: float arguments as float32, rsqrt and tanh."""

import importlib
import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
import numpy as np
import triton
import triton.language as tl

torch.manual_seed(0)


@triton.jit
def rsqrt(x):
    return 1.0 / tl.sqrt(x)


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = tl.abs(x) * (1.0 - square * (0.33333333 - square * (0.13333333 - square * 0.05396825)))
    y = tl.where(tl.abs(x) < 0.15, small, large)
    return tl.where(x < 0, -y, y)


if device == "cpu":
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(x):
        if isinstance(x, float):
            return tl.tensor(interpreter.TensorHandle(np.array([x], np.float32), tl.float32), tl.float32)
        return convert(x)

    interpreter._implicit_cvt = with_floats
    for name in ("geglu", "cross_entropy", "rms_norm", "layer_norm", "group_norm", "poly_norm"):
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        for function in (rsqrt, tanh):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
from liger_kernel.transformers import functional as functional
