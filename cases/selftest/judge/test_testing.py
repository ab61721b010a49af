"""The judge for any function: right code agrees, wrong code does not, and what it cannot judge is refused by name."""

import dataclasses
import functools
import math
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cases.selftest.mutants.steps import through
from parity.judge import assertion
from parity.judge.oracle import Oracle
from parity.judge.problem import cotangent
from parity.judge.products import CutOperands
from parity.testing import EAGER, ParityError, Recipe, assert_parity, check_parity, definitions, stored, tolerance
from parity.testing.drawing import laid

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def fused_rms_norm(x, weight, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def attention(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def drawn(dtype, **shapes):
    generator = torch.Generator().manual_seed(5)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in shapes.items()}


X, W, QKV = (6, 96), (96,), {"q": (2, 5, 8), "k": (2, 7, 8), "v": (2, 7, 8)}
IDS = torch.tensor([3, 1, 3, 3, 0, 8, 3])


def by_torch(function):
    """torch's own operation is definition and function at once."""
    return function, function


ALIKE = {  # beside the operations of `operations.py`
    "log_softmax": (lambda x: x - x.logsumexp(-1, True), lambda x: F.log_softmax(x.float(), -1), {"x": X}),
    "logsumexp": (*by_torch(lambda x: torch.logsumexp(x, -1)), {"x": X}),
    "gelu": (lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)), lambda x: F.gelu(x), {"x": X}),
    "silu": (lambda x: x * torch.sigmoid(x), lambda x: F.silu(x), {"x": X}),
    "matmul": (lambda x, y: x @ y, lambda x, y: torch.einsum("ij,jk->ik", x, y), {"x": (5, 300), "y": (300, 4)}),
    "conv1d": (*by_torch(lambda x, w: F.conv1d(x, w)), {"x": (3, 4, 20), "w": (6, 4, 3)}),
    "grouped conv1d": (*by_torch(lambda x, w: F.conv1d(x, w, groups=2)), {"x": (3, 4, 20), "w": (6, 2, 3)}),
    "index_add": (*by_torch(lambda x: torch.zeros(9, 96).to(x).index_add(0, IDS[:6], x)), {"x": X}),
    "cumsum": (*by_torch(lambda x: x.cumsum(-1)), {"x": X}),
    "prod": (lambda x: x.prod(-1), lambda x: x.float().prod(-1), {"x": (6, 12)}),
    "in place": (
        lambda x: x.mul(2).add_(x.exp()).div_(3),
        lambda x: ((2 * x.float() + x.float().exp()) / 3).to(x.dtype),
        {"x": X},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALIKE)
def test_right_code_agrees(name, dtype):
    definition, function, shapes = ALIKE[name]
    for seed in range(3):
        assert_parity(function, definition, drawn(dtype, **shapes), seed=seed)


