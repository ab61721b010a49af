"""Replicas have the spread of real low-precision runs, and none where nothing is rounded."""

import math

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.judge.arithmetic import under
from parity.implementations.implementation import Implementation
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.recipe import DTYPES, Recipe
from parity.judging.oracle import exact, replicas
from parity.protocol.call import execute
from parity.registry import family

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
    implementation = TF32 if name == "tf32" else control(f"control.logprobs.{name}")
    ratios = {q: [] for q in quantities.split()}
    for seed in range(10):
        case = FAMILY.case(seed, dtype, SETTINGS | {"peak": peak, "context": context})
        inputs = FAMILY.build(case)
        truth, outcome = exact(FAMILY, inputs), execute(implementation, inputs)
        spread = replicas(FAMILY, inputs, implementation.recipe_for(inputs), range(12), seed)
        for q, found in ratios.items():
            e = outcome.quantities[q].double() - truth[q]
            u = torch.finfo(outcome.quantities[q].dtype).eps / 2
            unit = (spread[q] - truth[q]).flatten(1).norm(dim=1).square().mean().sqrt()
            found.append(float(e.norm() / max(unit, u * truth[q].norm() / 2)))
    for q, found in ratios.items():
        ratio = math.exp(sum(math.log(max(r, 1e-3)) for r in found) / len(found))
        assert 0.04 < ratio < 2.0, f"{q}: {ratio:.2f}"
        assert max(found) < 4.0, q


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
        (torch.nn.functional.logsigmoid, lambda x: -torch.nn.functional.logsigmoid(x)),
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


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_narrow_log_softmax_is_torchs_own(dtype):
    """On the dtype's own grid a replica has the very bits of torch's CPU kernel, which rounds Σ exp and its logarithm."""
    generator = torch.Generator().manual_seed(0)
    for v in (2, 7, 41, 300):
        z = torch.randn(200, v, generator=generator).to(DTYPES[dtype])
        with MonteCarlo(Recipe(softmax=dtype), dtype, 1, own_grids=1):
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
        with MonteCarlo(Recipe(elementwise=dtype), dtype, 1, own_grids=1):
            replica = torch.logsumexp(z.double()[None], -1)[0].to(DTYPES[dtype])
        real, once = torch.logsumexp(z, -1), torch.logsumexp(z.double(), -1).to(DTYPES[dtype])
        assert float((replica == real).double().mean()) >= float((once == real).double().mean()), v
    x = torch.tensor([[[-0.0029259, -9.19, -12.5]]], dtype=torch.float64).half()
    with MonteCarlo(Recipe(elementwise="fp16"), "fp16", 1, own_grids=1):
        lost = torch.logsumexp(x.double(), -1)
    assert float(lost) == float(torch.logsumexp(x, -1)) == float(x[0, 0, 0])


def test_a_single_possible_token_rounds_in_float32_alone():
    """V = 1, or every other token excluded: Σ exp is 1 in any dtype, but z - log Z may be computed by way of log Z."""
    z = torch.tensor([[[2.7, -torch.inf]], [[-1.3, -torch.inf]]], dtype=torch.float64).repeat(12, 1, 1)
    for rows in (z[..., :1], z):
        for softmax in ("fp32", "bf16"):
            found = under(Recipe(softmax=softmax), "bf16", lambda v: torch.log_softmax(v, -1), rows)
            assert 1e-8 < float(found[..., 0].abs().max()) < 1e-6


def test_an_exponential_beyond_float32_overflows_in_a_replica():
    """A ratio of e^100 is finite in float64 only; its clipped value has a gradient of 0·inf in any float32 code."""
    d = torch.tensor([1.0, 100.0], dtype=torch.float64, requires_grad=True)
    with MonteCarlo(Recipe(), "fp32", 0):
        clipped = d.exp().clamp(max=2.0)
        clipped.sum().backward()
    assert clipped.detach().tolist() == pytest.approx([2.0, 2.0])
    assert d.grad is not None
    assert torch.isnan(d.grad).tolist() == [False, True]


def test_what_is_infinite_stays_so_beside_noise():
    """A banned token that is selected, and the mask of a float64 model."""
    lowest = torch.finfo(torch.float64).min
    x = torch.tensor([[-torch.inf, lowest, 1.0]] * 4, dtype=torch.float64)
    mode = MonteCarlo(Recipe(), "bf16", 1)
    spread, scattered = mode.spread(x, lambda: torch.ones_like(x), "bf16"), mode.scattered(x, x.new_full((1,), 1e-3))
    for found in (spread, scattered):
        assert torch.equal(found[:, :2], x[:, :2]) and bool((found[:, 2] != 1).all())
