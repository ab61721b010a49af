"""What Triton's interpreter is given for speed computes what it computes by itself; what it lacked is judged; and a kernel that
fails in it is no limit of it."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

from parity.implementations.implementation import Implementation
from parity.implementations.interpreter import faster, reducing_at_once
from parity.implementations.user import from_function
from parity.registry import family, run_case, select

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles: there is a GPU")


@triton.jit
def every(a, b):
    return a & b


@triton.jit
def _all_below(x_ptr, y_ptr, limit, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :])
    below = x < limit
    tl.store(y_ptr, tl.reduce(below, None, every))
    tl.store(y_ptr + 1 + tl.arange(0, n), tl.reduce(below, 1, every))


def _found(x, limit):
    y = torch.full((17,), -1, dtype=torch.int32)
    _all_below[(1,)](x, y, limit, 16)
    return y.tolist()


def test_an_and_of_a_whole_block_is_that_of_its_entries_one_by_one(monkeypatch):
    x = torch.arange(256, dtype=torch.float32).view(16, 16)
    monkeypatch.setattr(ReduceOps, "apply_impl", ReduceOps.apply_impl)  # put back afterwards
    slow, called = ReduceOps.generic_reduce, []

    def counted(self, given):
        called.append(self.axis)
        return slow(self, given)

    monkeypatch.setattr(ReduceOps, "generic_reduce", counted)
    limits = (0.0, 100.0, 255.0, 256.0)
    one_by_one = [_found(x, limit) for limit in limits]
    assert called.count(None) == 4 and [row[0] for row in one_by_one] == [0, 0, 0, 1]
    called.clear()
    reducing_at_once.__wrapped__(every)
    assert [_found(x, limit) for limit in limits] == one_by_one
    assert called == [1, 1, 1, 1]


@triton.jit
def _product(x_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * tl.load(x_ptr + at))


def test_a_product_of_integers_is_computed_once_and_overflows_as_before(monkeypatch):
    builder, made = interpreter.interpreter_builder, []
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
    monkeypatch.setattr(interpreter, "_patch_builtin", interpreter._patch_builtin)
    own = type(builder).create_mul
    monkeypatch.setattr(type(builder), "create_mul", lambda *args: made.append(1) or own(*args))
    found = []
    for change in (lambda: None, faster.__wrapped__):
        change()
        made.clear()
        x = torch.tensor([3, 1 << 16, -(1 << 20), 7], dtype=torch.int32)
        _product[(1,)](x, 4)
        found.append((x.tolist(), len(made)))
    assert found == [([9, 0, 0, 49], 2), ([9, 0, 0, 49], 1)]


def test_the_same_functions_of_triton_are_exchanged_and_put_back(monkeypatch):
    def exchanged():
        scopes = [
            interpreter._patch_lang(_all_below.fn),
            interpreter._patch_lang(_all_below.fn),
        ]  # a kernel in a kernel
        found = [[(one, name) for one, name, _ in scope._changes] for scope in scopes]
        for scope in reversed(scopes):
            scope.restore()
        return found, [vars(tl)[name] for name in ("arange", "load", "exp")], vars(tl.tensor)["__add__"]

    monkeypatch.setattr(interpreter, "_patch_builtin", interpreter._patch_builtin)  # put back afterwards
    by_members = exchanged()
    faster.__wrapped__()
    assert interpreter._patch_builtin.__module__ == "parity.implementations.interpreter"
    assert exchanged() == by_members and len(by_members[0][0]) > 100 > len(by_members[0][1])


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
