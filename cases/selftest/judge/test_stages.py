"""What a recipe says of the teacher, the bias and partial sums is what its replicas round."""

import pytest
import torch

from cases.selftest.judge.arithmetic import under
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.recipe import Recipe
from parity.judge.stages import of_teacher, stored
from parity.testing import check_parity


def test_a_teacher_rounds_in_its_own_dtype():
    """Beside a float32 student: its logits' way to log-probs, and what is computed of them, in float16."""
    x = torch.full((2, 3), 0.3, dtype=torch.float64)
    mode = MonteCarlo(Recipe(teacher_softmax="fp16", teacher_elementwise="bf16"), "fp16", 2)

    def error() -> float:
        return float((x * 1.1 / (x * 0 + 0.33) - 1).abs().max())

    with mode:
        student = error()
        with of_teacher("softmax"):
            half = error()
            overflow = x * 4e5
        with of_teacher("elementwise"):
            brain = error()
        after = error()
    assert max(student, after) < 1e-6 < 1e-5 < half < 2e-3 < brain * 2
    assert torch.isinf(overflow).all()
    with of_teacher("softmax"):
        assert error() < 1e-15
    with MonteCarlo(Recipe(), "fp16", 2), of_teacher("softmax"):
        assert error() < 1e-6


def test_a_recipe_that_says_nothing_apart_is_the_same_recipe():
    """Recipes that coincide for a dtype share their replicas: a teacher stored as the student is no other recipe."""
    narrow = dict.fromkeys(("logits", "elementwise", "softmax"), "input")
    teacher = dict.fromkeys(("teacher", "teacher_softmax", "teacher_elementwise"), "input")
    assert Recipe(**narrow, **teacher).resolve("fp16") == Recipe(**narrow).resolve("fp16")
    assert Recipe(**teacher).resolve("fp16") != Recipe().resolve("fp16")
    assert Recipe(**teacher).resolve("fp32") == Recipe().resolve("fp32")
    tiles = Recipe(dlogits="input", bias="fp32")
    assert tiles.resolve("fp32") == Recipe()
    assert tiles.resolve("bf16").bias == "fp32"


def test_a_recipe_names_what_it_moves():
    recipe = Recipe(logits="input", accumulate="input", partials=8)
    assert recipe.resolve("bf16").describe() == "logits=bf16 accumulate=bf16"
    assert recipe.resolve("fp32") == Recipe()
    assert Recipe().describe() == "fp32"


def test_a_kernel_stores_the_gradient_of_the_log_probs_it_takes():
    lp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    for dtype, expected in ((None, 1e-9), ("fp16", 0.0)):
        with MonteCarlo(Recipe(log_probs=dtype), "fp16", 0):
            (grad,) = torch.autograd.grad(stored(lp, "log-probs"), lp, torch.full_like(lp, 1e-9))
        assert grad.flatten().tolist() == pytest.approx([expected] * 6)


def test_a_bias_is_summed_from_what_is_stored_or_not():
    """The gradient of the logits flushes to 0 in float16; the bias sums the tile before that, or after."""
    b = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    h = torch.ones(2, 4, 3, dtype=torch.float64, requires_grad=True)
    for bias, expected in (("fp32", 4e-12), (None, 0.0)):
        with MonteCarlo(Recipe(dlogits="fp16", bias=bias), "fp16", 0):
            z = stored(stored(h * 1.0, "logits") + stored(b, "bias").unsqueeze(-2), "biased")
            grad_b, grad_h = torch.autograd.grad(z, [b, h], torch.full_like(z, 1e-12))
        assert float(grad_b.abs().max()) == pytest.approx(expected, rel=1e-3, abs=1e-30), bias
        assert float(grad_h.abs().max()) < 1e-30


def test_a_bias_is_added_before_anything_is_stored_or_after():
    """2,049 is no float16: 2,048 + 1 - 1 is 2,049 - 1 or 2,048 - 1 + 1; a kernel that adds its bias in float32 has stored."""
    h, b = torch.full((400, 1, 1), 2049.0, dtype=torch.float64), torch.full((400, 1), -1.0, dtype=torch.float64)
    for bias, expected in ((None, [2047.0, 2048.0]), ("fp32", [2047.0])):
        with MonteCarlo(Recipe(logits="fp16", bias=bias), "fp16", 0, own_grids=400):
            z = stored(stored(h * 1.0, "unbiased") + stored(b, "bias").unsqueeze(-2), "biased").flatten().round()
        assert z.unique().tolist() == expected, bias
        assert 120 < (z == 2047.0).sum() < 280 or bias


def test_a_stored_float16_overflows():
    x = torch.tensor([1.0, 7e4, -7e4, torch.inf, torch.nan], dtype=torch.float64)
    with MonteCarlo(Recipe(logits="fp16"), "fp16", 0):
        kept = stored(x, "logits")
    assert torch.isfinite(kept[0])
    assert kept[1] == torch.inf
    assert kept[2] == -torch.inf
    assert kept[3] == torch.inf
    assert torch.isnan(kept[4])
    product = under(Recipe(elementwise="fp16"), "fp16", lambda v: v * 2, torch.tensor([4e4], dtype=torch.float64))
    assert product[0] == torch.inf
    wide = under(Recipe(elementwise="bf16"), "bf16", lambda v: v * 2, torch.tensor([4e4], dtype=torch.float64))
    assert torch.isfinite(wide[0])


def test_a_gradient_that_a_dtype_holds_is_not_rounded_to_it():
    """A bias gradient summed in bf16 is wrong behind a cast too: what comes to the cast came in bf16."""

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bias):
            return (x + bias).bfloat16()

        @staticmethod
        def backward(ctx, g):
            return g, g.sum(0, dtype=torch.bfloat16).float()

    inputs = {"x": torch.linspace(-3, 2, 240).view(30, 8).bfloat16(), "bias": torch.linspace(0, 1, 8)}
    for function, right in ((lambda x, bias: (x + bias).bfloat16(), True), (Narrow.apply, False)):
        found = check_parity(
            function, lambda x, bias: (x + bias).to(x.dtype), inputs, cotangent="fine", protocol="none"
        )
        assert found.agrees == right
