"""The protocol gate and the exact relations: every leak is seen, named and undone; honest code passes."""

import dataclasses
import itertools
import json

import pytest
import torch

from cases.selftest.controls.correct import CONTROLS, control
from cases.selftest.mutants.conduct import MISCONDUCT
from cases.selftest.mutants.steps import through
from parity.implementations.implementation import Implementation
from parity.judge.words import GATES
from parity.protocol import side_effects
from parity.protocol.call import copies, execute
from parity.protocol.exceptions import Outcome
from parity.registry import family, run_case
from parity.results.report import wording

LOGPROBS, POLICY = family("logprobs"), family("policy")
PLAIN = control("control.logprobs.plain")
LOSS = control("control.policy.plain")


def broken(implementation, x, other, first):
    return side_effects.AdapterCalls(implementation, x, other).broken(first.quantities)


def test_the_same_call_gives_the_same_bits_even_where_others_are_right_too():
    x, asked = inputs(), []

    def call(given):
        asked.append(torch.is_grad_enabled())
        return {"logps": PLAIN.call(given)["logps"] * (1.0 + (len(asked) > 1) * 6e-7)}

    own = wrong(call)
    first = execute(own, x)
    right = side_effects.AdapterCalls(own, x, inputs(seed=4), lambda outcome: True)
    found = right.broken(first.quantities)
    assert any("called again" in line for line in found)
    assert False in asked and not any("no_grad" in line for line in found)


def inputs(fam=LOGPROBS, dtype="fp32", seed=3, **settings):
    return fam.build(fam.case(seed, dtype, {"V": 11, "H": 5, "bias": "random"} | settings))


def wrong(call, base=PLAIN, id="wrong"):
    """An implementation that does something before or after an honest one."""
    return Implementation(id, base.family, "candidate", call, base.recipe, outputs=base.outputs)


def failing(implementation, **settings):
    """Quantity -> row, of those that do not agree on a case."""
    case = family(implementation.family).case(3, "fp32", {"V": 11, "H": 5} | settings)
    rows = list(run_case(case, [implementation]))
    assert any(r.verdict == "agree" and not r.quantity.startswith(("protocol", "relation")) for r in rows)
    return {r.quantity: r for r in rows if r.verdict != "agree"}


def leaving(effect, base=PLAIN):
    """The honest one, and an effect on the process that outlives the call."""

    def call(x):
        out = base.call(x)
        effect(x)
        return out

    return wrong(call, base)


def damage(name):
    def effect(x):
        with torch.no_grad():
            x.tensors[name].view(-1)[0] += 1

    return effect


@pytest.mark.parametrize("name", ["hidden", "weight", "ids"])
def test_a_damaged_input_is_named_and_put_back(name):
    x = inputs()
    kept = copies(x)
    assert f"input {name} was changed in place" in execute(leaving(damage(name)), x).leaks
    assert all(torch.equal(value, kept[name]) for name, value in copies(x).items())


def test_a_name_that_a_later_call_alone_rebinds_is_named_and_put_back():
    calls, dumps = itertools.count(), json.dumps
    effect = leaving(lambda x: next(calls) == 2 and setattr(json, "dumps", print))
    (said,) = (row.message for row in run_case(inputs().case, [effect]) if row.quantity == "protocol")
    assert said == "rebound json.dumps" and json.dumps is dumps


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("base", [i.id for group in CONTROLS.values() for i in group])
def test_honest_code_leaks_nothing_and_holds_every_relation(base, dtype):
    implementation = control(base)
    fam = family(implementation.family)
    masked = {"lengths": [3, 1], "beta": 0.04} if fam is POLICY else {"ignored": "some"}
    x, other = (inputs(fam, dtype, seed, **{} if dtype == "fp32" else masked) for seed in (2, 12))
    outcome = execute(implementation, x)
    assert outcome.verdict == "ran", outcome.message
    assert not [*outcome.leaks, *broken(implementation, x, other, outcome)]
    found = side_effects.relations(fam, implementation, x, outcome)
    assert found or dtype == "fp16"  # a subnormal float16 does not double exactly
    assert all(holds for holds, _ in found.values()), found


