"""Every gate fails on the error it is for, as the tightest one, and headroom is error ÷ allowed to the digit."""

import math

import pytest
import torch

from parity.judge.gates import Unit, judge

U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
N = 4096


def noise(shape, seed):
    """Uniform in ±1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1


def unit(size=1e-6, rows=64, **fields):
    """A (rows, N/rows) quantity of about 1 to 2, and replicas with independent relative errors of `size`."""
    exact = noise((rows, N // rows), 1)
    exact = torch.sign(exact) * (1 + exact.abs())
    replicas = exact * (1 + size * noise((12, *exact.shape), 2))
    return Unit(exact, replicas, **fields)


def honest(u, size=1e-6):
    """A value with the errors of one more replica."""
    return u.exact * (1 + size * noise(u.exact.shape, 3))


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_a_float64_value_beside_replicas_without_a_spread(error):
    """Rows of zeros, as ignored tokens are: no unit is 0, and no agreement 0/0."""
    u = Unit(torch.zeros(3, dtype=torch.float64), torch.zeros(12, 3, dtype=torch.float64), entrywise=True)
    found = judge(u.exact + error, u, torch.float64)
    assert found.agrees == (error == 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_zero_gradient_fails(dtype, scale):
    u = unit(size=U[dtype])
    u = Unit(u.exact * scale, u.replicas * scale)
    found = judge(torch.zeros(u.exact.shape, dtype=dtype), u, dtype)
    assert found.headroom > 20
    assert not found.allclose


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("entrywise", [False, True])
def test_what_is_not_finite_fails(bad, entrywise):
    u = unit(entrywise=entrywise)
    v = honest(u)
    v[3, 3] = bad
    found = judge(v.float(), u, torch.float32)
    assert found.gate == "structure" and found.headroom == math.inf
    assert found.worst[0][0] == (3, 3)
    assert not judge(torch.full_like(v, bad).float(), u, torch.float32).agrees


def test_infinities_of_the_oracle_are_wanted_with_their_sign():
    u = unit()
    exact, replicas = u.exact.clone(), u.replicas.clone()
    exact[0, 0], replicas[:, 0, 0] = -math.inf, -math.inf
    u = Unit(exact, replicas)
    v = u.exact.clone().float()
    assert judge(v, u, torch.float32).agrees
    for wrong in (0.0, math.inf, math.nan):
        v[0, 0] = wrong
        found = judge(v, u, torch.float32)
        assert not found.agrees and found.gate == "structure", wrong


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "missing"),
        (torch.zeros(3), "shape (3,)"),
        (torch.zeros(64, 64, dtype=torch.int64), "int64"),
        (torch.zeros(64, 64, dtype=torch.bfloat16), "dtype bf16, expected fp32"),
        (torch.zeros(64, 64, dtype=torch.float64), "expected fp32"),
        (torch.zeros(64, 64, 1), "shape"),
    ],
)
def test_structure(value, says):
    found = judge(value, unit(), torch.float32)
    assert found.gate == "structure" and found.headroom == math.inf
    assert says in found.message


def test_a_leak_through_the_mask_fails_however_small():
    u = unit()
    zero = torch.zeros(64, dtype=torch.bool)
    zero[9] = True
    exact, replicas = u.exact.clone(), u.replicas.clone()
    exact[9], replicas[:, 9] = 0.0, 0.0
    u = Unit(exact, replicas, zero=zero)
    v = exact.float()
    assert judge(v, u, torch.float32).agrees
    v[9, 0] = 1e-44
    found = judge(v, u, torch.float32)
    assert found.gate == "zero" and found.place == (9, 0) and found.headroom == math.inf
    assert "the mask implies exactly 0" in found.message


@pytest.mark.parametrize(
    ("error", "fields", "allowed"),
    [
        (1e-3, {"first_order": 1e-4}, 1e-3),
        (1e-3, {"first_order": 0.0, "terms": 1e4}, 2.0**-24 * 1e4),
        (1e-3, {}, None),
    ],
)
def test_scalar(error, fields, allowed):
    """|e| over the largest of 10·first order, 6·rms e_r, u|o| and u_c·terms."""
    exact = torch.tensor(2.0, dtype=torch.float64)
    replicas = exact + 1e-5 * noise(12, 5)
    allowed = allowed or 6 * float((replicas - exact).square().mean().sqrt())
    found = judge((exact + error).float(), Unit(exact, replicas, scalar=True, **fields), torch.float32)
    assert found.gate == "scalar"
    assert found.headroom == pytest.approx(error / allowed, rel=1e-3)
    assert not judge(torch.tensor(math.nan), Unit(exact, replicas, scalar=True), torch.float32).agrees


def test_counts_are_exact():
    exact = torch.tensor(5 / 7, dtype=torch.float64)
    u = Unit(exact, exact.expand(12), scalar=True, counted=True)
    assert judge(exact.float(), u, torch.float32).agrees
    for wrong in (4 / 7, 5 / 8, 6 / 7, 0.0, math.nan):
        assert not judge(torch.tensor(wrong), u, torch.float32).agrees, wrong
    assert judge(torch.tensor(4 / 7), u, torch.float32).gate == "exact"


def test_headroom_is_error_over_allowed():
    """Every gate recomputed by hand from its formula in the docstring."""
    u = unit(size=1e-3)
    v = honest(u, 2e-3).bfloat16()
    e, o, spread = v.double() - u.exact, u.exact, u.replicas - u.exact
    roundoff = 2.0**-8

    def rms(x):
        return float(x.square().mean().sqrt())

    norms = spread.flatten(1).norm(dim=1)
    norm = float(e.norm()) / max(3 * rms(norms), 3 * roundoff * float(o.norm()))
    top = float(e.abs().max()) / (6 * max(rms(spread.flatten(1).abs().amax(1)), roundoff * float(o.abs().max())))
    row_unit = torch.maximum(spread.norm(dim=-1).square().mean(0).sqrt(), roundoff * o.norm(dim=-1))
    row = float((e.norm(dim=-1) / (6 * row_unit)).max())
    slopes = (spread * o).sum((1, 2)) / o.square().sum()
    share = roundoff / 3**0.5 * float(o.pow(4).sum().sqrt() / o.square().sum())
    floor = max(float(slopes.std(correction=0)), share, 2 * 2.0**-24)
    slope = abs(float((e * o).sum() / o.square().sum())) / (6 * floor + 2 * abs(float(slopes.mean())))
    found = judge(v, u, torch.bfloat16)
    gates = {"structure": 0.0, "norm": norm, "max": top, "row": row, "slope": slope}
    assert found.gates == pytest.approx(gates, rel=1e-9)
    assert found.headroom == max(found.gates.values())
    assert found.max_abs == float(e.abs().max())
    assert found.dist == pytest.approx(float(e.norm()))


def test_a_row_that_is_uncertain_by_a_factor_is_judged_by_a_factor():
    """A probability of 1e-36 is the exponential of a rounded logit: e^±1.8 is honest where the spread is a half."""
    exact = torch.full((1, 400), 1e-6, dtype=torch.float64)
    exact[0, 0] = 1.0
    normal = sum(noise((480, 1, 400), seed) for seed in range(12)) / 2
    replicas = exact * torch.where(exact < 1, (0.5 * normal).exp(), 1.0)
    u = Unit(exact, replicas, entrywise=True)
    v = exact.clone()
    v[0, 7] *= math.exp(1.8)
    assert judge(v.float(), u, torch.float32).agrees
    v[0, 7] = 1e-6 * math.exp(4.5)
    assert not judge(v.float(), u, torch.float32).agrees
    # however uncertain, one with additive noise keeps its six rms: a tail that no replica shows is not allowed for
    u = Unit(exact, exact + 1e-6 * noise((480, 1, 400), 2), entrywise=True)
    v[0, 7] = 1e-6 + 6.2e-6 / 3**0.5
    found = judge(v.float(), u, torch.float32)
    assert not found.agrees and found.gate == "row"


def test_rows_that_are_uncertain_by_orders_of_magnitude_are_judged_by_their_logarithms():
    """Of four thousand rows off by e^±11·N each, one lies beyond all of 480 replicas; one off by e^90 is wrong."""
    normal = sum(noise((481, 4000), seed) for seed in range(12)) / 2
    drawn = 1e-9 * (11 * normal).exp()
    exact = torch.full((4000,), 1e-12, dtype=torch.float64)
    u = Unit(exact, exact + drawn[1:], entrywise=True)
    v = exact + drawn[0]
    found = judge(v.float(), u, torch.float32)
    few = judge(v.float(), Unit(exact, exact + drawn[1:13], entrywise=True), torch.float32)
    assert found.gates["row"] < 1 < few.gates["row"], found.gates  # judged again, with more replicas
    v[5] = 1e-9 * math.exp(79)
    assert judge(v.float(), u, torch.float32).gates["row"] > 1


def test_one_replica_far_off_alone_is_no_tail():
    """Errors that are alike in all replicas but one have no spread of logarithms, however far off that one is."""
    exact = torch.ones(3, 4, dtype=torch.float64)
    replicas = exact + 1e-5 * noise((480, 3, 4), 5)
    replicas[7] += 1.0
    v = exact.clone()
    v[1] += 2.2
    assert judge(v.float(), Unit(exact, replicas), torch.float32).gates["row"] > 1


def test_one_number_may_lie_twice_as_far_as_the_worst_replica():
    """With one entry the norm is one number: three rms would be a 3σ test of it."""
    exact = torch.ones(1, 1, dtype=torch.float64)
    replicas = exact + 1e-3 * torch.tensor([0.1] * 11 + [3.0]).view(12, 1, 1)
    u = Unit(exact, replicas)
    assert judge((exact + 5.9e-3).float(), u, torch.float32).gates["norm"] < 1
    assert judge((exact + 6.1e-3).float(), u, torch.float32).gates["norm"] > 1


def test_a_row_may_lie_twice_as_far_as_its_worst_replica():
    """What one replica in fifty shows is rare and honest: a tail 1 - Σp that is clamped by chance has no rms."""
    exact = torch.ones(2, 4, dtype=torch.float64)
    replicas = exact.repeat(480, 1, 1)
    replicas[::200, 0] += 1e-3
    replicas += 1e-5 * noise((480, 2, 4), 3)
    u = Unit(exact, replicas)
    v = exact.clone()
    v[0] += 1.9e-3
    assert judge(v.float(), u, torch.float32).gates["row"] < 1
    v[0] += 0.2e-3
    assert judge(v.float(), u, torch.float32).gates["row"] > 1
    v = exact.clone()
    v[1] += 1e-3
    assert judge(v.float(), u, torch.float32).gates["row"] > 1


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.01, False)])
def test_equal_values_round_alike(factor, agrees):
    """Of 1/47 bfloat16 holds 0.26 % more: a thousand equal entries all take the same step, and no factor is wrong."""
    exact = torch.full((1024,), 1 / 47, dtype=torch.float64)
    u = Unit(exact, exact * (1 + 1e-7 * noise((12, 1024), 2)), entrywise=True)
    found = judge((exact * factor).bfloat16(), u, torch.bfloat16)
    assert found.agrees is agrees and found.gate == "slope", found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_underflows_has_no_direction(dtype):
    """An oracle far below the dtype's smallest number is zero there, and zero is then right."""
    u = unit()
    tiny = Unit(u.exact * 1e-310, u.replicas * 1e-310)
    assert judge(torch.zeros(u.exact.shape, dtype=dtype), tiny, dtype).agrees
    exact = torch.zeros(2, 4, dtype=torch.float64)
    exact[0, 0] = 1e-320
    last_bit = torch.zeros(2, 4, dtype=dtype)
    last_bit[1, 1] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert judge(last_bit, Unit(exact, exact.expand(12, 2, 4)), dtype).agrees
    assert not judge(torch.ones(u.exact.shape, dtype=dtype), tiny, dtype).agrees