WRONG = {
    "eps": lambda x, weight: fused_rms_norm(x, weight, 1e-2),
    "n - 1": lambda x, weight: fused_rms_norm(x, weight) * (95 / 96) ** 0.5,
    "weight detached": lambda x, weight: fused_rms_norm(x, weight.detach()),
    "gradient doubled": lambda x, weight: fused_rms_norm(2 * x - x.detach(), weight),
    "last column": lambda x, weight: fused_rms_norm(x, torch.cat([weight[:-1], 1.05 * weight[-1:]])),
    "zeros": lambda x, weight: x * weight * 0,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_does_not(name, dtype):
    inputs = drawn(dtype, x=X, weight=W)
    with pytest.raises(ParityError, match="class    logic"):
        assert_parity(WRONG[name], rms_norm, inputs)


def test_an_upstream_gradient_that_is_ignored_shows_in_a_scalar():
    ignores = lambda x: through(x.mean(), torch.ones_like)  # noqa: E731
    parity = check_parity(ignores, lambda x: x.mean(), drawn(torch.float32, x=X))
    assert list(parity.wrong) == ["grad_x"] and parity.kind == "logic"


def test_a_failure_says_which_precision_would_explain_it_and_where_it_is():
    inputs = drawn(torch.bfloat16, x=(8, 256), weight=(256,))
    parity = check_parity(rms_norm, rms_norm, inputs)  # plain torch rounds every operation
    assert parity.kind == "precision" and parity.explained_by.startswith("Recipe(output='input', ")
    for recipe in (EAGER, eval(parity.explained_by)):
        assert_parity(rms_norm, rms_norm, inputs, recipe=recipe)
    doubled = check_parity(lambda x, weight: 2 * fused_rms_norm(x, weight), rms_norm, inputs)
    assert doubled.hints["output"][0].startswith("2 times the definition")
    assert "2 times the definition" in doubled.message
    zeros = check_parity(WRONG["zeros"], rms_norm, inputs)
    assert zeros.hints["output"] == ["all zero where the definition is not"]
    column = check_parity(WRONG["last column"], rms_norm, drawn(torch.float32, x=X, weight=W))
    assert any("nearly all at index 95 of dimension 1" in hint for hint in column.hints["output"])
    assert column.kind == "logic"


def test_a_failure_of_roundings_size_asks_for_another_formula():
    """A decayed sum by logarithms: in the definition the first decay meets a state of 0, and has a gradient of exactly 0."""

    def in_turn(x, a):
        state, out = torch.zeros_like(x[0]), []
        for i in range(len(x)):
            state = torch.sigmoid(a[i]) * state + x[i]
            out.append(state)
        return torch.stack(out)

    def by_logarithms(x, a):
        total = torch.nn.functional.logsigmoid(a).cumsum(0)
        decay = (total[:, None] - total).masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
        return (decay.exp() * x).sum(1)

    inputs = drawn(torch.float32, x=(24,), a=(24,))
    parity = check_parity(by_logarithms, in_turn, inputs)
    assert "another correct formula? also=" in parity.hints["grad_a"][-1] and parity.explained_by is None
    assert_parity(by_logarithms, in_turn, inputs, also=(by_logarithms,))


def powers_of_two(log2_e):
    """SiLU with e⁻ˣ = 2^(-x·log₂e), the product rounded to float32, as Triton's `tl.sigmoid` has it."""
    return lambda x: x / (1 + torch.exp2((-x * torch.tensor(log2_e)).double()).float())


@pytest.mark.parametrize("around", [0.0, -5.0, -20.0, -60.0])
def test_a_fast_exponential_agrees(around):
    torch.manual_seed(0)
    x = {"x": torch.randn(16, 1025) + around}
    assert_parity(powers_of_two(math.log2(math.e)), F.silu, x, grad=())
    assert_parity(
        lambda x: x * torch.exp2((x * torch.tensor(math.log2(math.e))).double()).float(),
        lambda x: x * x.exp(),
        x,
        grad=(),
    )
    with pytest.raises(ParityError):
        assert_parity(powers_of_two(1.442696 if around else 1.4427), F.silu, x | {"x": x["x"] - 1}, grad=())


def test_a_large_result_is_judged_within_its_memory(monkeypatch):
    """By no more replicas than hold so many entries together, of what is wrong alone; few of them explain it."""
    asked, draw = [], Oracle.replicas
    monkeypatch.setattr(assertion, "HELD", 1 << 17)
    monkeypatch.setattr(assertion, "ALL_QUANTITIES", 1 << 19)

    def drawn(self, recipe, count, finer=False, names=None):
        asked.append((count, finer, names))
        return draw(self, recipe, count, finer, names)

    monkeypatch.setattr(Oracle, "replicas", drawn)
    x = torch.randn(160, 128)
    wrong = lambda x: F.softmax(x, -1) * (1 + 2e-6 * x.detach().sign())  # noqa: E731
    assert not check_parity(wrong, lambda x: F.softmax(x, -1), {"x": x}, grad=()).agrees
    assert max(count for count, *_ in asked) == 12
    assert (12, False, None) in asked and any(finer and names == ["output"] for _, finer, names in asked), asked


def test_an_exponential_of_integers_and_booleans_is_rounded():
    for x in (torch.tensor([True, False, True]), torch.arange(3)):
        found = check_parity(lambda x: x.exp() * (1 + 1e-5), torch.exp, {"x": x})
        assert not found.agrees and found.quantities["output"].headroom > 10


def test_a_mistake_in_small_entries_is_placed_beside_a_large_one():
    x = torch.linspace(1, 2, 12).reshape(4, 3)
    x[0, 0] = 1e8
    doubled = lambda x: torch.cat([x[:, :1], 2 * x[:, 1:2], x[:, 2:]], 1)  # noqa: E731
    hints = check_parity(doubled, lambda x: x * 1.0, {"x": x}).hints["output"]
    assert any("index 1" in hint for hint in hints), hints


@pytest.mark.parametrize("products", ["tf32", "tf32-truncated"])
def test_tf32_products_are_named(products):
    """cuBLAS rounds operands; of `tl.dot` tensor cores truncate them."""

    def kernel(a, b):
        with CutOperands(products):
            return a @ b

    inputs = drawn(torch.float32, a=(65, 300), b=(300, 70))
    parity = check_parity(kernel, lambda a, b: a @ b, inputs, grad=())
    assert parity.kind == "precision" and not parity.agrees
    assert parity.explained_by == f"Recipe(matmul={products!r}, matmul_backward={products!r})"
    assert_parity(kernel, lambda a, b: a @ b, inputs, grad=(), recipe=eval(parity.explained_by))
    assert check_parity(lambda a, b: a[:, 1:] @ b[1:], lambda a, b: a @ b, inputs, grad=()).kind == "logic"


CAST = {
    "stored": lambda x, weight: (stored(x.exp()) - 1) * weight,
    "bf16": lambda x, weight: (x.float().exp().to(torch.bfloat16) - 1) * weight,
    "to": lambda x, weight: (x.float().exp().to(x.dtype) - 1) * weight,
    "type_as": lambda x, weight: (x.float().exp().type_as(x) - 1) * weight,
    "a branch": lambda x, weight: (x.exp().to(weight.dtype) - 1) * weight if weight.dtype == torch.bfloat16 else None,
    "nowhere": lambda x, weight: (x.exp() - 1) * weight,
    "of what is in that dtype": lambda x, weight: (x.to(weight.dtype).exp() - 1) * weight,
}


@pytest.mark.parametrize("form", CAST)
def test_stored_and_own_casts_say_where_an_implementation_may_keep_16_bits(form):
    """Casts back to the dtype of the inputs too, as transformers' norms have them. It may be more precise."""
    inputs = drawn(torch.bfloat16, x=(64, 64), weight=(64,))
    inputs["x"] = inputs["x"] / 64

    def kernel(x, weight, kept=torch.bfloat16):
        return ((x.float().exp().to(kept).float() - 1) * weight.float()).to(x.dtype)

    assert check_parity(kernel, CAST[form], inputs).agrees == (form not in ("nowhere", "of what is in that dtype"))
    assert_parity(functools.partial(kernel, kept=torch.float32), CAST[form], inputs)


KEPT = {
    "to": lambda x, weight: (x.exp().to(x.dtype) - 1) * weight,
    "through": lambda x, weight: ((x * 2 / 2).exp().to((x + weight).dtype) - 1) * weight,
    "type_as": lambda x, weight: (x.exp().type_as(torch.zeros_like(x)) - 1) * weight,
    "stored": lambda x, weight: (stored(x.exp()) - 1) * weight,
    "stored twice": lambda x, weight: (stored(torch.cat([stored(x), x]).exp())[:64] - 1) * weight,
}


@pytest.mark.parametrize("form", KEPT)
def test_each_input_has_a_dtype_of_its_own(form):
    """float32 beside bf16: what is kept in the dtype of the first is not kept in bf16."""
    inputs = {**drawn(torch.float32, x=(64, 64)), **drawn(torch.bfloat16, weight=(64,))}
    inputs["x"] = inputs["x"] / 64

    def kernel(x, weight, kept=torch.float32):
        return (x.exp().to(kept).float() - 1) * weight.float()

    narrow = functools.partial(kernel, kept=torch.bfloat16)
    assert_parity(kernel, KEPT[form], inputs)
    assert not check_parity(narrow, KEPT[form], inputs).agrees
    assert_parity(narrow, lambda x, weight: (x.exp().to((2 * weight).dtype) - 1) * weight, inputs)


WIDENED = {
    "float": lambda x, y: x.float(),
    "to": lambda x, y: x.to(torch.float32),
    "like": lambda x, y: x.to(y.dtype),
}


@pytest.mark.parametrize("form", WIDENED)
def test_what_is_cast_to_float32_is_not_kept_in_the_dtype_of_its_input(form):
    """Unless the definition says `stored`."""
    inputs = {**drawn(torch.bfloat16, x=(64, 64)), **drawn(torch.float32, y=(64,))}
    inputs["x"] = inputs["x"] / 64

    def definition(x, y):
        wide = WIDENED[form](x, y)
        return (wide.exp().to(wide.dtype) - 1) * y

    narrow = lambda x, y: (x.exp().float() - 1) * y  # noqa: E731
    assert_parity(lambda x, y: (x.float().exp() - 1) * y, definition, inputs)
    assert not check_parity(narrow, definition, inputs).agrees
    assert_parity(narrow, lambda x, y: (stored(WIDENED[form](x, y).exp()) - 1) * y, inputs)
    alone = lambda x, y: WIDENED[form](x, y).mul_(2) + x * y  # noqa: E731
    assert_parity(lambda x, y: x.float() * (2 + y), alone, inputs)


def test_trees_and_modules():
    def definition(pair, scale):
        return {"sum": pair["a"] + pair["b"][0] * scale, "both": (pair["a"].sin(), pair["b"][0].argmax(-1))}

    x = drawn(torch.float32, a=(4, 5), b=(4, 5))
    inputs = {"pair": {"a": x["a"], "b": [x["b"], None]}, "scale": 0.3}
    parity = check_parity(definition, definition, inputs)
    assert parity.agrees
    assert set(parity.quantities) == {"sum", "both[0]", "both[1]", "grad_pair.a", "grad_pair.b[0]"}

    def shifted(pair, scale):
        return definition(pair, scale) | {"both": (pair["a"].sin(), pair["b"][0].argmax(-1) + 1)}

    assert list(check_parity(shifted, definition, inputs).wrong) == ["both[1]"]

    layer, other = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    rows = drawn(torch.float32, input=(4, 6))
    assert set(check_parity(layer, other, rows).quantities) == {"output", "grad_input", "grad_weight", "grad_bias"}
    assert_parity(layer, lambda input, weight, bias: input @ weight.mT + bias, rows)
    assert layer.weight.grad is None


def test_values_that_a_caller_computed():
    x = drawn(torch.float32, x=X, weight=W)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    upstream = torch.randn(X)
    out = fused_rms_norm(**leaves)
    out.backward(upstream)
    actual = {"output": out.detach(), "grad_x": leaves["x"].grad, "grad_weight": leaves["weight"].grad}
    assert_parity(definition=rms_norm, inputs=x, actual=actual, cotangent=upstream)
    assert_parity(definition=rms_norm, inputs=x, actual={"output": out.detach()})
    with pytest.raises(ParityError):
        assert_parity(definition=rms_norm, inputs=x, actual=actual, cotangent=2 * upstream)
    with pytest.raises(ValueError, match="cotangent="):
        assert_parity(definition=rms_norm, inputs=x, actual=actual)


class SumInPlace(torch.autograd.Function):
    """x + y, also as y."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(y.add_(x))
        return y * 1.0, y

    @staticmethod
    def backward(ctx, first, second):
        return first + second, first + second


def test_an_input_in_uneven_memory_may_be_overwritten():
    inputs = {"x": drawn(torch.float32, x=X)["x"], "y": laid(drawn(torch.float32, y=X)["y"], "sliced")}
    both = lambda x, y: (x + y, x + y)  # noqa: E731
    assert_parity(lambda x, y: SumInPlace.apply(x, y), both, inputs, grad=("x",), in_place=("y",))


def test_an_upstream_gradient_that_is_overwritten_is_declared():
    inputs = drawn(torch.float32, x=X)
    in_place = lambda x: through(x.sin(), lambda g: g.mul_(2))  # noqa: E731
    definition = lambda x: 2 * x.sin() - x.sin().detach()  # noqa: E731
    parity = check_parity(in_place, definition, inputs)
    assert not parity.agrees and parity.protocol == ("upstream gradient of output was changed in place",)
    assert_parity(in_place, definition, inputs, in_place="grad_output")


class Scaled(torch.nn.Module):
    """With a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.weight, self.factors = torch.nn.Parameter(torch.eye(4)), torch.tensor([0.3, 1.0, 2.0])

    def forward(self, hidden):
        logits = F.linear(hidden, self.weight)[:, :3]
        return F.cross_entropy(logits, torch.tensor([0, 2, 1]), weight=self.factors), logits


@dataclasses.dataclass
class Returned:
    loss: torch.Tensor
    logits: torch.Tensor
    accuracy: torch.Tensor | None = None


def test_a_reference_of_other_tests_is_a_definition_as_it_is():
    class Renamed(Scaled):
        def forward(self, x):
            return Returned(*super().forward(x))

    class Wrong(Scaled):
        def forward(self, x):
            loss, logits = super().forward(x)
            return Returned(loss * 1.01, logits)

    inputs = drawn(torch.float32, hidden=(3, 4))
    quantities = {"output[0]", "output[1]", "grad_hidden", "grad_weight"}
    assert set(check_parity(Renamed(), Scaled(), inputs).quantities) == quantities
    assert_parity(Renamed(), Scaled(), inputs)
    assert "output[0]" in check_parity(Wrong(), Scaled(), inputs).wrong


def test_tolerances_let_right_code_pass_and_wrong_code_not():
    for dtype in DTYPES:
        inputs = drawn(dtype, x=(64, 96), weight=W)
        exact = rms_norm(**{n: t.double() for n, t in inputs.items()})
        atol, rtol = tolerance(rms_norm, inputs)["output"]
        torch.testing.assert_close(fused_rms_norm(**inputs).double(), exact, atol=atol, rtol=rtol)
        wrong = fused_rms_norm(inputs["x"], inputs["weight"], 1.0).double()
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, exact, atol=atol, rtol=rtol)


