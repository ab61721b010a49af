"""What Triton's interpreter lacked is judged, and a kernel that fails in it is no limit of it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from parity.implementations.implementation import Implementation
from parity.implementations.user import from_function
from parity.registry import family, run_case, select

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: there is a GPU")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("id", "settings"),
    [("liger.kl_div", {"beta": 0.0}), ("liger.fused_linear_cross_entropy", {"softcap": 5.0, "bias": "random"})],
)
def test_float_arguments_and_tanh_are_there(id, settings, dtype):
    """Both of these calls ended in the interpreter: neither was judged on a CPU."""
    (candidate,) = select([id])
    case = family(candidate.family).case(3, dtype, {"B": 2, "T": 3, "V": 11, "H": 4} | settings)
    rows = {row.quantity: row for row in run_case(case, [candidate])}
    assert {row.verdict for row in rows.values()} == {"agree"} and "grad_weight" in rows, rows


@triton.jit
def _needs(x_ptr, n: tl.constexpr, lacks: tl.constexpr):
    if lacks:
        x = tl.inline_asm_elementwise("", "=r,r", [tl.load(x_ptr)], tl.float32, True, 1)
    elif n:
        x = tl.max(tl.load(x_ptr + tl.arange(0, n)), axis=1)
    tl.store(x_ptr, x)


@pytest.mark.parametrize(
    ("n", "lacks", "verdict"), [(0, True, "unsupported"), (0, False, "crashed"), (4, False, "crashed")]
)
def test_a_kernel_that_fails_in_the_interpreter_has_crashed(n, lacks, verdict):
    """An unbound name, an axis that is not there: a compiler refuses both. Such a kernel passed, as a limit."""

    def call(x):
        _needs[(1,)](torch.zeros(8), n, lacks)

    one = Implementation("wrong", "logprobs", "candidate", call, interpreted=True)
    (row,) = run_case(family("logprobs").case(3, "fp32", {"V": 5}), [one])
    assert row.verdict == verdict and (lacks or row.message.endswith(" _needs")), row


@triton.jit
def _capped(x_ptr, n: tl.constexpr, cap):
    at = tl.arange(0, n)
    tl.store(x_ptr + at, libdevice.tanh(tl.load(x_ptr + at) / cap) * cap)


@triton.jit
def _scaled(x_ptr, n: tl.constexpr, scale):
    at = tl.arange(0, n)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * scale.to(tl.float32))


@pytest.mark.parametrize(("kernel", "verdicts"), [(_capped, {"unsupported"}), (_scaled, {"agree"})])
def test_a_users_kernel_has_float_arguments_and_lacks_libdevice(kernel, verdicts):
    """A stub of libdevice gives None: the kernel failed behind it, and was called crashed."""

    def own(hidden, weight, ids):
        kernel[(1,)](torch.zeros(8), 8, 0.5)
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    one = from_function(own, "mine.py:own", [family("logprobs")])
    rows = run_case(family("logprobs").case(3, "fp32", {"V": 5}), [one])
    assert {row.verdict for row in rows} == verdicts
