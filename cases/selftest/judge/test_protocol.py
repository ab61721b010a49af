"""The protocol of calls: what breaks it is named in one sentence, and right code of many kinds holds it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cases.selftest.mutants.steps import through
from parity.testing import PROTOCOL, assert_parity, check_parity

X = {"x": torch.linspace(-2, 3, 24).reshape(4, 6), "w": torch.linspace(0.5, 1.5, 6)}


def definition(x, w):
    return x.sin() * w


class Product(torch.autograd.Function):
    """x·w with a backward that a subclass changes."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class KeepsWorkspace(Product):
    """One buffer for the backward of all calls."""

    kept = torch.empty(4, 6)

    @staticmethod
    def forward(ctx, x, w):
        KeepsWorkspace.kept.copy_(x)
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], (g * KeepsWorkspace.kept).sum(0)


class KeepsGradient(Product):
    """One buffer for the gradient of all calls."""

    kept = torch.empty(6)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, KeepsGradient.kept.copy_((g * x).sum(0)).data


class MultipliesSaved(Product):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dw = (x.detach().data.mul_(g) if ctx.needs_input_grad[1] else x).sum(0)
        return g * w, dw


def by(function):
    return lambda: lambda x, w: function.apply(x.sin(), w)


def by_address():
    cache = {}

    def call(x, w):
        if w.data_ptr() not in cache:
            cache[w.data_ptr()] = w.detach().clone()
        return x.sin() * (w + (cache[w.data_ptr()] - w).detach())

    return call


def by_version():
    cache = {}

    def call(x, w):
        key = (id(w), w._version)
        if key not in cache:
            cache[key] = w.detach().clone(), w
        return x.sin() * (w + (cache[key][0] - w).detach())

    return call


def ring_of_three():
    ring, calls = [torch.empty(4, 6) for _ in range(3)], [0]

    class Ring(Product):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            calls[0] += 1
            return ring[calls[0] % 3].data.copy_(x * w)

    return lambda x, w: Ring.apply(x.sin(), w)


def hides_a_small_nan():
    """As where the parts of a sum are added by functions that drop a NaN: only where the gradient is large does it show."""
    slope = (X["x"].cos() * X["w"]).abs()
    return lambda x, w: torch.where(x.isnan() & (slope < 0.5 * slope.max()).to(x.device), 0.0, x).sin() * w


def last_bit():
    calls = [0]

    def call(x, w):
        calls[0] += 1
        return x.sin() * w * (1 + calls[0] % 2 * 2**-23)

    return call


def with_upstream(edit):
    """Right, but for what `edit` does with the upstream gradient."""
    return lambda: lambda x, w: through(definition(x, w), edit)


def otherwise_without_gradients(other):
    return lambda: lambda x, w: definition(x, w) if torch.is_grad_enabled() else other(x, w)


def kept(recorded):
    """Without gradients, what the last call with them gave, or the first without."""

    def make():
        last = {}

        def call(x, w):
            out = x.sin() * w
            if torch.is_grad_enabled():
                last.update({True: out} if recorded else {})
                return out
            return last.setdefault(recorded, out).detach()

        return call

    return make


def deeper(x, w):
    return deeper(x, w)


def overwrites():
    def call(x, w):
        out = x.sin() * w.clone()
        w.data.mul_(2)
        return out

    return call


def refuses_checkpoint():
    """Where the forward is recorded twice with other values of a flag, as a kernel that looks at is_grad_enabled does."""
    calls = [0]

    def call(x, w):
        calls[0] += 1
        return x.sin() * w if calls[0] % 2 else (x.sin() * w).relu()

    return call


def seeds():
    def call(x, w):
        torch.manual_seed(0)
        torch.rand(())
        return definition(x, w)

    return call