def test_a_recipe_whose_results_are_float32_says_how_to_allow_others():
    """The recipe that docs/testing.md names for `tl.dot`, declared for a kernel with bf16 results."""
    inputs = drawn(torch.bfloat16, x=X, w=(96, 4))

    def product(x, w):
        return (x.float() @ w.float()).to(x.dtype)

    found = check_parity(product, lambda x, w: x @ w, inputs, recipe=Recipe(matmul="tf32-truncated"))
    assert found.wrong["output"].message == "dtype bf16, expected fp32; Recipe(…, output='input') allows it"
    assert_parity(product, lambda x, w: x @ w, inputs, recipe=Recipe(matmul="tf32-truncated", output="input"))


@pytest.mark.parametrize(("interprets", "factor", "told"), [("1", 1.0, True), ("0", 1.0, False), ("1", 1.1, False)])
def test_a_result_that_triton_s_interpreter_may_have_truncated(monkeypatch, interprets, factor, told):
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    monkeypatch.setitem(sys.modules, "triton", sys)

    def truncated(x):
        return ((x.float().exp() * factor).view(torch.int32) & -0x10000).view(torch.float32).bfloat16()

    found = check_parity(truncated, torch.exp, drawn(torch.bfloat16, x=(32, 96)), grad=(), protocol="none")
    assert not found.agrees and any("truncates" in hint for hint in found.hints["output"]) == told


