"""Sums and products in a replica drift, lose small terms and overflow as real ones do."""

import math

import numpy as np
import pytest
import torch

from cases.selftest.judge.arithmetic import under
from parity.judge.gates import Unit, judge
from parity.judge.long_sums import drift, mass_of_maxima
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.recipe import Recipe
from parity.testing import check_parity


def test_a_log_sum_exp_near_zero_rounds_absolutely():
    """log(Σ exp) of a mass near 1: float32 rounds the sum, whatever little remains of its logarithm."""
    x = torch.tensor([[0.5, 0.4998]], dtype=torch.float64).log()
    real = (torch.logsumexp(x.float(), -1).double() - torch.logsumexp(x.float().double(), -1)).abs()
    spread = torch.stack(
        [(under(Recipe(), "fp32", lambda v: torch.logsumexp(v, -1), x, seed=k) - x.logsumexp(-1)) for k in range(24)]
    )
    assert 2.0**-25 < float(spread.abs().max()) < 8 * 2.0**-24
    assert float(real) <= float(spread.abs().max())


def test_the_mass_of_a_maximum_grows_until_a_larger_one_comes():
    """Online: 0.1 has met itself and the 0.05 behind it; 0.4 stays the largest, beside what equals it."""
    p = torch.tensor([[0.1, 0.05, 0.4, 0.02, 0.4, 0.03]], dtype=torch.float64)
    expected = torch.tensor([[0.15, 0, 1, 0, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(mass_of_maxima(p.log(), -1), expected)
    torch.testing.assert_close(mass_of_maxima(p.T.log(), 0), expected.T)
    banned = torch.tensor([[-torch.inf, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(mass_of_maxima(banned, -1), banned.exp())


def test_the_gradient_of_a_maximum_cancels_but_for_rounding_in_half_of_the_replicas():
    logits = torch.zeros(200, 1, 1025, dtype=torch.float64).normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
    logits[:] = logits[:1]
    largest, z = int(logits[0, 0].argmax()), logits.clone().requires_grad_()
    with MonteCarlo(Recipe(), "fp32", 0) as mode:
        out = torch.log_softmax(z, -1)[..., 0].sum()
        mode.backward = True
        (grad,) = torch.autograd.grad(out, z)
    off = (grad[:, 0, largest] + logits[0, 0].softmax(-1)[largest]).abs() * 2**24
    assert 60 < int((off > 0.1).sum()) < 120
    assert 3 < float(off.max()) < 40


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
            torch.stack([under(Recipe(), "fp32", torch.mm, a.double(), w.double(), seed=s) - truth for s in range(40)])
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
    stack = torch.stack([under(Recipe(), "fp32", torch.sum, terms.double(), seed=s) for s in range(12)])
    assert abs(float(total) / float(exact) - 1) > 8 * 2.0**-24
    assert judge(total, Unit(exact, stack, scalar=True), torch.float32).agrees
    assert not judge(exact * (1 + 1e-4), Unit(exact, stack, scalar=True), torch.float32).agrees


LOGITS = {
    "walk": lambda z: z,
    "equal": lambda z: (20 * z).tanh(),
    "lost": lambda z: torch.where(torch.arange(z.shape[-1]) == 3, 20.0, z),
    "rounded": lambda z: z.bfloat16().double(),
}


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("kind", LOGITS)
def test_the_drift_is_that_of_float32(kind, lanes):
    """Beside additions in turn, made one by one: random terms, equal ones, small ones beside a large one, few values."""
    z = LOGITS[kind](torch.randn(4, 32016, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    x = (z - z.amax(-1, keepdim=True)).exp().float()
    sums = np.cumsum(x.view(4, -1, lanes).numpy(), axis=1, dtype=np.float32)[:, -1]
    real = torch.from_numpy(sums).double().sum(-1) - x.double().sum(-1)
    one, unit = torch.ones(4, 1, 1, dtype=torch.float64), 2.0**-24 * x.double().sum(-1)
    for terms, dim in ((x.unsqueeze(1), -1), (x.unsqueeze(2), 1)):
        found = drift(terms.double(), dim, one * lanes, one).reshape(4)
        assert bool(((found - real).abs() < 8 * unit).all()), ((found - real) / unit, real / unit)
    assert float((real / unit).abs().max()) > 2


@pytest.mark.parametrize("rows", [(1361,), (1, 1361), (7, 195)], ids=str)
def test_a_gradient_that_sums_equal_terms_drifts_as_float32_does(rows):
    """Fourteen hundred equal gradients of one entry, added in turn (`bias[ids]`): a walk of 19 units, and this is 100.

    Over batch and time as over one dimension.
    """
    found, n = [], math.prod(rows)
    for seed in range(6):
        g = torch.rand(1, 3, generator=torch.Generator().manual_seed(seed)) + 0.5
        real = torch.zeros(1, 3).index_put_([torch.zeros(n, dtype=torch.long)], g.expand(n, 3), accumulate=True)
        exact = n * g.double()
        bias = torch.zeros(24, *(1 for _ in rows), 3, dtype=torch.float64, requires_grad=True)
        with MonteCarlo(Recipe(), "fp32", seed) as mode:
            out = bias.expand(24, *rows, 3)
            mode.backward = True
            (replicas,) = torch.autograd.grad(out, bias, g.double().expand(24, *rows, 3))
        spread = (replicas.view(24, 1, 3) - exact).square().mean(0).sqrt()
        found.append(float(((real.double() - exact).abs() / spread).max()))
    assert 0.5 < max(found) < 3.0, found


def test_what_is_lost_in_a_sum_of_blocks_adds_no_rounding():
    """One large part among 255 far below half a unit of it: it and its first sum are rounded, however many follow."""
    mode = MonteCarlo(Recipe(accumulate="bf16", partials=256, partial_terms=1), "bf16", 1)
    parts = torch.full((16, 1, 256), 2.0**-14)
    parts[..., 0] = 1.0
    total = mode._added(parts.double(), torch.ones(16, 256, 1, dtype=torch.float64))
    assert float((total - 1).abs().amax()) <= 2 * 2.0**-8 + 255 * 2.0**-14


def test_partial_gradients_below_the_normal_numbers_are_off_by_their_quantum():
    """Eight parts of 3e-6 in float16, each rounded to steps of 6e-8: products and sums of replicas are off as far."""
    parts = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)).double() * 3e-6
    real = (parts.half().double().sum(-1) - parts.sum(-1)).square().mean().sqrt()
    for add in (lambda x: (x @ torch.ones(8, 1, dtype=torch.float64))[..., 0], lambda x: x.sum(-1)):
        for size, least, most in (
            (1.0, 0.8, 1.3),
            (1e-4, 0.009, 0.035),  # all are lost: 0.0175
            (1e6, 1e5, 2e5),
        ):
            mode = MonteCarlo(Recipe(elementwise="fp32", accumulate="fp16", partials=8), "fp16", 1)
            mode.backward = True
            with mode:
                out = add(parts * size)
            spread = (out - add(parts * size)).square().mean().sqrt()
            assert least * float(real) <= float(spread) <= most * float(real), (size, float(spread / real))


@pytest.mark.parametrize("terms", [4, 8, 12, 16])
def test_equal_partial_gradients_of_half_a_quantum_are_off_to_the_same_side(terms):
    """Each of 0.49 quanta is 0 in float16, each of 0.6 is 1: a sum of n is off by n of these errors."""
    for size in (0.49, 0.6, 1.4):
        parts = torch.full((32, 40, terms), size * 2.0**-24, dtype=torch.float64)
        exact, real = parts.sum(-1), parts.half().double().sum(-1)
        for add in (lambda x: (x @ torch.ones(32, terms, 1, dtype=torch.float64))[..., 0], lambda x: x.sum(-1)):
            mode = MonteCarlo(Recipe(elementwise="fp32", accumulate="fp16", partials=terms), "fp16", 1)
            mode.backward = True
            with mode:
                out = add(parts)
            off = (out - exact).square().sum(-1).mean().sqrt()
            assert float((real - exact)[0].norm()) <= 3 * float(off), (size, float((real - exact)[0].norm() / off))


def test_a_stack_of_one_replica_begins_with_the_last_part_as_often_as_not():
    parts = [torch.full((1, 1), v, dtype=torch.float64) for v in [1.0, *[2.0**-10] * 63]]
    found = {
        round(float(MonteCarlo(Recipe(accumulate="bf16", partials=64), "bf16", seed).lost(parts)), 3)
        for seed in range(8)
    }
    assert min(found) < -0.04 and max(found) > -0.04, found


def test_a_product_of_no_terms_has_replicas():
    """A head's gradient of no rows is one: zeros, of a wrong kernel too."""
    found = check_parity(
        lambda x, w: x @ w + 1e-3, lambda x, w: x @ w, {"x": torch.zeros(3, 0), "w": torch.zeros(0, 4)}
    )
    assert not found.agrees