def donated(g):
    """As torch.compile's backward: what it has read is freed, and a graph that is to be kept is refused in so many words."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        raise RuntimeError("This backward function was compiled with non-empty donated buffers")
    return g


def _on_hidden(change):
    return lambda x: PLAIN.call(x.replace(hidden=change(x.hidden)))


def test_a_compiled_function_keeps_no_graph():
    implementation = wrong(_on_hidden(lambda h: through(h, donated)))
    x = inputs()
    assert broken(implementation, x, x, execute(implementation, x)) == []


def leaky(x):
    mask = x.mask.clone()
    mask.view(-1)[-1] = 1
    return LOSS.call(x.replace(mask=mask))


CURVED = wrong(_on_hidden(lambda h: through(h, lambda g: g + 0.01 * g * g.abs() + 1e-4)))
CLAMPED = wrong(lambda x: LOSS.call(x.replace(advantages=x.advantages.clamp(-0.5, 0.5))), LOSS)


@pytest.mark.parametrize(
    ("implementation", "relation", "says"),
    [
        (CURVED, "cotangent x2", "grad_hidden"),
        (CURVED, "cotangent 0", "grad_hidden"),
        (wrong(leaky, LOSS), "masked garbage", "what the mask hides"),
        (CLAMPED, "advantages x2", "linear in the advantages"),
    ],
)
def test_a_relation_that_does_not_hold_is_named(implementation, relation, says):
    fam = family(implementation.family)
    x = inputs(fam, **{"lengths": [2, 1]} if relation == "masked garbage" else {})
    holds, message = side_effects.relations(fam, implementation, x, execute(implementation, x))[relation]
    assert not holds and says in message


def test_garbage_under_the_mask_is_no_banned_token():
    """Its log-prob would be -inf, and the ratio of two such log-probs NaN in a loss that scores what it masks."""
    x = inputs(POLICY, lengths=[2, 1], T=9, bias="banned", old="absent", seed=5)
    garbage = POLICY.relations["masked garbage"].change(x)
    masked = ~x.mask.bool()
    assert (garbage.ids != x.ids)[masked].all()
    assert x.bias.isinf().any()
    assert x.bias[garbage.ids].isfinite().all()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "then", "factors", "holds"),
    [
        *(([1.0, 3.0], [1.0, bad], {}, False) for bad in (NAN, INF)),
        *(([0.5, 1.5], [1.0, bad], {"g": 2.0}, True) for bad in (NAN, INF)),
        # a gradient of 1e-37 that passed through 1e-40: its double is off by 7e-42, and that is no logic
        ([1e-37, 1.0], [2e-37 + 7e-42, 2.0], {"g": 2.0}, True),
        ([1e-37, 1.0], [2e-37 + 1e-36, 2.0], {"g": 2.0}, True),
        ([1e-37, 1.0], [1e-3, 2.001], {"g": 2.0}, False),
        ([1e-37], [2e-37 + 7e-42], {"g": 2.0}, True),
        ([1e-37], [3e-37], {"g": 2.0}, False),
    ],
)
def test_what_should_not_change_stays_finite_and_what_doubles_doubles(value, then, factors, holds):
    first, second = (Outcome("ran", {"g": torch.tensor(x)}) for x in (value, then))
    found, message = side_effects._related(first, second, factors, "nothing changes")
    assert found is holds
    assert factors or message == "g is no longer finite: nothing changes"


CALLS = {
    "kept-by-address": "grad_hidden differs when called again after other values in the same tensors",
    "static-outputs": "that an earlier call returned is changed by a later one",
    "upstream-damaged": "upstream gradient of",
    "leftover-gradient": "a second backward into .grad of",
    "alone-missing": "alone is not that beside the others",
    "no-grad": "under no_grad the outputs differ",
    "inference-mode": "under inference_mode the outputs differ",
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("base", [PLAIN, LOSS], ids=["logprobs", "policy"])
def test_calls_that_go_wrong_are_named(base, name):
    found = failing(wrong(MISCONDUCT[name][1](base.call), base), layouts="mixed")
    said = found.pop("protocol")
    assert CALLS[name] in said.message
    assert (wording.protocol(said) == GATES["protocol"]) == (name == "upstream-damaged")
    assert all(n.startswith("relation") for n in found)


def _in_backward(x):
    return x * 2 if torch._C._current_graph_task_id() != -1 else x


def capped(x):
    """The cap of GRPO's ratio in a loss that has none: drawn cases have it at its default."""
    out = LOSS.call(x)
    return out | {"loss": out["loss"] * (1.0 if x.settings.delta is None else 2.0)}


DEFAULT = wrong(_on_hidden(lambda h: h @ torch.eye(h.shape[-1])), id="own.py:wrong")
RECOMPUTED = wrong(_on_hidden(_in_backward), id="own.py:wrong")
HIDES = wrong(_on_hidden(lambda h: h.nan_to_num(0.0)))
CAPPED = wrong(capped, LOSS, id="own.py:wrong")