def test_a_tolerance_of_a_scalar():
    """A loss had none: a dimension was asked of it that it has not."""
    x = drawn(torch.float32, x=X)["x"]
    (atol, rtol), (of_x, _) = (tolerance(lambda x: x.square().mean(), {"x": x})[n] for n in ("output", "grad_x"))
    assert 0 < atol < 1e-5 and 0 < of_x < 1e-5 and rtol == 6 * 2.0**-24


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        (lambda x: torch.linalg.inv(x @ x.mT), "linalg_inv_ex"),
        (lambda x: torch.fft.rfft(x).abs(), "_fft_r2c"),
        (lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)))), "view_as_complex"),
    ],
)
def test_an_operation_without_a_rule_is_refused_by_name(definition, said):
    wrong = lambda x: definition(x) * 1.5  # noqa: E731
    with pytest.raises(NotImplementedError, match=said):
        check_parity(wrong, definition, drawn(torch.float32, x=X))


X1 = {"x": torch.ones(2, 3)}
TWICE = {"function": lambda x: 2 * x, "definition": lambda x: 2 * x, "inputs": X1}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"definition": None}, "definition and inputs"),
        ({"actual": {"output": X1["x"]}}, "not both"),
        ({"inputs": {"x": torch.ones(2, dtype=torch.float64)}}, "float64"),
        ({"definition": lambda x: float(x.sum())}, "the definition returns no tensor"),
        ({"definition": lambda x: x.mul_(2)}, "it overwrites one"),
        ({"definition": lambda x: X1["x"].clone().index_add_(0, torch.tensor([0]), x[:1])}, r"table.to\(x.dtype\)"),
        ({"definition": lambda x: stored(x, "nowhere")}, "the stages are"),
        ({"inputs": (X1["x"],)}, "inputs is a tuple"),
        ({"inputs": {0: X1["x"]}}, "inputs has the key 0: give the name"),
        ({"function": lambda y, z: 2 * y}, "has missing a required argument: 'z': wrap it in a lambda"),
        ({"definition": lambda x, /: 2 * x}, "called with the inputs by name"),
        ({"definition": lambda x: x * torch.rand(3)}, "the definition is random: output differs"),
        ({"inputs": {"x": X1["x"].numpy()}}, r"x is a ndarray: give torch.as_tensor\(x\)"),
        ({"inputs": {"x": torch.ones(2, dtype=torch.complex64)}}, "real and imaginary"),
        ({"inputs": {"x": {"a": X1["x"]}, "x.a": X1["x"]}}, "have one name: x.a"),
        ({"grad": "weight"}, "grad='weight': the floating-point inputs are x"),
        ({"in_place": ("y",)}, "in_place='y'"),
        ({"function": None, "actual": {"output": X1["x"], "grad_y": X1["x"]}}, "actual='grad_y'"),
        ({"function": None, "actual": {"output": 2.0}}, "output is a float: give a tensor"),
        ({"function": None, "actual": X1["x"]}, "actual is a Tensor"),
        ({"cotangent": torch.ones(3)}, r"cotangent of output has shape \(3,\): give \(2, 3\)"),
        ({"cotangent": 1.0}, "cotangent is a float"),
        ({"recipe": "bf16"}, "give EAGER"),
        ({"recipe": Recipe(elementwise="half")}, "elementwise='half'"),
    ],
)
def test_a_mistake_is_said_and_does_not_pass(changed, said):
    with pytest.raises(ValueError, match=said):
        check_parity(**TWICE | changed)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)])
