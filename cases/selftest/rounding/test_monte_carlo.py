"""Replicas have the spread of real low-precision runs, and none where nothing is rounded."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from parity.case.case import DTYPES, Case
from parity.implementations.implementation import Implementation
from parity.judging.assess import confirmed, judge_all
from parity.judging.execute import execute
from parity.judging.gates import Unit, judge
from parity.judging.settle import LAST_WORD
from parity.recipe import Recipe
from parity.registry import family, load, oracle_of
from parity.rounding.marks import of_teacher, recipe_mark
from parity.rounding.monte_carlo import MonteCarlo
from parity.rounding.oracle import exact, replicas
from parity.selftest.controls import control

FAMILY = family("logprobs")
SETTINGS = {"B": 3, "T": 5, "V": 61, "H": 16, "entropy": "gradient", "bias": "random"}


def to_tf32(x):
    """x with 11 significant bits, as tensor cores read it."""
    carry = x.double() * (2.0**42 + 1)
    return (carry - (carry - x.double())).float()


def tf32_logprobs(x):
    """Forward products of inputs rounded to tf32, the rest float32."""
    logits = to_tf32(x.hidden.detach()) @ to_tf32(x.weight.detach()).T + x.bias
    return {"logps": logits.log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]}


TF32 = Implementation("tf32", "logprobs", "candidate", tf32_logprobs, Recipe(matmul="tf32"))


@pytest.mark.parametrize(
    ("name", "dtype", "context", "quantities"),
    [
        ("reordered", "fp32", "plain", "logps entropy grad_hidden grad_weight grad_bias"),
        ("online", "fp32", "plain", "logps entropy grad_hidden grad_weight grad_bias"),
        ("plain", "bf16", "plain", "logps entropy grad_hidden grad_weight"),
        ("plain", "fp16", "plain", "logps entropy grad_hidden grad_weight"),
        ("narrow", "bf16", "plain", "logps entropy grad_hidden grad_weight"),
        ("narrow", "fp16", "plain", "logps entropy grad_hidden grad_weight"),
        ("tiles", "bf16", "plain", "grad_weight"),
        ("plain", "fp32", "autocast", "logps entropy grad_hidden grad_weight"),
        ("narrow", "fp32", "autocast", "logps entropy grad_hidden grad_weight"),
        ("tf32", "fp32", "plain", "logps"),
    ],
)
@pytest.mark.parametrize("peak", [0.05, 1.0, 4.0])
def test_spread_is_that_of_real_runs(name, dtype, context, quantities, peak):
    """Norm of a real run's error over that of the replicas, geometric mean over ten cases: at most 2, at least 0.04."""
    implementation = TF32 if name == "tf32" else control(f"honest.logprobs.{name}")
    ratios = {q: [] for q in quantities.split()}
    for seed in range(10):
        case = FAMILY.case(seed, dtype, SETTINGS | {"peak": peak, "context": context})
        inputs = FAMILY.build(case)
        truth, outcome = exact(FAMILY, inputs), execute(implementation, inputs)
        spread = replicas(FAMILY, inputs, implementation.recipe_for(inputs), 12, seed)
        for q, found in ratios.items():
            e = outcome.quantities[q].double() - truth[q]
            u = torch.finfo(outcome.quantities[q].dtype).eps / 2
            unit = (spread[q] - truth[q]).flatten(1).norm(dim=1).square().mean().sqrt()
            found.append(float(e.norm() / max(unit, u * truth[q].norm() / 2)))
    for q, found in ratios.items():
        ratio = math.exp(sum(math.log(max(r, 1e-3)) for r in found) / len(found))
        assert 0.04 < ratio < 2.0, f"{q}: {ratio:.2f}"
        assert max(found) < 4.0, q


def under(recipe, dtype, function, *tensors):
    """function(*tensors) under Monte Carlo arithmetic."""
    with MonteCarlo(recipe, dtype, 1):
        return function(*tensors)


