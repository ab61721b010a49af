"""Stand-ins in the Triton language for libdevice functions that Triton's interpreter lacks."""

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