def test_sizes_of_zero_and_one(shape):
    inputs = {"x": torch.ones(shape), "w": torch.ones(shape[1])}
    assert_parity(lambda x, w: x * w, lambda x, w: x * w, inputs)
    assert set(tolerance(lambda x, w: x * w, inputs)) == {"output", "grad_x", "grad_w"}
    assert set(tolerance(lambda x: x * 2, {"x": inputs["x"]})) == {"output", "grad_x"}
    assert not check_parity(lambda x: x.sum() + 1, lambda x: x.sum(), {"x": inputs["x"]}).agrees


def test_a_function_is_given_the_strides_of_the_inputs_and_of_the_upstream_gradient():
    seen = {}

    def double(x):
        seen["x"] = x.stride()
        return through(2 * x, lambda g: seen.update(grad=g.stride()) or g)

    x = drawn(torch.float32, x=(4, 12))["x"]
    for view in (x[:, ::3], x.T, x[:1].expand(4, 12), x[:, 3:6]):
        upstream = torch.ones(()).expand(view.shape)
        assert_parity(double, lambda x: 2 * x, {"x": view}, cotangent=upstream, protocol="none")
        assert seen == {"x": view.stride(), "grad": upstream.stride()}

    def forgets_strides(x):
        return 2 * torch.as_strided(x, x.shape, (x.shape[1], 1))

    assert not check_parity(forgets_strides, lambda x: 2 * x, {"x": x[:, 3:6]}, grad=()).agrees


