"""Compiles and runs one Triton kernel on CUDA; ends in 0 where that works. `parity.running.gpu.no_triton` starts it."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, y, n: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles no other annotation
    i = tl.arange(0, n)
    tl.store(y + i, 2 * tl.load(x + i))


def main(device: str = "cuda") -> int:
    """0 where the kernel gives what it should."""
    x = torch.ones(16, device=device)
    y = torch.empty_like(x)
    double[(1,)](x, y, 16)
    return int(not torch.equal(y.cpu(), torch.full((16,), 2.0)))
