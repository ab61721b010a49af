"""Compiles cut-cross-entropy's locked addition for an H100, with or without a GPU, and prints in which order it works.

One letter an instruction: c takes the lock, l loads, s stores, | waits for all threads, x releases the lock. One thread
releases for all: without a wait between s and x another program may take the lock before every store is done.
"""

import re

import triton
import triton.language as tl
from cut_cross_entropy.tl_utils import tl_lock_add
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LETTERS = {"bar.sync": "|", "cas": "c", "exch": "x", "ld.global": "l", "st.global": "s"}


@triton.jit
def locked(memory, values, lock, n: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles no other annotation
    """memory += values, under the lock."""
    i = tl.arange(0, n)
    tl_lock_add(memory + i, tl.load(values + i), i < n, lock)


def main() -> int:
    """Print the letters, those of the last lock."""
    types = {"memory": "*bf16", "values": "*bf16", "lock": "*i32", "n": "constexpr"}
    made = triton.compile(ASTSource(locked, types, {"n": 1024}), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    found = re.findall(r"(bar\.sync)|atom\.\S*(cas|exch)|(ld\.global|st\.global)", made)
    print("".join(LETTERS["".join(one)] for one in found))
    return 0