def test_buffers_of_a_module_are_as_precise_as_its_parameters_and_stay_as_they_are():
    class Mixed(torch.nn.Module):
        def __init__(self, scale=1.0):
            super().__init__()
            self.register_buffer("mix", torch.eye(3) / 3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.weight, self.scale = torch.nn.Parameter(torch.ones(3)), scale

        def forward(self, x):
            self.calls += 1
            return x @ self.mix * self.weight * self.scale

    rows, module, definition = drawn(torch.float32, x=(4, 3)), Mixed(), Mixed()
    assert_parity(module, definition, rows)
    assert not check_parity(Mixed(1.01), definition, rows).agrees
    assert not module.calls and not definition.calls


def test_a_definition_that_overwrites_integers_has_its_own():
    inputs = drawn(torch.float32, x=X) | {"ids": torch.tensor([0, 1])}
    assert_parity(lambda x, ids: x[ids + 1], lambda x, ids: x[ids.add_(1)], inputs)
    assert inputs["ids"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "count",
    [
        lambda i: i.cumsum(0),
        lambda i: i.clone().cumsum_(0),
        lambda i: (i > 1).cumsum(0),
        lambda i: i.cumprod(0),
        lambda i: i.prod(),
        lambda i: i.dot(i),
        lambda i: torch.stack([i, i]) @ i,
        lambda i: 2**i,
    ],
)
def test_integers_are_not_rounded(count):
    ids = {"ids": torch.tensor([3, 1, 2, 3])}
    assert check_parity(count, count, ids).agrees
    assert check_parity(lambda ids: count(ids) + 1, count, ids).wrong["output"].gate == "exact"


def test_a_softmax_may_come_from_its_log_sum_exp():
    """As attention computes it backward, from what a flash kernel keeps of its forward pass."""
    inputs = {"x": drawn(torch.float32, x=(16, 96))["x"] + 30}
    softmax = lambda x: torch.softmax(x, -1)  # noqa: E731
    assert_parity(lambda x: (x - x.logsumexp(-1, True)).exp(), softmax, inputs)
    assert not check_parity(lambda x: softmax(1.0001 * x), softmax, inputs).agrees
    assert not check_parity(lambda x: softmax(x) * 1.0001, softmax, inputs).agrees
    heads = {n: x + 30 for n, x in drawn(torch.float32, q=(6, 6, 16), k=(6, 9, 16), v=(6, 9, 16)).items()}
    assert_parity(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), attention, heads)


def test_a_cumulative_sum_may_be_added_term_after_term():
    def in_turn(x):
        return torch.from_numpy(np.cumsum(x.numpy(), axis=-1, dtype=np.float32))

    inputs = {"x": drawn(torch.float32, x=(2, 4000))["x"].abs()}
    assert_parity(in_turn, lambda x: x.cumsum(-1), inputs, grad=())
    wrong = lambda x: x.cumsum(-1) + (torch.arange(4000) > 3990) * 1.0  # noqa: E731
    assert not check_parity(wrong, lambda x: x.cumsum(-1), inputs, grad=()).agrees


@pytest.mark.parametrize("decayed", [lambda x, by: x * by ** torch.arange(1000.0), lambda x, by: x.abs() ** by])
def test_a_number_in_a_power_is_rounded(decayed):
    inputs = {"x": drawn(torch.float32, x=(2, 1000))["x"] * 1e-20}
    assert_parity(lambda x: decayed(x, 0.93), lambda x: decayed(x, 0.93), inputs)
    assert not check_parity(lambda x: decayed(x, 0.93 * (1 + 1e-6)), lambda x: decayed(x, 0.93), inputs).agrees


