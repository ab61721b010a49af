"""What is kept by shape and belongs to a call: a second case of the same shapes shows it, and honest code shows nothing."""

import dataclasses
import itertools

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.mutants.steps import through
from cases.selftest.oracles import oracle_of
from parity.compare.stale_cache import ONE_IN, ONE_IN_FUNCTION, calls, number, stale
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.protocol import side_effects
from parity.protocol.call import execute
from parity.registry import family, run_case

FAMILIES = {name: family(name) for name in ("logprobs", "policy", "divergence")}
BASES = {name: f"control.{name}.{'ieee' if name == 'divergence' else 'plain'}" for name in FAMILIES}
SHAPES = {"B": 2, "T": 3, "V": 11, "H": 5}
MOVED: dict[str, dict] = {
    "logprobs": SHAPES | {"temperature": 0.7, "softcap": 3.0, "bias": "random"},
    "policy": SHAPES | {"temperature": 0.7, "beta": 0.04, "epsilon": 0.3},
    "divergence": SHAPES | {"temperature": 0.7, "beta": 0.1, "softcap": 3.0},
}
KINDS = ("to the defaults", "numbers", "from the defaults")


def cases(name, kind, count=1, dtype="fp32"):
    """The first cases that have calls of a kind."""
    every = (FAMILIES[name].case(seed, dtype, MOVED[name]) for seed in itertools.count())
    found = (case for case in every if number(case) % (3 * ONE_IN) == ONE_IN * KINDS.index(kind))
    return [*itertools.islice(found, count)]


def keeping(name, *kept):
    """The honest one, with settings kept by shape from the first call."""
    base, first = control(BASES[name]), dict[tuple, dict]()

    def call(x):
        key = tuple(x.hidden.shape), tuple(x.weight.shape)
        theirs = first.setdefault(key, {n: getattr(x.settings, n) for n in kept})
        before = dict(vars(x.settings))
        vars(x.settings).update(theirs)
        try:
            return base.call(x)
        finally:
            vars(x.settings).update(before)

    return Implementation("wrong", name, "candidate", call, base.recipe, outputs=base.outputs)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_calls_have_the_same_shapes_and_other_settings(name):
    fam = FAMILIES[name]
    (to,), (numbers,), (start,) = (cases(name, kind, dtype="bf16") for kind in KINDS)
    assert calls(fam, to) == (to, fam.case(to.seed + 1, "fp32", SHAPES))
    first, then = calls(fam, numbers)
    assert first == numbers
    assert then.settings["temperature"] == pytest.approx(0.525)
    assert then.settings.get("beta", 0) == pytest.approx(0.75 * MOVED[name].get("beta", 0))
    assert then.settings.keys() == numbers.settings.keys()
    assert then.dtype == "bf16"
    first, then = calls(fam, start)
    assert (first.settings, then.settings) == ({"V": 11, "H": 6}, start.settings | {"H": 6})
    assert len({start.seed, first.seed, then.seed}) == 3
    assert not any(calls(fam, fam.case(seed, "fp32", {"V": 1 << 17})) for seed in range(20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, "temperature") for name in FAMILIES),
        ("logprobs", "softcap"),
        ("policy", "epsilon"),
        ("divergence", "beta"),
    ],
)
def test_a_setting_kept_by_shape_is_seen(name, kept, kind):
    fam = FAMILIES[name]
    for case in cases(name, kind, 6):  # until one of them shows it
        implementation = keeping(name, kept)
        inputs = fam.build(case)
        first = execute(implementation, inputs)
        other = fam.build(fam.case(case.seed + 1, "fp32", case.settings))
        calls = side_effects.AdapterCalls(implementation, inputs, other)
        assert not calls.broken(first.quantities)
        if said := stale(oracle_of(case), implementation):
            break
    assert said
    assert all("wrong in a call right after one of the same shapes, right in others: " in line for line in said), said


def test_an_upstream_gradient_kept_by_shape_is_seen():
    base, first = control(BASES["policy"]), dict[tuple, torch.Tensor]()

    def call(x):
        key = tuple(x.hidden.shape)
        out = base.call(x)
        return out | {"loss": through(out["loss"], lambda g: first.setdefault(key, g.clone()))}

    implementation = Implementation("wrong", "policy", "candidate", call, base.recipe, outputs=base.outputs)
    (case,) = cases("policy", "to the defaults")
    failing = {row.quantity: row.message for row in run_case(case, [implementation]) if row.verdict == "disagree"}
    said = "grad_hidden, grad_weight wrong in a call right after one of the same shapes, right in others: "
    assert failing.keys() == {"protocol", "relation: NaN"} and said in failing["protocol"]


def test_a_users_function_has_more_of_them():
    fam, implementation = FAMILIES["logprobs"], keeping("logprobs", "temperature")
    wanted = [c for c in (fam.case(seed, "fp32", MOVED["logprobs"]) for seed in range(400)) if number(c) // ONE_IN % 3]
    often = [c for c in wanted if number(c) % ONE_IN and not number(c) % ONE_IN_FUNCTION][:3]
    theirs = dataclasses.replace(implementation, id="mine.py:loss")
    assert theirs.is_function
    for case in often:
        execute(implementation, fam.build(case))
        assert not stale(oracle_of(case), implementation)
        assert stale(oracle_of(case), theirs)


def test_what_is_wrong_in_any_shape_is_not_kept():
    base, fam = control(BASES["logprobs"]), FAMILIES["logprobs"]

    def call(x):
        return {n: v * (1.0 if x.settings.temperature == 0.7 else 1.01) for n, v in base.call(x).items()}

    implementation = Implementation("wrong", "logprobs", "candidate", call, base.recipe, outputs=base.outputs)
    for case in cases("logprobs", "numbers", 3):
        assert not stale(oracle_of(case), implementation)
        assert [r for r in run_case(calls(fam, case)[1], [implementation]) if r.verdict == "disagree"]


def test_what_cannot_be_built_or_what_is_refused_says_nothing():
    def refuse(case):
        raise UsageError("no")

    case = cases("logprobs", "to the defaults")[0]
    implementation = keeping("logprobs", "temperature")
    execute(implementation, FAMILIES["logprobs"].build(case))
    assert stale(oracle_of(case), implementation)
    narrow = Implementation("n", "logprobs", "candidate", implementation.call, dtypes=frozenset({"bf16"}))
    assert not stale(oracle_of(case), narrow)

    unbuilt = dataclasses.replace(FAMILIES["logprobs"], build=refuse)
    assert not stale(dataclasses.replace(oracle_of(case), family=unbuilt), implementation)