@pytest.mark.parametrize(
    ("implementation", "row", "says"),
    [
        (DEFAULT, "protocol", "the call fails under another default dtype: crashed: RuntimeError"),
        (RECOMPUTED, "protocol", "grad_hidden differs under a checkpoint that is not reentrant"),
        (HIDES, "relation: NaN", "a NaN in hidden is not seen in logps"),
        (CAPPED, "relation: unused settings", ": delta means nothing beside"),
    ],
)
def test_what_calls_of_other_kinds_show_alone_is_named(implementation, row, says):
    found = failing(implementation, **{"loss_type": "sapo"} if implementation is CAPPED else {})
    assert [*found] == [row] and says in found[row].message
    assert row != "relation: NaN" or found[row].message == says
    assert row != "protocol" or wording.protocol(found[row]) != GATES["protocol"]


def test_a_call_of_another_kind_is_judged_by_what_it_moves():
    """TRL's loss in bfloat16 is more precise under float64; its entropy is NaN under both."""

    def moved(x):
        by = 1 + 1e-6 * (torch.get_default_dtype() == torch.float64)
        return {"loss": LOSS.call(x)["loss"] * by, "entropy": torch.tensor(torch.nan)}

    function = dataclasses.replace(wrong(moved, LOSS), id="own.py:moved", outputs=frozenset({"loss", "entropy"}))
    assert [*failing(function)] == ["entropy"]


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("logprobs", {}),
        ("policy", {"loss_type": "sapo"}),
        ("policy", {"old": "absent"}),
        ("policy", {"loss_type": "cispo", "epsilon_high": 2.0}),
        ("preference", {"loss_type": "ipo"}),
        ("preference", {"gap": "apart"}),
    ],
)
def test_honest_functions_have_no_use_for_what_means_nothing(base, settings):
    """A mean over tokens may be asked for where a loss takes it anyway."""
    function = dataclasses.replace(control(f"control.{base}.plain"), id="own.py:right")
    assert not failing(function, **settings)


def test_a_ring_of_buffers_is_seen_by_as_many_forwards():
    """Each of four results lies in the buffer of the fourth before it."""
    ring, calls = {}, [0]

    def call(x):
        out = PLAIN.call(x)
        calls[0] += 1
        buffer = ring.setdefault((calls[0] % 4, *out["logps"].shape), torch.empty_like(out["logps"]))
        return {"logps": _Into.apply(out["logps"], buffer)}

    drawn = (LOGPROBS.case(seed, "fp32", {"V": 11, "H": 5}) for seed in range(12))
    found = [r.message for case in drawn for r in run_case(case, [wrong(call)]) if r.failing]
    assert found and all("logps that an earlier call returned is changed by a later one" in m for m in found)


class _Into(torch.autograd.Function):
    """x in a buffer that is there."""

    @staticmethod
    def forward(ctx, x, buffer):
        return buffer.data.copy_(x)

    @staticmethod
    def backward(ctx, g):
        return g, None


def test_another_way_without_gradients_may_round_otherwise():
    """An output that differs in bits and agrees with the definition is right; a refusal is not."""

    def other_way(x):
        return (PLAIN if torch.is_grad_enabled() else control("control.logprobs.online")).call(x)

    assert not failing(wrong(other_way), V=300)

    def dividing(x):
        return PLAIN.call(x) if torch.is_grad_enabled() else 1 / 0

    (row,) = failing(wrong(dividing), V=300).values()
    assert row.message.startswith("the call fails under no_grad: crashed: ZeroDivisionError: division by zero, at ")


def test_tf32_is_a_call_context_that_is_left_again():
    """The precision is high during both passes, what it was afterwards; anything else that is left behind shows."""
    seen = []
    case = LOGPROBS.case(3, "fp32", {"context": "tf32", "V": 31})
    before = torch.get_float32_matmul_precision()
    noting = leaving(lambda x: seen.append(torch.get_float32_matmul_precision()))
    rows = list(run_case(case, [noting], thorough=False))  # else a second call follows, in another context
    assert set(seen) == {"high"}
    assert torch.get_float32_matmul_precision() == before
    assert {r.verdict for r in rows} == {"agree"}
    try:
        medium = leaving(lambda x: torch.set_float32_matmul_precision("medium"))
        assert [*failing(medium, context="tf32", V=31)] == ["protocol"]
    finally:
        torch.set_float32_matmul_precision(before)