def test_a_power_without_end_allows_nothing():
    """A decay mask: 0.93**inf is 0."""
    far = torch.tensor([0.0, 1.0, torch.inf, 1e12])
    x = {"x": torch.randn(3, 4)}
    assert_parity(lambda x: x * 0.93**far, lambda x: x * 0.93**far, x)
    assert not check_parity(lambda x: x * 0.93**far + (far > 2) * 1e-3, lambda x: x * 0.93**far, x).agrees


def rows_at(x, weight, ids):
    return torch.zeros_like(x[:2]).index_add(0, ids, x), weight[ids]


def test_what_an_index_adds_up_may_be_added_term_after_term():
    """Equal terms round alike at every addition: 4,096 times 0.99475 are off by 1,008 units of float32."""
    x, weight, ids = torch.full((4096, 1), 0.99475), torch.tensor([0.7, -1.1]), torch.zeros(4096, dtype=torch.int64)
    inputs = {"x": x, "weight": weight, "ids": ids}
    assert_parity(rows_at, rows_at, inputs, cotangent={"output[1]": torch.full((4096,), 0.99475)})
    wrong = check_parity(lambda **x: (1.001 * rows_at(**x)[0], rows_at(**x)[1]), rows_at, inputs)
    assert "output[0]" in wrong.wrong


def test_what_a_process_allows_its_products_does_not_widen_the_replicas():
    seen = []

    def definition(x):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return x @ x.mT

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        tolerance(definition, drawn(torch.float32, x=X))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"ieee"}


def test_upstream_gradients_are_drawn_alike_whatever_the_default_device():
    here = cotangent("output", torch.zeros(3), 0)
    with torch.device("meta"):
        assert torch.equal(cotangent("output", torch.zeros(3, device="cpu"), 0), here)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_output_is_no_coarser_than_the_inputs(dtype):
    narrow = lambda x, weight: fused_rms_norm(x, weight).bfloat16()  # noqa: E731
    assert check_parity(narrow, rms_norm, drawn(dtype, x=X, weight=W)).wrong["output"].gate == "structure"


def test_the_recipe_holds_float32_to_float32():
    inputs = drawn(torch.float32, x=X, weight=W)
    inside = lambda x, weight: fused_rms_norm(x.bfloat16().float(), weight)  # noqa: E731
    parity = check_parity(inside, rms_norm, inputs)
    told = "precision; the same code in float64 is right; right for code that rounds so"
    assert f"{told}: Recipe(softmax='bf16', elementwise='bf16')" in parity.message
    assert re.search(
        r"gate row, .* times the allowed error: the largest error of one row, such as a token", parity.message
    )
    assert_parity(inside, rms_norm, inputs, recipe=eval(parity.explained_by))
    mean = lambda x, weight: rms_norm(x, weight).mean()  # noqa: E731
    narrow = check_parity(lambda x, weight: mean(x.bfloat16().float(), weight), mean, inputs)
    assert "output" in narrow.wrong and not narrow.hints["output"] and "bf16" in narrow.explained_by


def test_it_imports_torch_alone():
    """Beyond what `import torch` loads: nothing but parity's own modules and the standard library's."""
    program = """
import sys, torch
before = set(sys.modules)
import parity.testing
new = {m.partition(".")[0] for m in set(sys.modules) - before}
print(sorted(new - {"parity", "torch"} - set(sys.stdlib_module_names)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_dtype_of_an_output_can_be_demanded():
    inputs = drawn(torch.bfloat16, x=(8, 32), weight=(32,))

    def wide(x, weight):
        return fused_rms_norm(x.float(), weight.float())

    assert check_parity(wide, rms_norm, inputs).agrees
    parity = check_parity(functools.partial(wide), rms_norm, inputs, protocol="output dtypes")
    assert parity.protocol == ("output dtypes: output came in torch.float32, expected torch.bfloat16",)
    assert parity.function.endswith("wide") and check_parity(fused_rms_norm, rms_norm, inputs, protocol="all").agrees


def test_a_definition_that_is_nan_holds_nothing_and_says_so():
    def mean(x, mask):
        return (x * mask).sum() / mask.sum()

    def guarded(x, mask):
        return (x * mask).sum() / mask.sum().clamp(min=1)

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with pytest.warns(UserWarning, match="output, grad_x: the definition is NaN"):
        assert_parity(guarded, mean, {"x": x, "mask": torch.zeros(4, 8)}, grad=["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_parity(guarded, mean, {"x": x, "mask": torch.ones(4, 8)}, grad=["x"])


def test_a_gradient_behind_a_mask_is_told_by_the_mask():
    """Indices alone were told, of a kernel that forgets the mask in its backward pass."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(6, 5), "mask": torch.rand(6) > 0.5}
    define = lambda x, mask: torch.where(mask, x.square().sum(-1), 0.0)  # noqa: E731
    wrong = lambda x, mask: define(x, mask) + (x.sum(-1) - x.sum(-1).detach()) * ~mask  # noqa: E731
    with pytest.raises(AssertionError, match="only where mask is False"):
        assert_parity(wrong, definition=define, inputs=inputs)


