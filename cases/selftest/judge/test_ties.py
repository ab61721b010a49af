"""What is equal rounds equally in a replica, unless real code may compute it apart."""

import math

import pytest
import torch

from cases.selftest.judge.arithmetic import under
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.recipe import UNIT_ROUNDOFF, Recipe
from parity.judge.stages import stored
from parity.testing import check_parity


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
            with MonteCarlo(recipe, "fp16", seed):
                kept = x * 1.0 if recipe.elementwise == "fp16" else stored(x, "logits")
            assert float(kept.max() - kept.min()) < 1e-37
            errors.append(abs(float(kept.mean() - x.mean())) / 2.0**-24)
        assert 0.1 < max(errors) <= 0.5


def test_equal_rows_have_equal_log_probs_in_a_narrow_dtype():
    """-log 7 for every token of every flat row: what adding log β to it rounds by is common to all, not dithered."""
    z = torch.zeros(3, 50, 7, dtype=torch.float64)
    found = under(Recipe(softmax="bf16"), "bf16", lambda v: torch.log_softmax(v, -1), z)
    assert float((found.amax((1, 2)) - found.amin((1, 2))).max()) < 1e-6
    assert float((found + math.log(7)).abs().max()) > 1e-4


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_replicas_round_on_the_own_grid_of_the_dtype(count):
    """A float32 head cast to bf16 may be the teacher's, and then every gradient is 0: no random grid shows that."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    mode = MonteCarlo(Recipe(), "bf16", 1, own_grids=count)
    with mode:
        stored = mode.store(x, "bf16")
    own = [torch.equal(stored[r], x[r].bfloat16().double()) for r in range(4)]
    assert own == [r < count for r in range(4)]
    with mode:
        assert mode.store(x[0, 0], "bf16").dim() == 0


OPERATIONS = {
    "product": lambda x: x @ torch.linspace(-1, 2, 48, dtype=torch.float64).view(6, 8).repeat(len(x), 1, 1),
    "elementwise": lambda x: (x * x).sqrt(),
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


def test_an_exponential_is_off_to_one_side():
    """By up to u/2 in the mean of a replica, whatever its arguments: exp(r) - r - 1 of small r keeps nothing else."""
    r = torch.linspace(-0.02, 0.02, 20_001, dtype=torch.float64).repeat(200, 1)
    off = (under(Recipe(), "fp32", torch.exp, r) / r.exp() - 1).mean(1) / UNIT_ROUNDOFF["fp32"]
    assert 0.35 < off.abs().max() < 0.55 and (off > 0.1).any() and (off < -0.1).any()


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
        with MonteCarlo(Recipe(), "fp32", 1):
            y = x / constant
            (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
        shares = (y.detach() * constant / x.detach() - 1).mean(1)
        assert (float(shares.abs().mean()) > 2.0**-27) == rounds
        if rounds:
            beside = (g * constant - 1).mean(1)  # one rounding of a common value is on top
            assert float((beside - shares).abs().max()) < 1.1 * 2.0**-24 < 4 * float(shares.abs().max())


SEEING = {
    **{name: getattr(torch, name) for name in "count_nonzero nonzero any all sign floor ceil logical_not log".split()},
    **{name: lambda z, by=name: getattr(torch, by)(z, 0.0) for name in "gt ge lt le eq ne".split()},
    **{
        name: lambda z, by=name: getattr(torch, by)(z, z + 0.0) for name in ("logical_and", "logical_or", "logical_xor")
    },
    "bool": lambda z: z.bool(),
    "of a norm": lambda z: z.square().sum(-1).abs().sqrt() > 0,
}


@pytest.mark.parametrize("see", list(SEEING.values()), ids=list(SEEING))
def test_an_exact_zero_is_seen_as_zero(see):
    x = torch.linspace(1, 2, 12, dtype=torch.float64).repeat(24, 1)
    for zero in (lambda v: v * 0.0, lambda v: 3e9 * (v - v)):
        assert torch.equal(under(Recipe(), "fp32", lambda v: see(zero(v)), x), see(zero(x)))  # noqa: B023


@pytest.mark.parametrize("instead", [0.0, torch.nan])
def test_a_row_without_terms_has_a_logarithm_of_minus_infinity(instead):
    x, kept = torch.linspace(-3, 2, 24).view(4, 6), torch.arange(24).view(4, 6) > 5

    def log_sum_exp(x, kept):
        return torch.where(kept, x, -torch.inf).exp().sum(-1).log()

    inputs = {"x": x, "kept": kept}
    assert check_parity(log_sum_exp, log_sum_exp, inputs).agrees
    wrong = check_parity(lambda x, kept: torch.where(kept.any(-1), log_sum_exp(x, kept), instead), log_sum_exp, inputs)
    assert wrong.wrong["output"].gate == "structure"


def test_zeros_tie():
    """Of equal zeros any may be the largest."""
    x = torch.linspace(1, 2, 12, dtype=torch.float64).repeat(24, 1)
    assert len(under(Recipe(), "fp32", lambda v: (v * 0.0).argmax(-1), x).unique()) > 6


def last_of_equal(x, k):
    values, index = x.flip(-1).sort(dim=-1, descending=True, stable=True)
    return values[..., :k], x.shape[-1] - 1 - index[..., :k]


SORTS = {
    "topk": lambda x, k: tuple(x.topk(k)),
    "sort": lambda x, k: tuple(part[..., :k] for part in x.sort(descending=True)),
    "argsort": lambda x, k: (lambda order: (x.gather(-1, order), order))(x.argsort(-1, descending=True)[..., :k]),
}


@pytest.mark.parametrize("definition", list(SORTS.values()), ids=list(SORTS))
def test_equal_numbers_come_in_any_order(definition):
    """torch promises none but of a stable sort: a kernel that takes the last of equal logits is as right."""
    x = (torch.linspace(-3, 3, 96).view(6, 16).cos() * 3).round().index_fill(1, torch.tensor(3), -torch.inf)
    inputs = {"x": x, "k": 4}
    assert check_parity(last_of_equal, definition, inputs, protocol="none").agrees
    wrong = check_parity(lambda x, k: (x.topk(k).values, x.argsort(-1)[..., :k]), definition, inputs)
    assert "output[1]" in wrong.wrong


@pytest.mark.parametrize("instead", [lambda i: i + 777, lambda i: i - 50, lambda i: i[..., :1].expand(i.shape)])
def test_among_equal_numbers_an_index_is_one_of_theirs_and_stands_once(instead):
    definition = lambda x: x.topk(3).indices  # noqa: E731
    found = check_parity(
        lambda x: instead(definition(x)), definition, {"x": torch.ones(4, 6)}, grad=(), protocol="none"
    )
    assert not found.agrees


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint8, torch.bool, torch.int64])
def test_every_dtype_of_integers_is_judged(dtype):
    function = lambda x: (x > 0).to(dtype)  # noqa: E731
    inputs = {"x": torch.linspace(-1, 1, 12).view(3, 4)}
    assert check_parity(function, function, inputs, grad=(), protocol="none").agrees
    assert not check_parity(lambda x: (x <= 0).to(dtype), function, inputs, grad=(), protocol="none").agrees


@pytest.mark.parametrize("seed", range(8))
def test_one_index_that_rounding_decides_is_not_wrong(seed):
    """Of two products an ulp apart the smaller is the larger in one replica of 17."""
    x = torch.full((1, 2), 1.5)
    x[0, 1] = torch.nextafter(x[0, 0], torch.tensor(2.0))
    inputs = {"x": x, "y": torch.full((1, 2), 1.1 + seed / 100)}
    found = check_parity(
        lambda x, y: 1 - (x * y).argmax(-1), lambda x, y: (x * y).argmax(-1), inputs, grad=(), protocol="none"
    )
    assert found.agrees


@pytest.mark.parametrize("instead", [0.0, torch.nan, -1000.0])
@pytest.mark.parametrize("far", [-300.0, -600.0])
def test_the_logarithm_of_a_number_below_float32_is_judged(instead, far):
    """Of the definition it is finite: a stable function has it."""
    x = torch.zeros(4, 6).index_fill(1, torch.tensor(2), far)
    column = torch.arange(6) == 2
    definition = lambda x: x.softmax(-1).log()  # noqa: E731
    found = check_parity(
        lambda x: x.log_softmax(-1).masked_fill(column, instead), definition, {"x": x}, grad=(), protocol="none"
    )
    assert not found.agrees
    assert check_parity(lambda x: x.log_softmax(-1), definition, {"x": x}, grad=(), protocol="none").agrees


def test_a_stable_sort_has_one_order():
    def stable(x, k):
        return tuple(part[..., :k] for part in x.sort(dim=-1, descending=True, stable=True))

    found = check_parity(last_of_equal, stable, {"x": torch.ones(4, 6), "k": 2}, protocol="none")
    assert "output[1]" in found.wrong


def test_twelve_replicas_that_agree_by_chance_decide_no_tie():
    """Of 20,000 ties of two five had the same winner in all of them."""
    x = {"x": torch.zeros(20_000, 2)}
    assert check_parity(
        lambda x: 1 - x.topk(1).indices, lambda x: x.topk(1).indices, x, grad=(), protocol="none"
    ).agrees


@pytest.mark.parametrize(
    "function",
    [lambda x: (x.softmax(-1) > 0).sum(-1).float(), lambda x: (x * 1e-25) * 1e25, lambda x: (x * 1e-50 > 0).sum(-1)],
)
def test_what_float32_underflows_may_be_zero(function):
    for x in (torch.linspace(-120, 0, 96).view(4, 24), torch.linspace(1e-30, 1e-28, 24)[None]):
        assert check_parity(function, function, {"x": x}, grad=(), protocol="none").agrees


def test_a_count_of_what_is_not_zero_is_judged():
    """Beside replicas in which a masked entry is 1e-38, a mean of all entries had 0.2 times the allowed error."""
    x, mask = torch.linspace(-3, 2, 48).view(6, 8), (torch.arange(48).view(6, 8) % 5 < 2).float()

    def masked_mean(x, mask):
        return (x * mask).sum(-1) / ((x * mask).detach() != 0).sum(-1).clamp(min=1)

    inputs = {"x": x, "mask": mask}
    assert check_parity(masked_mean, masked_mean, inputs, grad=("x",)).agrees
    assert not check_parity(lambda x, mask: (x * mask).mean(-1), masked_mean, inputs, grad=("x",)).agrees
