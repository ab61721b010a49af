import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
import triton
import triton.language as tl
from cut_cross_entropy import linear_cross_entropy as linear_cross_entropy
from cut_cross_entropy import tl_utils


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def log1p(x):
    return tl.log(1.0 + x)


if device == "cpu":  # Triton's interpreter has neither
    tl_utils.tl_tanh, tl_utils.tl_log1p = tanh, log1p
torch.manual_seed(0)