class StoredInBf16(torch.autograd.Function):
    """A cross entropy that keeps its log-sum-exp in bf16."""

    @staticmethod
    def forward(ctx, z, target):
        whole = z.logsumexp(-1, keepdim=True).bfloat16().float()
        ctx.save_for_backward(z, whole, target)
        return (whole[:, 0] - z.gather(-1, target[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx, g):
        z, whole, target = ctx.saved_tensors
        p = (z - whole).exp()
        return g * p.scatter_add(-1, target[:, None], -torch.ones(len(z), 1)) / len(z), None


def test_a_recipe_that_half_of_the_replicas_follow_is_named_for_a_large_tensor():
    """By seed 20 none of the first four stores its log-sum-exp: they would say that this explains nothing."""
    torch.manual_seed(1)
    given = {"logits": torch.randn(64, 512) * 3, "target": torch.randint(0, 512, (64,))}
    found = check_parity(
        lambda logits, target: StoredInBf16.apply(logits, target), definitions.cross_entropy, given, seed=20
    )
    assert "right for code that rounds so: Recipe(log_sum_exp='bf16')" in found.message


def _decayed_last(p, g):
    return (p - 0.1 * g) * (1 - 0.1 * 0.1)


CODE = {
    "cancels": (lambda x: 0.5 * x * (1 + torch.tanh(0.5 * x)), lambda x: x * torch.sigmoid(x), True),
    "overflows": (lambda x: x.float().mul(20).exp().log() / 20, lambda x: x, True),
    "narrow within": (lambda x: (x.float() / 3).bfloat16().float(), lambda x: x / 3, True),
    "another formula": (F.gelu, functools.partial(F.gelu, approximate="tanh"), False),
    "another order": (lambda x: _decayed_last(x, x.flip(0)), lambda x: x * (1 - 0.01) - 0.1 * x.flip(0), False),
    "float32 for sure": (
        lambda x: torch.from_numpy(np.float32(x.detach().float()) * np.float32(1.001)),
        lambda x: x,
        None,
    ),
}
"""What a function does -> the function, its definition, and whether it is right in float64."""


@pytest.mark.parametrize("what", CODE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_code_is_run_in_float64_too(what, dtype):
    function, definition, right = CODE[what]
    inputs = {"x": torch.linspace(-20, 20, 81).to(dtype)}
    parity = check_parity(function, definition, inputs, grad=(), recipe=Recipe(output="fp32"))
    assert not parity.agrees and parity.in_float64 is right
    assert right is None or parity.kind == ("precision" if right else "logic")
    assert right is not False or parity.explained_by is None


def test_code_that_takes_products_in_tf32_whatever_it_is_given_is_not_called_wrong_in_float64():
    def kernel(a, b):
        with CutOperands("tf32"):
            return a @ b

    parity = check_parity(kernel, lambda a, b: a @ b, drawn(torch.float32, a=(65, 300), b=(300, 70)), grad=())
    assert parity.in_float64 is None


def test_a_triton_kernel_is_not_launched_on_float64():
    """Its tensors would be float64, and tell it that they are of another dtype."""
    from triton.runtime import jit

    launched = []

    class Kernel(jit.KernelInterface):
        def run(self, x, **options):
            launched.append(x.dtype)
            return 1.01 * x

    parity = check_parity(lambda x: Kernel()[(1,)](x), lambda x: x, {"x": torch.ones(5)}, grad=(), protocol="none")
    assert not parity.agrees and parity.in_float64 is None
    assert launched == [torch.float32]


def test_a_recipe_that_overflows_explains_nothing():
    """Squares beyond the range of float16: in its replicas they are infinite, and allow any error."""
    x = torch.linspace(1e3, 2e3, 81)
    signs = torch.where(torch.arange(81) % 2 == 0, 1.0, -1.0)
    found = check_parity(
        definition=lambda x: x * x, inputs={"x": x}, actual={"output": x * x * (1 + 0.03 * signs)}, grad=()
    )
    assert found.kind == "logic" and found.explained_by is None


def test_an_input_without_a_gradient_tells_how_to_leave_it_out():
    inputs = {"x": torch.ones(3), "teacher": torch.ones(3)}
    found = check_parity(lambda x, teacher: x * teacher.detach(), lambda x, teacher: x * teacher, inputs)
    assert "no gradient; grad=(…) names" in found.message
    assert_parity(lambda x, teacher: x * teacher.detach(), lambda x, teacher: x * teacher, inputs, grad=("x",))