X = torch.linspace(-3, 5, 24, dtype=torch.float64).view(4, 6) / 3


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.view(6, 4).T[1:3, ::2],
        lambda x: x.transpose(0, 1).reshape(-1),
        lambda x: x.gather(1, torch.tensor([[0, 1], [5, 4], [2, 2], [3, 0]])),
        lambda x: x.index_select(0, torch.tensor([3, 1])),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.masked_fill(x < 0, 1.5),
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: torch.minimum(x, x.flip(0)),
        lambda x: -x.abs(),
        lambda x: x.amax(1),
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack([x, x])[0].unsqueeze(1).expand(4, 3, 6),
        lambda x: x.sign(),
        lambda x: x.detach().clone(),
        lambda x: x.nan_to_num(),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x.topk(2).values,
    ],
)
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(elementwise="bf16", softmax="bf16")])
def test_exact_operations_are_left_alone(operation, recipe):
    assert torch.equal(under(recipe, "bf16", operation, X), operation(X))


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        (lambda x: x * x, lambda x: (x * x).abs()),
        (lambda x: x.exp(), lambda x: x.exp()),
        (lambda x: x / 3, lambda x: x.abs() / 3),
        (lambda x: x.tanh(), lambda x: x.tanh().abs()),
        (lambda x: x.sum(1), lambda x: 3 * x.abs().sum(1)),
    ],
)
@pytest.mark.parametrize(("elementwise", "u"), [("fp32", 2.0**-24), ("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_rounded_operations_move_by_their_unit_and_no_more(operation, size, elementwise, u):
    """Sums and products are accumulated in float32; only their result is narrow."""
    found = under(Recipe(elementwise=elementwise), "bf16", operation, X)
    error = (found - operation(X)).abs()
    assert bool((error <= 1.001 * u * size(X) + 2.0**-24).all())
    assert float(error.max()) > 0.05 * u * float(size(X).abs().max()) / 3


def test_ieee_and_tf32_products():
    a, b = torch.randn(40, 64, dtype=torch.float64), torch.randn(64, 40, dtype=torch.float64)
    ieee = (under(Recipe(), "fp32", torch.mm, a, b) - a @ b).norm()
    tf32 = (under(Recipe(matmul="tf32"), "fp32", torch.mm, a, b) - a @ b).norm()
    real = (to_tf32(a.float()).double() @ to_tf32(b.float()).double() - a @ b).norm()
    assert 0.5 < float(tf32 / real) < 4
    assert float(tf32) > 100 * float(ieee)


def test_equal_values_round_equally_in_a_narrow_dtype():
    """Logits that a softcap saturates tie in bf16; a replica in which they never tie knows nothing of it."""
    x = torch.full((2, 50), 3.0, dtype=torch.float64) * (1 + 1e-9 * torch.arange(50))
    mode = MonteCarlo(Recipe(), "bf16", 3)
    with mode:
        stored = mode.store(x, "bf16")
    assert int(stored.unique(dim=1).shape[1]) < 50
    assert float((stored - stored[:, :1]).abs().max()) < 1e-6
    product = under(Recipe(elementwise="bf16"), "bf16", lambda v: v * 1.1, x)
    assert float((product - product[:, :1]).abs().max()) < 1e-6


def test_equal_subnormals_round_equally():
    """3.6 quanta of float16 become 4 wherever they stand: the error of their sum is not a random walk."""
    x = torch.full((1, 1000), 3.6 * 2.0**-24, dtype=torch.float64)
    for recipe in (Recipe(elementwise="fp16"), Recipe(logits="fp16")):
        errors = []
        for seed in range(12):
            mode = MonteCarlo(recipe, "fp16", seed)
            with mode:
                stored = x * 1.0 if recipe.elementwise == "fp16" else recipe_mark(mode)("logits", x)
            assert float(stored.max() - stored.min()) < 1e-37
            errors.append(abs(float(stored.mean() - x.mean())) / 2.0**-24)
        assert 0.1 < max(errors) <= 0.5


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_narrow_log_softmax_is_torchs_own(dtype):
    """On the dtype's own grid a replica has the very bits of torch's CPU kernel, which rounds Σ exp and its logarithm."""
    generator = torch.Generator().manual_seed(0)
    for v in (2, 7, 41, 300):
        z = torch.randn(200, v, generator=generator).to(DTYPES[dtype])
        with MonteCarlo(Recipe(softmax=dtype), dtype, 1, own_grid=True):
            replica = torch.log_softmax(z.double()[None], -1)
        real, once = torch.log_softmax(z, -1), torch.log_softmax(z.double(), -1).to(DTYPES[dtype])
        same = float((replica[0].to(DTYPES[dtype]) == real).double().mean())
        assert same > max(0.9, float((once == real).double().mean()) + 0.05), (v, same)  # float32's noise decides ties


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_narrow_log_sum_exp_loses_what_torchs_loses(dtype):
    """log(e^-0.0029 + e^-9.2 + …): float16 rounds Σ exp(z - max) to 1, and the mass beside the first token is gone."""
    generator = torch.Generator().manual_seed(0)
    for v in (2, 7, 41, 300):
        z = (torch.randn(200, v, generator=generator) * 6).to(DTYPES[dtype])
        with MonteCarlo(Recipe(elementwise=dtype), dtype, 1, own_grid=True):
            replica = torch.logsumexp(z.double()[None], -1)[0].to(DTYPES[dtype])
        real, once = torch.logsumexp(z, -1), torch.logsumexp(z.double(), -1).to(DTYPES[dtype])
        assert float((replica == real).double().mean()) >= float((once == real).double().mean()), v
    x = torch.tensor([[[-0.0029259, -9.19, -12.5]]], dtype=torch.float64).half()
    with MonteCarlo(Recipe(elementwise="fp16"), "fp16", 1, own_grid=True):
        lost = torch.logsumexp(x.double(), -1)
    assert float(lost) == float(torch.logsumexp(x, -1)) == float(x[0, 0, 0])


def test_a_single_possible_token_rounds_in_float32_alone():
    """V = 1, or every other token excluded: Σ exp is 1 in any dtype, but z - log Z may be computed by way of log Z."""
    z = torch.tensor([[[2.7, -torch.inf]], [[-1.3, -torch.inf]]], dtype=torch.float64).repeat(12, 1, 1)
    for rows in (z[..., :1], z):
        for softmax in ("fp32", "bf16"):
            found = under(Recipe(softmax=softmax), "bf16", lambda v: torch.log_softmax(v, -1), rows)
            assert 1e-8 < float(found[..., 0].abs().max()) < 1e-6


def test_equal_rows_have_equal_log_probs_in_a_narrow_dtype():
    """-log 7 for every token of every flat row: what adding log β to it rounds by is common to all, not dithered."""
    z = torch.zeros(3, 50, 7, dtype=torch.float64)
    found = under(Recipe(softmax="bf16"), "bf16", lambda v: torch.log_softmax(v, -1), z)
    assert float((found.amax((1, 2)) - found.amin((1, 2))).max()) < 1e-6
    assert float((found + math.log(7)).abs().max()) > 1e-4


def test_the_first_replica_rounds_on_the_own_grid_of_the_dtype():
    """A float32 head cast to bf16 may be the teacher's, and then every gradient is 0: no random grid shows that."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    mode = MonteCarlo(Recipe(), "bf16", 1, own_grid=True)
    with mode:
        stored = mode.store(x, "bf16")
    own = [torch.equal(stored[r], x[r].bfloat16().double()) for r in range(4)]
    assert own == [True, False, False, False]
    with mode:
        assert mode.store(x[0, 0], "bf16").dim() == 0


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


def test_more_precise_than_its_recipe():
    """A gradient of 1.5e-14 that float16 would flush, and float32 leaves with an error of 4e-13: honest either way."""
    path = Path(__file__).parents[2] / "regressions" / "divergence-bias-beside-flushed-logits.json"
    oracle = oracle_of(Case.load(path))
    recipe = Recipe(dlogits="input", inputs="input")  # as if the bias were summed from what is stored in float16
    implementation = dataclasses.replace(load()["trl.ChunkedDivergenceFunction"], recipe=recipe)
    outcome = execute(implementation, oracle.inputs)
    resolved = implementation.recipe_for(oracle.inputs)
    assert not judge_all(oracle, implementation, outcome, resolved, LAST_WORD)["grad_bias"].agrees
    assert all(j.agrees for j in confirmed(oracle, implementation, outcome).values())
    wrong = {name: v + 1e-3 if name == "grad_bias" else v for name, v in outcome.quantities.items()}
    judged = confirmed(oracle, implementation, dataclasses.replace(outcome, quantities=wrong))
    assert not judged["grad_bias"].agrees


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


def test_a_bias_is_summed_from_what_is_stored_or_not():
    """The gradient of the logits flushes to 0 in float16; the bias sums the tile before that, or after."""
    b = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    h = torch.ones(2, 4, 3, dtype=torch.float64, requires_grad=True)
    for bias, expected in (("fp32", 4e-12), (None, 0.0)):
        mode = MonteCarlo(Recipe(dlogits="fp16", bias=bias), "fp16", 0)
        mark = recipe_mark(mode)
        with mode:
            z = mark("biased", mark("logits", h * 1.0) + mark("bias", b).unsqueeze(-2))
            grad_b, grad_h = torch.autograd.grad(z, [b, h], torch.full_like(z, 1e-12))
        assert float(grad_b.abs().max()) == pytest.approx(expected, rel=1e-3, abs=1e-30), bias
        assert float(grad_h.abs().max()) < 1e-30


def test_a_log_sum_exp_near_zero_rounds_absolutely():
    """log(Σ exp) of a mass near 1: float32 rounds the sum, whatever little remains of its logarithm."""
    x = torch.tensor([[0.5, 0.4998]], dtype=torch.float64).log()
    real = (torch.logsumexp(x.float(), -1).double() - torch.logsumexp(x.float().double(), -1)).abs()
    spread = torch.stack([(under_seed(k, lambda v: torch.logsumexp(v, -1), x) - x.logsumexp(-1)) for k in range(24)])
    assert 2.0**-25 < float(spread.abs().max()) < 8 * 2.0**-24
    assert float(real) <= float(spread.abs().max())


def test_partial_sums_beyond_the_range_of_their_dtype_are_undecided():
    """60,000 + 60,000 - 60,000 fits float16, and overflows on the way."""
    terms, ones = torch.tensor([[6e4, 6e4, -6e4]], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    for accumulate, expected in (("fp16", torch.inf), ("bf16", 6e4), ("fp32", 6e4)):
        mode = MonteCarlo(Recipe(accumulate=accumulate, partials=3), "fp16", 0)
        mode.backward = True
        with mode:
            product, total = terms @ ones, terms.sum(-1)
        assert float(product) == pytest.approx(expected, rel=0.05), accumulate
        assert float(total) == pytest.approx(expected, rel=0.05), accumulate


def test_products_summed_one_after_another_stay_within_the_gate():
    """One row times a long column: real sgemv adds its terms in order, and the error grows with √K."""
    generator = torch.Generator().manual_seed(0)
    worst = []
    for k in (4095, 32769):
        a = torch.rand(1, k, generator=generator) / k
        a[0, 5] -= 1
        w = torch.randn(k, 7, generator=generator)
        truth = a.double() @ w.double()
        spread = (
            torch.stack([under_seed(s, torch.mm, a.double(), w.double()) - truth for s in range(40)])
            .square()
            .sum((1, 2))
            .mean()
            .sqrt()
        )
        worst.append(float(((a @ w).double() - truth).norm() / spread))
    assert max(worst) < 3.0


def test_a_loss_added_token_by_token_stays_within_the_gate():
    """As kernels do that take one token after another: the error of terms of one sign grows with √n, torch's own sum has none."""
    terms = torch.rand(16384, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(())
    for term in terms:
        total = total + term
    exact = terms.double().sum()
    stack = torch.stack([under_seed(s, torch.sum, terms.double()) for s in range(12)])
    assert abs(float(total) / float(exact) - 1) > 8 * 2.0**-24
    assert judge(total, Unit(exact, stack, scalar=True), torch.float32).agrees
    assert not judge(exact * (1 + 1e-4), Unit(exact, stack, scalar=True), torch.float32).agrees


def under_seed(seed, function, *tensors):
    """As `under`, in float32 with a seed."""
    with MonteCarlo(Recipe(), "fp32", seed):
        return function(*tensors)


def test_a_stored_float16_overflows():
    x = torch.tensor([1.0, 7e4, -7e4, torch.inf, torch.nan], dtype=torch.float64)
    mode = MonteCarlo(Recipe(logits="fp16"), "fp16", 0)
    with mode:
        stored = recipe_mark(mode)("logits", x)
    assert torch.isfinite(stored[0])
    assert stored[1] == torch.inf
    assert stored[2] == -torch.inf
    assert stored[3] == torch.inf
    assert torch.isnan(stored[4])
    product = under(Recipe(elementwise="fp16"), "fp16", lambda v: v * 2, torch.tensor([4e4], dtype=torch.float64))
    assert product[0] == torch.inf
    wide = under(Recipe(elementwise="bf16"), "bf16", lambda v: v * 2, torch.tensor([4e4], dtype=torch.float64))
    assert torch.isfinite(wide[0])


def test_an_exponential_beyond_float32_overflows_in_a_replica():
    """A ratio of e^100 is finite in float64 only; its clipped value has a gradient of 0·inf in any float32 code."""
    d = torch.tensor([1.0, 100.0], dtype=torch.float64, requires_grad=True)
    with MonteCarlo(Recipe(), "fp32", 0):
        clipped = d.exp().clamp(max=2.0)
        clipped.sum().backward()
    assert clipped.detach().tolist() == pytest.approx([2.0, 2.0])
    assert d.grad is not None
    assert torch.isnan(d.grad).tolist() == [False, True]


def test_what_overflows_in_a_replica_is_skipped_and_counted():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    spread = torch.tensor([[1.0, 2.0], [1.0, torch.inf]], dtype=torch.float64)
    found = judge(torch.tensor([1.0, torch.inf]), Unit(truth, spread, entrywise=True), torch.float32)
    assert found.agrees
    assert found.undecided == 1


@pytest.mark.parametrize("grad", ["bias", "hidden", "weight", "weight bias"])
def test_every_replica_rounds_a_frozen_tensor_anew(grad):
    """A frozen head that all replicas shared would be rounded once for all of them."""
    spreads = []
    for leaves in (grad, "hidden weight bias"):
        inputs = FAMILY.build(FAMILY.case(1, "fp32", SETTINGS | {"grad": leaves, "context": "autocast", "peak": 4.0}))
        recipe = control("honest.logprobs.plain").recipe_for(inputs)
        recipe = dataclasses.replace(recipe, logits="fp32", dlogits="fp32")
        logps = replicas(FAMILY, inputs, recipe, 12, 0)["logps"]
        assert logps.shape == (12, 3, 5)
        spreads.append(float(logps.std(0).mean()))
    assert spreads[0] == pytest.approx(spreads[1], rel=0.3)


def test_replicas_repeat_themselves():
    inputs = FAMILY.build(FAMILY.case(1, "bf16", SETTINGS))
    a, b = (replicas(FAMILY, inputs, Recipe(logits="bf16"), 12, 5) for _ in range(2))
    c = replicas(FAMILY, inputs, Recipe(logits="bf16"), 12, 6)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["logps"], c["logps"])


def test_a_recipe_names_what_it_moves():
    recipe = Recipe(logits="input", accumulate="input", partials=8)
    assert recipe.resolve("bf16").describe() == "logits=bf16 accumulate=bf16"
    assert recipe.resolve("fp32") == Recipe()
    assert Recipe().describe() == "fp32"


def test_equal_terms_of_a_sum_round_the_same_way():
    """A saturated softcap: a hundred thousand logits of ±1, whose exponentials float32 sums with a drift, not a walk."""
    found = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        z = torch.where(torch.rand(1, 131073, generator=generator) > 0.5, 1.0, -1.0).double()
        exact = torch.log_softmax(z, -1)
        real = (torch.log_softmax(z.float(), -1).double() - exact).abs().max()
        spread = torch.stack([under_seed(k, lambda v: torch.log_softmax(v, -1), z) - exact for k in range(8)])
        found.append(float(real / spread.abs().amax((1, 2)).square().mean().sqrt()))
    assert 0.05 < max(found) < 2


OPERATIONS = {
    "product": lambda x: x @ torch.linspace(-1, 2, 48, dtype=torch.float64).view(6, 8).repeat(len(x), 1, 1),
    "elementwise": lambda x: (x * x).exp(),
    "sum": lambda x: x.sum(-1),
    "log-softmax": lambda x: torch.log_softmax(x, -1),
    "log-sum-exp": lambda x: torch.logsumexp(x, -1),
}


@pytest.mark.parametrize("operation", list(OPERATIONS.values()), ids=list(OPERATIONS))
def test_what_is_equal_rounds_alike_in_float32_too(operation):
    """Fifty equal tokens are off alike in half of the replicas, differently in each; tokens apart are off independently."""
    token = torch.tensor([0.3, -0.7, 1.1, 0.2, -0.1, 0.5], dtype=torch.float64)
    rows = token.repeat(24, 50, 1)
    alike = (under(Recipe(), "fp32", operation, rows) - operation(rows))[:12]
    assert float((alike - alike[:, :1]).abs().max()) < 1e-12
    assert len(alike.view(12, -1)[:, 0].unique()) == 12
    apart = rows * (1 + 1e-3 * torch.arange(50)[:, None])
    spread = under(Recipe(), "fp32", operation, apart) - operation(apart)
    assert float(spread.mean(1).abs().mean() / spread.abs().mean()) < 0.5


def test_equal_rows_of_a_head_need_not_round_alike():
    """Two chunks of a vocabulary are two products: equal rows tie in one of them, and in half of the replicas."""
    operands = torch.ones(24, 1, 7, dtype=torch.float64) / 3, torch.ones(24, 7, 40, dtype=torch.float64) / 7
    logits = under(Recipe(elementwise="fp64"), "fp32", torch.bmm, *operands)
    ties = (logits.amax((1, 2)) - logits.amin((1, 2))) < 1e-12
    assert ties.tolist() == [True] * 12 + [False] * 12


def test_a_constant_is_rounded_once_in_a_replica():
    """1/0.7 is off by the same share at every token and in the backward pass; 1/2 has all its bits."""
    x = (1 + torch.rand(24, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).requires_grad_()
    for constant, rounds in ((0.7, True), (2.0, False)):
        mode = MonteCarlo(Recipe(), "fp32", 1)
        with mode:
            y = x / constant
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
        shares = (y.detach() * constant / x.detach() - 1).mean(1)
        assert (float(shares.abs().mean()) > 2.0**-27) == rounds
        if rounds:
            beside = (g * constant - 1).mean(1)  # one rounding of a common value is on top
            assert float((beside - shares).abs().max()) < 1.1 * 2.0**-24 < 4 * float(shares.abs().max())


def test_a_product_drifts_as_float32_does():
    """Two thousand equal terms: each addition to a total rounds the same way, and √K/2 units are too few."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(8):
        a = torch.rand(1, 4, 1, generator=generator).float().expand(1, 4, 2000)
        b = torch.rand(1, 1, 3, generator=generator).float().expand(1, 2000, 3)
        exact, real = a.double() @ b.double(), (a @ b).double()
        with MonteCarlo(Recipe(), "fp32", 1):
            replica = a.double().repeat(24, 1, 1) @ b.double().repeat(24, 1, 1)
        found.append(float((real - exact).abs().max() / (replica - exact).abs().max()))
    assert max(found) < 2.0


def test_what_is_lost_in_a_sum_of_blocks_adds_no_rounding():
    """One large part among 255 far below half a unit of it: it and its first sum are rounded, however many follow."""
    mode = MonteCarlo(Recipe(accumulate="bf16", partials=256, partial_terms=1), "bf16", 1)
    parts = torch.full((16, 1, 256), 2.0**-14)
    parts[..., 0] = 1.0
    total = mode._added(parts.double(), torch.ones(16, 256, 1, dtype=torch.float64))
    assert float((total - 1).abs().amax()) <= 2 * 2.0**-8 + 255 * 2.0**-14


def test_implementations_share_what_does_not_depend_on_them():
    known = oracle_of(FAMILY.case(1, "bf16", SETTINGS))
    narrow = Recipe(logits="bf16", output="bf16")
    assert known.replicas(narrow, 2) is known.replicas(dataclasses.replace(narrow, output="fp32"), 2)
    assert known.replicas(narrow, 2) is not known.replicas(Recipe(output="bf16"), 2)
    assert known.in_float32 is known.in_float32


@pytest.mark.parametrize("finer", [False, True])
def test_replicas_of_outputs_alone_take_no_gradient_and_have_the_same_bits(finer):
    case, narrow = FAMILY.case(1, "bf16", SETTINGS), Recipe(logits="bf16")
    alone, whole = (
        oracle_of(case).replicas(narrow, 3, finer, gradients=False),
        oracle_of(case).replicas(narrow, 3, finer),
    )
    assert not any(name.startswith("grad_") for name in alone) and "grad_hidden" in whole
    assert all(torch.equal(value, whole[name]) for name, value in alone.items())


def test_a_wrong_output_is_settled_without_gradients():
    oracle, honest = oracle_of(FAMILY.case(1, "fp32", SETTINGS)), control("honest.logprobs.plain")
    outcome = execute(honest, oracle.inputs)
    spoilt = dict(outcome.quantities) | {"logps": outcome.quantities["logps"] * 1.1}
    judged = confirmed(oracle, honest, dataclasses.replace(outcome, quantities=spoilt))
    assert [name for name, j in judged.items() if not j.agrees] == ["logps"]
    assert {key[1:] for key in oracle._replicas} == {(12, False, True), (60, False, False), (480, False, False)}


def test_what_is_infinite_stays_so_beside_noise():
    """A banned token that is selected, and the mask of a float64 model."""
    lowest = torch.finfo(torch.float64).min
    x = torch.tensor([[-torch.inf, lowest, 1.0]] * 4, dtype=torch.float64)
    mode = MonteCarlo(Recipe(), "bf16", 1)
    spread, scattered = mode.spread(x, lambda: torch.ones_like(x), "bf16"), mode.scattered(x, x.new_full((1,), 1e-3))
    for found in (spread, scattered):
        assert torch.equal(found[:, :2], x[:, :2]) and bool((found[:, 2] != 1).all())


def test_a_stack_of_one_replica_begins_with_the_last_part_as_often_as_not():
    parts = [torch.full((1, 1), v, dtype=torch.float64) for v in [1.0, *[2.0**-10] * 63]]
    found = {
        round(float(MonteCarlo(Recipe(accumulate="bf16", partials=64), "bf16", seed).lost(parts)), 3)
        for seed in range(8)
    }
    assert min(found) < -0.04 and max(found) > -0.04, found