UNRECORDED = "no_grad: under no_grad the outputs differ from those with gradients"
FAULTS = {
    "inputs": (overwrites, "input w was changed in place"),
    "upstream": (
        with_upstream(lambda g: (g.clone(), g.zero_())[0]),
        "upstream gradient of output was changed in place",
    ),
    "bits": (last_bit, "bits: output has other bits in a second call"),
    "seeds": (seeds, "bits: the call seeds torch's random numbers"),
    "accumulation": (by(MultipliesSaved), "does not add the same gradient"),
    "interleaved": (by(KeepsWorkspace), "interleaved: grad_w differs when another forward comes before its backward"),
    "address": (by_address, "output differs when called again after other values in the same tensors"),
    "version": (by_version, "other values in the same tensors, which .data exchanged"),
    "ring": (ring_of_three, "output that an earlier call returned is changed by a later one"),
    "gradient": (by(KeepsGradient), "grad_w that an earlier call returned is changed by a later one"),
    "nan": (lambda: lambda x, w: x.nan_to_num(0.0).sin() * w, "nan: a NaN in x is not seen in output"),
    "small nan": (hides_a_small_nan, "nan: a NaN in x is not seen in output"),
    "second nan": (lambda: lambda x, w: x.sin() * w.nan_to_num(0.0), "nan: a NaN in w is not seen in output"),
    "upstream nan": (with_upstream(lambda g: g.nan_to_num(0.0)), "nan: NaN upstream is not seen in the gradient of x"),
    "default dtype": (
        lambda: lambda x, w: x.sin() @ torch.eye(6) * w,
        "default dtype: the call fails, RuntimeError: expected m1 and m2 to have the same",
    ),
    "no_grad": (otherwise_without_gradients(lambda x, w: x.sin()), UNRECORDED),
    "another dtype": (otherwise_without_gradients(lambda x, w: definition(x, w).bfloat16()), UNRECORDED),
    "unasked": (lambda: lambda x, w: definition(x, w) * (1 if x.requires_grad or w.requires_grad else 2), UNRECORDED),
    "kept": (kept(True), UNRECORDED),
    "kept without": (kept(False), UNRECORDED),
    "crash": (otherwise_without_gradients(lambda x, w: 1 / 0), "no_grad: the call fails, ZeroDivisionError"),
    "recursion": (otherwise_without_gradients(deeper), "no_grad: the call fails, RecursionError"),
    "upstream layout": (
        with_upstream(lambda g: torch.as_strided(g, g.shape, (g.shape[1], 1))),
        "its upstream gradient not contiguous, has inf times the allowed error",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    make, said = FAULTS[name]
    part = "nan" if name.endswith("nan") else name
    asked = (part,) if part in ("nan", "default dtype") else "default"
    parity = check_parity(make(), definition, X, protocol=asked)
    assert any(said in line for line in parity.protocol), parity.protocol
    assert not parity.wrong and "breaks the protocol" in parity.message and said in parity.message
    assert check_parity(make(), definition, X, protocol="none").agrees


def test_a_nan_that_the_definition_hides_in_one_input_shows_in_the_others():
    def masked(x, w):
        return x.sin() * torch.where(w > 0, w, 0.0)

    def hides(x, w):
        return x.nan_to_num(0.0).sin() * torch.where(w > 0, w, 0.0)

    assert check_parity(masked, masked, X, protocol=("nan",)).agrees
    assert "a NaN in x is not seen" in check_parity(hides, masked, X, protocol=("nan",)).message


def test_a_nan_upstream_that_the_definition_hides_says_nothing():
    swallowed = with_upstream(lambda g: g.nan_to_num(0.0))()
    assert check_parity(swallowed, swallowed, X, protocol=("nan",)).agrees


def test_what_is_kept_by_address_shows_wherever_an_allocator_puts_the_next_call():
    """A quarter of these calls passed, whose tensors lay where an earlier call on the same values had left its own."""
    sizes = range(203, 400, 7)
    inputs = ({"x": torch.linspace(-2, 3, 4 * n).reshape(4, n), "w": torch.linspace(0.5, 1.5, n)} for n in sizes)
    assert not any(check_parity(by_address(), definition, x).agrees for x in inputs)


def test_checkpoints_and_the_compiler_are_asked_with_all():
    recomputed = []

    def once(x, w):
        recomputed.append(x)
        return x.sin() * w if len(recomputed) < 2 or torch.is_grad_enabled() else x.sin() * w * 2

    assert check_parity(by(Product)(), definition, X, protocol="all").agrees
    twice = check_parity(once, definition, X, protocol=("reentrant checkpoint",))
    assert twice.protocol == ("reentrant checkpoint: output differs",)
    assert check_parity(refuses_checkpoint(), definition, X, protocol="checkpoint").protocol
    compiled = lambda x, w: x.sin() * w * (2 if torch.compiler.is_compiling() else 1)  # noqa: E731
    assert check_parity(compiled, definition, X, protocol="compile").protocol[0] == "compile: output differs"


def test_bits_may_be_left_out():
    """As a kernel with atomic additions does: its other calls are judged by the definition."""
    names = [n for n in PROTOCOL if n != "bits"]
    assert_parity(last_bit(), definition, X, protocol=names)
    with pytest.raises(ValueError, match="protocol='bit'"):
        check_parity(definition, definition, X, protocol="bit")


HONEST = {
    "a view of its input": (lambda x, w: x.view(6, 4), {}),
    "the input itself": (lambda x, w: x, {}),
    "a tuple with integers": (lambda x, w: (x.argmax(-1), x @ w), {}),
    "without gradients": (definition, {"grad": ()}),
    "another way without gradients": (
        lambda x, w: x.sin() * w if torch.is_grad_enabled() else (x.double().sin() * w.double()).float(),
        {"definition": definition},
    ),
    "a loss": (lambda x, w: F.cross_entropy(x * w, torch.tensor([0, 5, 2, 2])), {}),
    "an unused weight": (lambda x, w: x.exp(), {}),
    "what it may overwrite": (lambda x, w: x.mul_(2) * w, {"in_place": ("x",), "definition": lambda x, w: 2 * x * w}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_right_code_holds_it(name, dtype):
    function, more = HONEST[name]
    wide = lambda x, w: tuple_of(function(x.float(), w.float()), dtype)  # noqa: E731
    given = {n: t.to(dtype) for n, t in X.items()}
    right = function if dtype == torch.float32 or "in_place" in more else wide
    arguments = {"definition": function} | more
    assert_parity(right, arguments.pop("definition"), given, protocol="all", **arguments)


def test_what_is_for_training_alone_may_say_so():
    def refuses(x, w):
        raise RuntimeError("for training alone")

    assert_parity(otherwise_without_gradients(refuses)(), definition, X)


def tuple_of(out, dtype):
    parts = tuple(o.to(dtype) if o.is_floating_point() else o for o in (out if isinstance(out, tuple) else (out,)))
    return parts if isinstance(out, tuple) else parts[0]


def test_other_values_are_as_valid_as_the_given_ones():
    """What a kernel demands of its inputs, that rows sum to 1 or a mask is 0 or 1, holds of those that the protocol makes."""

    def demanding(p, mask):
        assert bool((p.sum(-1) - 1).abs().max() < 1e-5) and set(mask.flatten().tolist()) <= {0.0, 1.0}
        return p * mask

    p = torch.linspace(-2, 3, 6).softmax(-1)[None]
    for mask in (torch.ones(1, 6), torch.zeros(()), (torch.arange(6) % 2).float()):
        assert_parity(demanding, lambda p, mask: p * mask, {"p": p, "mask": mask}, grad=("p",))


@pytest.mark.parametrize("view", [lambda x: x[:, ::3], lambda x: x.T, lambda x: x[:1].expand(4, 12), lambda x: x[0]])
def test_views_are_written_over_as_they_lie(view):
    x = {"x": view(torch.linspace(-2, 3, 48).reshape(4, 12))}
    assert_parity(lambda x: x.sin(), lambda x: x.sin(), x)
    stale = {}
    wrong = lambda x: stale.setdefault((x.data_ptr(), x._version), (x.detach().clone(), x))[0].sin()  # noqa: E731
    assert check_parity(wrong, lambda x: x.sin(), x, grad=()).protocol


def by_shape(kept, key, make):
    """What is kept by `key`, made at the first call."""
    return kept[key] if key in kept else kept.setdefault(key, make())


LARGEST = lambda x: x.detach().abs().amax(-1, keepdim=True)  # noqa: E731


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda kept, x: x / by_shape(kept, x.shape, lambda: LARGEST(x)), lambda x: x / LARGEST(x)),
        (lambda kept, x: 2 * x - by_shape(kept, 0, lambda: x.detach().clone()), lambda x: 2 * x - x.detach()),
        (lambda kept, x: through(2 * x, lambda g: by_shape(kept, g.shape, g.clone)), lambda x: 2 * x),
    ],
    ids=["scale by shape", "first values for ever", "upstream gradient by shape"],
)
def test_a_later_call_on_other_values_is_judged(function, exact):
    kept: dict = {}
    found = check_parity(lambda x: function(kept, x), exact, {"x": torch.randn(8, 32)})
    assert found.protocol and all("of a later call on other values" in line for line in found.protocol)
    assert not found.agrees
    assert check_parity(exact, exact, {"x": torch.randn(8, 32)}).agrees


def test_an_upstream_gradient_of_one_value_a_row_is_not_one_of_all():
    one = lambda x: through(2 * x, lambda g: g if g.stride()[-1] else g.flatten()[0].expand_as(g))  # noqa: E731
    found = check_parity(one, lambda x: 2 * x, {"x": torch.randn(8, 32)})
    assert "its upstream gradient not contiguous" in " ".join(found.protocol)


@pytest.mark.parametrize("flat", [lambda x: 3 * x.softmax(-1), lambda x: F.group_norm(x, 4)])
def test_a_gradient_that_cancels_under_equal_values_is_not_asked(flat):
    assert not any(check_parity(flat, flat, {"x": torch.randn(8, 256).bfloat16()}, seed=n).protocol for n in range(3))


@pytest.mark.parametrize("cotangent", [None, "ones"])
def test_a_later_output_may_have_another_shape(cotangent):
    x = torch.linspace(-1, 1, 30).view(5, 6)
    positive = lambda x, kept: x[kept & (x > 0)].exp()  # noqa: E731
    kept = torch.arange(30).view(5, 6) % 7 > 4
    assert_parity(positive, positive, {"x": x, "kept": kept}, cotangent=cotangent)


class Checkpointed(torch.nn.Module):
    """tanh(x·Wᵀ + b)·wᵀ, whose backward computes it again."""

    def __init__(self, way=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.way = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False), way
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=generator)

    def computed(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self.computed(x) if self.way is None else self.way(self.computed, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_computes_again_in_its_backward_finds_the_parameters_of_its_forward(reentrant):
    way = functools.partial(checkpoint, use_reentrant=reentrant)
    module = Checkpointed(way)
    assert_parity(module, Checkpointed(), {"x": X["x"]})
    assert all(parameter.grad is None for parameter in module.parameters())
    assert str(check_parity(module, Checkpointed(), {"x": X["x"]})).startswith("Checkpointed agrees")
