"""Drawn inputs: what a description covers, ids that hold a case, and failures that shrink to the smallest one."""

import collections
import dataclasses
import math
import re

import hypothesis
import pytest
import torch

from cases.selftest.judge.operations import OPERATIONS, hand_rms
from cases.selftest.mutants.steps import through
from parity.judge import assertion
from parity.judge.gates import as_clear
from parity.judge.problem import UPSTREAM
from parity.testing import ParityError, draw, index, tensor
from parity.testing import definitions as D
from parity.testing.drawing import LAYOUTS, REPEATS, VALUES

RMS = OPERATIONS["rms_norm"].drawn
NARROW = (torch.uint8, torch.int8, torch.int16)
TABLE = draw(ids=index("N", below="V"), weight=tensor("V", "H"), sizes={"N": 1025, "H": 33})


def test_ids_hold_a_case():
    for name, operation in OPERATIONS.items():
        for case in operation.drawn.cases(5):
            again = operation.drawn.case(str(case))
            assert str(again) == str(case), name
            for key, value in case.inputs.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value.nan_to_num(), again.inputs[key].nan_to_num())
                    assert value.stride() == again.inputs[key].stride()
                else:
                    assert value == again.inputs[key]
    right = next(str(case) for case in RMS.cases(24) if "offset" in case.values.values() and case.sizes["N"] > 1)
    changed = [("/N:", "/N:-"), ("offset", "bogus"), ("upstream:", "upstream:x"), (right.partition("/")[0], "fp8")]
    layout = re.sub(r"\+\w+", "+bogus", right, count=1)
    wrong = ["fp32", "fp32/N:1", "fp32/N:1/H:2/eps:3/upstream:random/grad:all/seed:0", layout]
    for one in [*wrong, *(right.replace(*pair, 1) for pair in changed)]:
        with pytest.raises(ValueError, match="no id of this description"):
            RMS.case(one)


def test_a_few_dozen_cases_cover_what_breaks_kernels():
    cases = RMS.cases(120)
    sizes = {c.sizes["H"] for c in cases}
    assert {1, 2047, 2048, 2049} <= sizes and {s % 2 for s in sizes} == {0, 1}
    for unit in (16, 64, 128, 256, 1024):
        assert {s % unit for s in sizes if s >= unit - 1} >= {0, 1, unit - 1}
    assert {c.sizes["N"] for c in cases} >= {0, 1, 64}
    assert {c.layouts.get("x", "contiguous") for c in cases} == set(LAYOUTS)
    assert {c.values.get("x", "plain") for c in cases} == set(VALUES)
    assert {c.dtype for c in cases} == {"fp32", "bf16", "fp16"}
    assert {c.upstream for c in cases} == {"random", "fine", "ones", "zeros", "scaled"}
    assert {c.grad for c in cases} == {"all", "x", "weight", "none"}
    assert {c.options["eps"] for c in cases} == {1e-6, 1e-5}
    ids = [c for c in TABLE.cases(60) if c.values.get("ids") == "repeated"]
    assert any(len(set(c.inputs["ids"].tolist())) == 1 and c.sizes["N"] > 1000 for c in ids)
    assert {c.values.get("ids", "plain") for c in TABLE.cases(60)} == set(REPEATS)
    ends = [c for c in draw(ids=index("N", below=4096)).cases(60) if c.values.get("ids") == "edges"]
    assert all(set(c.inputs["ids"].tolist()) == {0, 4095} for c in ends if c.sizes["N"] > 30)
    assert any(not c.sizes["N"] for c in TABLE.cases(60))
    rows = draw(weight=tensor("V", "H"), ids=index("N", below="V")).cases(60)
    assert all(c.sizes["V"] for c in rows) and max(c.sizes["N"] for c in rows) > 2000
    assert any(t.abs().max() > 2.0**40 for c in cases if c.dtype == "fp32" and (t := c.inputs["x"]).numel())
    assert all(t.numel() <= 1 << 16 for c in cases for t in (c.inputs["x"], c.inputs["weight"]))