def test_beyond_the_range_of_the_dtype():
    exact = torch.tensor([[1.0, 1e6]], dtype=torch.float64)
    u = Unit(exact, exact.expand(12, 1, 2))
    found = judge(exact.half(), u, torch.float16)
    assert found.agrees and found.undecided == 1
    assert not judge(torch.tensor([[torch.inf, torch.inf]]).half(), u, torch.float16).agrees


def test_replicas_that_do_not_stack_are_refused():
    with pytest.raises(ValueError, match="do not stack"):
        judge(torch.zeros(3), Unit(torch.zeros(3).double(), torch.zeros(12, 4).double()), torch.float32)


@pytest.mark.parametrize(("spread", "agrees"), [(2e4, True), (1e3, False)])
def test_an_infinity_is_judged_as_the_largest_number(spread, agrees):
    """A sum of huge terms that cancel: no replica overflows, and an honest evaluation may."""
    torch.manual_seed(0)
    exact = torch.full((1, 8), 500.0, dtype=torch.float64)
    u = Unit(exact, exact + (spread * torch.randn(60, 1, 8, dtype=torch.float64)).clamp(-6e4, 6e4))
    value = torch.full((1, 8), 500.0).half()
    value[0, 3] = torch.inf
    found = judge(value, u, torch.float16)
    assert found.agrees is agrees
    assert agrees or found.gates["structure"] == math.inf


def test_an_infinity_beside_overflowing_replicas_is_worth_more_replicas():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    calm, wild = torch.tensor([[1.0, 2.0]] * 2).double(), torch.tensor([[1.0, 2.0], [torch.inf, 2.0]]).double()
    infinite, nan = [1.0, torch.inf], [1.0, torch.nan]
    for value, replicas, expected in ((infinite, wild, True), (infinite, calm, False), (nan, wild, False)):
        found = judge(torch.tensor(value), Unit(truth, replicas, entrywise=True), torch.float32)
        assert not found.agrees and found.overflows is expected


def test_a_count_that_rounding_decides_is_held_to_its_replicas_in_16_bits_alone():
    """A log-prob of -8.91 in bf16 is on the other side of a clip in some replicas."""
    exact, replicas = torch.tensor(0.0, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    replicas[3] = 1 / 3
    judged = []
    for compute in ("fp32", "bf16"):
        unit = Unit(exact, replicas, compute, scalar=True, counted=True)
        judged += [judge(torch.tensor(value), unit, torch.float32) for value in (1 / 3, 1.0)]
    assert [j.agrees for j in judged] == [False, False, True, False]
    assert [j.open for j in judged] == [False, False, True, True]