@pytest.mark.parametrize("seed", range(3))
def test_twenty_four_cases_meet_each_other(seed):
    """Dtype, values, sizes and gradients were dealt without each other: a third of the values never came in a dtype, and the one
    row of one had no gradient."""
    cases = dataclasses.replace(RMS, seed=seed).cases()
    assert len({(c.dtype, c.values.get("x", "plain")) for c in cases}) == 24
    moved = [c for c in cases if c.grad in ("all", "x") and c.upstream != "zeros" and c.sizes["N"]]
    assert len(moved) >= 13 and len({(c.dtype, c.upstream) for c in moved}) >= 7
    assert sum(not c.sizes["N"] for c in cases) == 2
    for name, other in ("NH", "HN"):
        ones = [c for c in cases if c.sizes[name] == 1]
        assert len(ones) == 2 and any(c.sizes[other] > 1 for c in ones)
        assert all((c.upstream, c.grad) == ("random", "all") for c in ones)
    short = draw(x=tensor("N", "H"), sizes={"N": (0, 3), "H": (1, 4)}, seed=seed).cases()
    assert sum(not c.sizes["N"] for c in short) == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["rms_norm", "attention"])
def test_each_dtype_has_rows_far_below_zero_and_the_largest_sizes(seed, name):
    """A largest value that begins at 0 is right of all but the former, a count in bfloat16 of all but the latter."""
    drawn = dataclasses.replace(OPERATIONS[name].drawn, seed=seed, device="cpu")
    cases, first = drawn.cases(), next(iter(drawn.tensors))
    rows = [(c.dtype, row.float()) for c in cases for row in c.inputs[first] if c.values.get(first) == "offset"]
    assert {dtype for dtype, row in rows if row.numel() and row.max() < -104} == {"fp32", "bf16", "fp16"}
    assert any(row.numel() and row.min() > 104 for _, row in rows)
    for n, (_, high) in drawn.sizes.items():
        assert {c.dtype for c in cases if c.sizes[n] >= high} == {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", ["VH", "NV", "VHO"])
def test_ids_that_fewer_bits_do_not_hold_come(seed, shape):
    """Casts of them to uint8, int8 and int16 were right of all 24 cases: a table had 64 rows at most."""
    cases = draw(table=tensor(*shape), ids=index("N", below="V"), seed=seed, device="cpu").cases()
    lost = {(c.dtype, to) for c in cases for to in NARROW if not torch.equal(ids := c.inputs["ids"], ids.to(to).long())}
    assert lost >= {(dtype, to) for dtype in ("fp32", "bf16", "fp16") for to in NARROW[:2]}
    assert ("fp32", torch.int16) in lost or shape == "VHO"  # definitions loop over experts
    assert all(c.inputs["table"].numel() <= 1 << 16 for c in cases)


def test_the_work_of_the_largest_cases_is_limited():
    """Of all sizes together: replicas of products, and of rows that ids take from a table, are made many times over."""
    product = {"x": tensor("N", "A"), "w": tensor("A", "B"), "v": tensor("B", "C"), "u": tensor("C", "D")}
    lookup = {"table": tensor("V", "H"), "x": tensor("N", "K"), "ids": index("N", below="V")}
    for tensors, name, limit in ((product, "N", 1 << 22), (lookup, "V", 1 << 18)):
        sizes = [c.sizes for seed in range(4) for c in draw(**tensors, seed=seed).cases() if c.sizes[name] > 64]
        assert limit / 8 < max(math.prod(s.values()) for s in sizes) <= limit


def by_the_first_block(x):
    """Softmax less the largest of the first 1,024 columns, which overflows where a later one is far larger."""
    z = x.float()
    e = (z - z[..., :1024].amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


@pytest.mark.parametrize("seed", range(3))
def test_each_dtype_has_rows_whose_largest_value_is_not_in_the_first_block(seed):
    cases = draw(x=tensor("N", "H"), seed=seed, device="cpu").cases()
    wrong = [c for c in cases if not c.check_parity(by_the_first_block, D.softmax, protocol="none").agrees]
    assert {c.dtype for c in wrong if c.sizes["H"] == 2049} == {"fp32", "bf16", "fp16"}
    assert all(c.check_parity(lambda x: x.float().softmax(-1).to(x.dtype), D.softmax).agrees for c in wrong)


def test_a_scalar_stays_one():
    found = draw(x=tensor("N"), s=tensor(), device="cpu").cases()
    assert {case.inputs["s"].shape for case in found} == {torch.Size([])}
    assert {"offset"} < {case.values.get("s") for case in found}


def test_six_dimensions_meet_their_largest_sizes():
    drawn = draw(x=tensor("A", "B"), y=tensor("C", "D"), z=tensor("E", "F"), sizes=dict.fromkeys("ABCDEF", (0, 40)))
    for n in "ABCDEF":
        assert {c.dtype for c in drawn.cases() if c.sizes[n] == 40} == {"fp32", "bf16", "fp16"}
        assert any(c.sizes[n] == 0 for c in drawn.cases())


def test_drawn_ids_may_be_changed():
    """As of a cross entropy of which some targets are ignored."""
    ids = index("N", below="V", then=lambda ids: ids.where(ids % 5 > 0, -100))
    found = torch.cat([case.inputs["target"] for case in draw(target=ids, sizes={"V": (5, 64)}).cases(3)])
    assert bool((found == -100).any()) and bool(((found == -100) | (found % 5 > 0)).all())


def test_a_field_that_says_nothing_is_refused():
    with pytest.raises(TypeError, match="scale"):
        index("N", below="V", scale=2)
    for wrong in ({"values": ("tied",)}, {"layouts": ("strided",)}):
        with pytest.raises(ValueError, match="is not among"):
            tensor("N", **wrong)


def test_values_stay_while_shapes_shrink():
    sizes, rest = ("N:9/H:40", "N:4/H:7"), "eps:1e-06/upstream:random/grad:all/seed:3"
    long, short = (RMS.case(f"fp32/{size}/{rest}") for size in sizes)
    assert torch.equal(long.inputs["x"][:4, :7], short.inputs["x"])


def ignores_strides(x, weight, eps):
    memory = torch.as_strided(x, x.shape, (x.shape[-1], 1), x.storage_offset()) if x.numel() else x
    return hand_rms(memory, weight, eps)


def loses_a_tail(x, weight, eps):
    return hand_rms(x, torch.cat([weight[: weight.shape[0] // 16 * 16], 0 * weight[weight.shape[0] // 16 * 16 :]]), eps)


def wrong_at_one(x, weight, eps):
    return hand_rms(x, weight, eps) * (2 if x.shape[-1] == 1 else 1)


def always_both(x, weight, eps):
    out = hand_rms(x, weight, eps)
    return out if weight.requires_grad or not x.requires_grad else out.detach() + 0 * x


def far_from_zero(x, weight, eps):
    wide = x.float()
    square = (wide - 30).square().mean(-1, keepdim=True) + 60 * wide.half().float().mean(-1, keepdim=True) - 900
    return (wide * torch.rsqrt(square + eps) * weight.float()).to(x.dtype)


def takes_ones(x, weight, eps):
    """A backward that knows upstream gradients of ones alone."""
    return through(hand_rms(x, weight, eps), lambda g: torch.where(g.abs() > 300, g * 0.5, g))


FAULTS = (ignores_strides, loses_a_tail, wrong_at_one, always_both, far_from_zero, takes_ones)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_shrunk_to_an_id(fault):
    failure = None
    for case in (
        c for c in RMS.cases(60) if c.layouts.get("x") != "expanded"
    ):  # one row of memory is read beyond its end
        try:
            case.assert_parity(fault, D.rms_norm, protocol="none")
        except ParityError as error:
            failure = error
            break
    assert failure is not None
    smallest = RMS.case(failure.parity.case)
    assert f"  case     {smallest}" in str(failure)
    assert smallest.sizes["N"] <= 32 and smallest.sizes["H"] <= 8
    size = case.check_parity(fault, D.rms_norm, protocol="none").headroom
    assert as_clear(smallest.check_parity(fault, D.rms_norm, protocol="none").headroom, size)
    simpler = [RMS.case(c) for c in map(str, smallest._simpler()) if c != str(smallest)]
    others = [c.check_parity(fault, D.rms_norm, protocol="none") for c in simpler]
    assert all(other.agrees or not as_clear(other.headroom, size) for other in others)


class SumInBlocks(torch.autograd.Function):
    """A weight whose gradient is summed over blocks of 16 rows in its dtype; with float32 in between it is right."""

    @staticmethod
    def forward(ctx, x, weight, eps, kept):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(normed, weight)
        ctx.kept = kept
        return (normed * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        normed, weight = ctx.saved_tensors
        total = torch.zeros_like(weight, dtype=ctx.kept or weight.dtype)
        for rows in (g.float() * normed).split(16):
            total += rows.sum(0)
        return None, total.to(weight.dtype), None, None


def by_the_largest(x, weight, eps):
    """RMSNorm of x ÷ max |x|, lest a square overflow: 0/0 in a row of zeros."""
    wide = x.float()
    large = wide.abs().amax(-1, keepdim=True).detach()
    small = wide / large
    normal = small * (small.square().mean(-1, keepdim=True) + eps / large**2).rsqrt()
    return (normal.to(x.dtype).float() * weight.float()).to(x.dtype)


def no_gradient_of_zeros(x, bias):
    """x + bias, which leaves a bias of zeros out, and with it the bias's gradient."""
    return x + (bias if bias.any() else 0 * bias)


@pytest.mark.parametrize("seed", range(3))
def test_whole_rows_and_vectors_are_zero(seed):
    """As hidden states of padding and a bias at the start of training are."""
    for_rows = dataclasses.replace(RMS, seed=seed).cases()
    with pytest.raises(ParityError, match="NaN"):
        [
            case.assert_parity(by_the_largest, D.rms_norm, protocol="none")
            for case in for_rows
            if case.inputs["x"].numel()
        ]
    biased = draw(x=tensor("N", "H"), bias=tensor("H"), seed=seed).cases()
    with pytest.raises(ParityError, match="grad_bias"):
        [case.assert_parity(no_gradient_of_zeros, lambda x, bias: x + bias, protocol="none") for case in biased]


@pytest.mark.parametrize("seed", range(6))
def test_one_case_of_24_has_equal_sizes(seed):
    """Where a kernel that exchanges two dimensions reads no memory of others: it shows in its values alone."""
    cases = draw(x=tensor("N", "H"), weight=tensor("H"), seed=seed).cases()
    assert any(case.sizes["N"] == case.sizes["H"] > 1 for case in cases)


@pytest.mark.parametrize("seed", range(3))
def test_a_weight_s_gradient_summed_over_blocks_in_16_bits_is_found(seed):
    """Not in each tall case: where few rows are large, a sum of them has few roundings."""
    cases = [c for c in dataclasses.replace(RMS, seed=seed).cases() if c.sizes["N"] > 1000]
    assert {(c.dtype, c.sizes["N"]) for c in cases} == {("fp32", 1025), ("bf16", 1025), ("fp16", 1025)} and len(
        cases
    ) == 3

    def agree(kept):
        sums = lambda x, weight, eps: SumInBlocks.apply(x.detach(), weight, eps, kept)  # noqa: E731
        return [c.check_parity(sums, D.rms_norm, grad=("weight",), protocol="none").agrees for c in cases]

    assert not all(agree(None)) and all(agree(torch.float32))


def test_a_failure_is_explained_once(monkeypatch):
    """An explanation costs many times the verdict; every smaller case that failed had one."""
    asked = []
    exact = assertion.right_in_float64
    monkeypatch.setattr(assertion, "right_in_float64", lambda *a: asked.append(a) or exact(*a))
    monkeypatch.setattr(
        assertion, "_explained", lambda *a: pytest.fail("a hint says what is wrong: no recipe is sought")
    )
    case = RMS.case("bf16/N:7/H:17/eps:1e-06/x:plain+sliced/upstream:random/grad:all/seed:3")
    with pytest.raises(ParityError) as failure:
        case.assert_parity(loses_a_tail, D.rms_norm)
    assert len(asked) == 1
    found = failure.value.parity
    whole = RMS.case(found.case).check_parity(loses_a_tail, D.rms_norm)
    assert whole.kind == "logic" and f"  case     {found.case}\n" in found.message
    assert whole.message == found.message.replace(f"  case     {found.case}\n", "")


def test_a_repeated_index_and_a_crash():
    def loses_repeats(ids, weight):
        class Rows(torch.autograd.Function):
            @staticmethod
            def forward(ctx, weight):
                return weight[ids]

            @staticmethod
            def backward(ctx, g):
                out = torch.zeros_like(weight)
                out[ids] = g
                return out

        return Rows.apply(weight)

    repeated = TABLE.case("fp32/N:1023/V:64/H:33/ids:repeated+contiguous/upstream:random/grad:weight/seed:3")
    with pytest.raises(ParityError) as failure:
        repeated.assert_parity(loses_repeats, D.embedding)
    assert TABLE.case(failure.value.parity.case).sizes == {"N": 2, "V": 1, "H": 1}

    def no_rows(x, weight, eps):
        assert x.shape[0], "no rows"
        return hand_rms(x, weight, eps)

    empty = next(c for c in RMS.cases(60) if not c.sizes["N"])
    with pytest.raises(AssertionError, match="no rows") as error:
        empty.assert_parity(no_rows, D.rms_norm)
    assert error.value.__notes__ == [f"case {empty}"]


def test_hypothesis_draws_and_shrinks_the_same_cases():
    seen = []

    @hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @hypothesis.given(case=RMS.strategy())
    def judged(case):
        seen.append(case)
        case.assert_parity(loses_a_tail, D.rms_norm, protocol="none")

    with pytest.raises(ParityError) as error:
        judged()
    assert RMS.case(error.value.parity.case).sizes == {"N": 1, "H": 1}
    assert f"case('{error.value.parity.case}')" in "".join(error.value.__notes__)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"x": 3}, "x=3: give tensor"),
        ({"x": tensor("N"), "sizes": {"M": 3}}, "the dimensions are N"),
        ({"seed": 3, "x": 3}, "x=3"),
        ({"grad": tensor("N")}, "another name"),
    ],
)
def test_a_description_that_cannot_be_is_said(spec, said):
    with pytest.raises(ValueError, match=said):
        draw(**spec)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_no_kind_of_upstream_gradient_is_lost_on_a_size_of_zero_or_one(dtype):
    """A size of 0 shows none of them, one of 1 little: the next case of the dtype has it."""
    cases = draw(x=tensor("N", "H"), weight=tensor("H"), sizes={"N": (0, 9), "H": (1, 99)}, dtypes=(dtype,)).cases(24)
    small = [case for case in cases if min(case.sizes.values()) < 2]
    kinds = collections.Counter(case.upstream for case in cases if case not in small)
    assert len(small) > 3 and {(case.upstream, case.grad) for case in small} == {("random", "all")}
    assert all(kinds[kind] > 1 for kind in UPSTREAM), kinds


class Skipping(torch.autograd.Function):
    """x·w, whose backward pass leaves out 16 rows where the upstream gradient of the first is 0."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        blocks = [g if g[:1].any() else torch.zeros_like(g) for g in grad.split(16)]
        grad = torch.cat(blocks)
        return grad * weight, (grad.float() * x.float()).sum(0).to(weight.dtype)


def test_blocks_behind_a_mask_are_not_taken_for_empty():
    cases = draw(x=tensor("N", "H"), weight=tensor("H"), device="cpu").cases()
    asked = {"definition": lambda x, weight: x * weight, "protocol": "none"}
    wrong = {case.upstream for case in cases if not case.check_parity(Skipping.apply, **asked).agrees}
    assert wrong == {"fine"}
