"""Replicas of a case: what implementations share, what is rounded anew, and the last word of the judge."""

import dataclasses
from pathlib import Path

import pytest
import torch

from cases.selftest.controls.correct import control
from cases.selftest.oracles import oracle_of
from parity.case.case import Case
from parity.judge import oracle as judged_by
from parity.judge.escalation import LAST_WORD
from parity.judge.recipe import IEEE_FP32, Recipe
from parity.judging import oracle as judging
from parity.judging.assess import confirmed, judge_all
from parity.judging.oracle import replicas, to_double
from parity.protocol.call import execute
from parity.registry import family, load

FAMILY = family("logprobs")


SETTINGS = {"B": 3, "T": 5, "V": 61, "H": 16, "entropy": "gradient", "bias": "random"}


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


@pytest.mark.parametrize("grad", ["bias", "hidden", "weight", "weight bias"])
def test_every_replica_rounds_a_frozen_tensor_anew(grad):
    """A frozen head that all replicas shared would be rounded once for all of them."""
    spreads = []
    for leaves in (grad, "hidden weight bias"):
        inputs = FAMILY.build(FAMILY.case(1, "fp32", SETTINGS | {"grad": leaves, "context": "autocast", "peak": 4.0}))
        recipe = control("control.logprobs.plain").recipe_for(inputs)
        recipe = dataclasses.replace(recipe, logits="fp32", dlogits="fp32")
        logps = replicas(FAMILY, inputs, recipe, range(12), 0)["logps"]
        assert logps.shape == (12, 3, 5)
        spreads.append(float(logps.std(0).mean()))
    assert spreads[0] == pytest.approx(spreads[1], rel=0.3)


def test_replicas_that_are_larger_than_a_stack_are_drawn_one_by_one(monkeypatch):
    inputs = FAMILY.build(FAMILY.case(1, "bf16", SETTINGS))
    seen = []
    monkeypatch.setattr(judging, "to_double", lambda x, stack: seen.append(stack) or to_double(x, stack))
    monkeypatch.setattr(judging, "LARGEST_STACK", 1)
    found = replicas(FAMILY, inputs, Recipe(logits="bf16"), range(3), 5)
    assert seen == [1, 1, 1]
    assert found["logps"].shape == (3, 3, 5)
    assert len(found["logps"].unique(dim=0)) == 3


def test_implementations_share_what_does_not_depend_on_them():
    known = oracle_of(FAMILY.case(1, "bf16", SETTINGS))
    narrow = Recipe(logits="bf16", output="bf16")
    assert known.oracle.replicas(narrow, 2) is known.oracle.replicas(dataclasses.replace(narrow, output="fp32"), 2)
    assert known.oracle.replicas(narrow, 2) is not known.oracle.replicas(Recipe(output="bf16"), 2)
    assert known.in_float32 is known.in_float32


def test_more_replicas_begin_with_those_of_the_step_before_whoever_asked_for_them():
    case, narrow = FAMILY.case(1, "bf16", SETTINGS), Recipe(logits="bf16")
    known = oracle_of(case).oracle
    few, many = (known.replicas(narrow, count) for count in (12, 30))
    for name, value in oracle_of(case).oracle.replicas(narrow, 30).items():
        assert torch.equal(many[name], value) and torch.equal(many[name][:12], few[name])
        assert len(value.flatten(1).unique(dim=0)) == 30 or name not in ("logps", "grad_hidden")


def test_fewer_replicas_take_no_memory_beside_more():
    oracle = oracle_of(FAMILY.case(4, "bf16", SETTINGS)).oracle
    recipe = Recipe(logits="bf16").resolve("bf16")
    few = {name: x.clone() for name, x in oracle.replicas(recipe, 12).items()}
    more = oracle.replicas(recipe, 24)
    for name, x in oracle.replicas(recipe, 12).items():
        assert torch.equal(x, few[name]) and x.untyped_storage().data_ptr() == more[name].untyped_storage().data_ptr()
    between = {name: x.clone() for name, x in oracle.replicas(recipe, 30).items()}
    with oracle.forgetting():
        oracle.replicas(recipe, 60)
        assert all(torch.equal(x, between[name]) for name, x in oracle.replicas(recipe, 30).items())
    left, kept = oracle.replicas(recipe, 12), oracle.replicas(recipe, 30)
    assert all(x.untyped_storage().data_ptr() == kept[name].untyped_storage().data_ptr() for name, x in left.items())


def test_of_many_replicas_only_what_is_asked_for_is_kept(monkeypatch):
    case, narrow = FAMILY.case(1, "bf16", SETTINGS), Recipe(logits="bf16")
    whole = oracle_of(case).oracle.replicas(narrow, 3, names=["grad_hidden"])
    assert "grad_weight" in whole
    monkeypatch.setattr(judged_by, "ALL_QUANTITIES", 10)
    for finer in (False, True):
        some = oracle_of(case).oracle.replicas(narrow, 3, finer, ["grad_hidden"])
        assert some.keys() == {"grad_hidden"} | whole.keys() & {"_logps"}
        assert torch.equal(some["grad_hidden"][:3], whole["grad_hidden"])


@pytest.mark.parametrize("finer", [False, True])
def test_replicas_of_outputs_alone_take_no_gradient_and_have_the_same_bits(finer):
    case, narrow = FAMILY.case(1, "bf16", SETTINGS), Recipe(logits="bf16")
    alone, whole = (oracle_of(case).oracle.replicas(narrow, 3, finer, *names) for names in ([["logps"]], []))
    assert not any(name.startswith("grad_") for name in alone) and "grad_hidden" in whole
    assert all(torch.equal(value, whole[name]) for name, value in alone.items())


def test_a_wrong_output_is_settled_without_gradients():
    oracle, honest = oracle_of(FAMILY.case(1, "fp32", SETTINGS)), control("control.logprobs.plain")
    outcome = execute(honest, oracle.inputs)
    spoilt = dict(outcome.quantities) | {"logps": outcome.quantities["logps"] * 1.1}
    judged = confirmed(oracle, honest, dataclasses.replace(outcome, quantities=spoilt))
    assert [name for name, j in judged.items() if not j.agrees] == ["logps"]
    assert {key[1:4] for key in oracle.oracle._replicas} == {
        (12, False, True),
        *((n, False, False) for n in (24, 60, 480)),
    }


@pytest.mark.parametrize(
    ("off", "asked"),
    [({}, []), ({"b": 3e-5}, [12, 24, 60, 480]), ({"b": 1.0}, [12]), ({"a": 1.0, "b": 3e-5}, [12])],
    ids=["right", "open", "certain", "one certain"],
)
def test_values_of_one_result_are_judged_together(off, asked):
    """More replicas for all of them while something is open, none once one of them is certainly wrong."""
    exact = {name: torch.ones(8, dtype=torch.float64) for name in "ab"}
    drawn = []

    def draw(recipe, numbers, *others):
        drawn.append(numbers.stop)
        noise = torch.randn(len(numbers), 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return {name: value + 1e-6 * noise for name, value in exact.items()}

    oracle = judged_by.Oracle(exact, draw, lambda name, found: {}, seed=0)
    found = oracle.judge({name: (e + off.get(name, 0.0)).float() for name, e in exact.items()}, IEEE_FP32)
    assert drawn == asked
    assert {name for name, j in found.items() if not j.agrees} == set(off)


@pytest.mark.parametrize("folded", [0.0625, 1.0])
def test_a_factor_on_the_parameters_flushes_no_gradient_of_the_logits(folded):
    """Small gradients of logits that a factor of 1/16 would flush to 0: they meet it only behind the product with the head."""
    settings = {"T": 7, "V": 30, "H": 1, "peak": 12.0, "level": 150.0, "targets": "edge", "softcap": 50.0}
    settings |= {"cotangent": "small", "logit_scale": 0.0625, "entropy": "gradient"}
    case = FAMILY.case(327, "fp16", settings)
    narrow = Recipe(logits="input", dlogits="input", elementwise="input", folded=folded).resolve("fp16")
    found = oracle_of(case).oracle.replicas(narrow, 12)["grad_hidden"].flatten(1)[:, 8]
    assert bool(found.any()) == (folded != 1.0)


def test_the_gradient_of_folded_hidden_states_is_stored_before_their_factor():
    """1/τ and the scale on the hidden states, 85: float16 stores a subnormal number, off by up to 85 times half its spacing."""
    factor = 0.3 / 0.003539
    settings = {"B": 4, "T": 9, "V": 76, "H": 10, "temperature": 0.003539, "logit_scale": 0.3, "cotangent": "small"}
    oracle = oracle_of(FAMILY.case(313, "fp16", settings))
    exact = oracle.oracle.exact["grad_hidden"]
    off = ((exact / factor).half().double() * factor - exact).norm()
    folded, plain = (
        (oracle.oracle.replicas(recipe.resolve("fp16"), 60)["grad_hidden"] - exact).flatten(1).norm(dim=1)
        for recipe in (Recipe(inputs="input", folded=factor), Recipe(inputs="input"))
    )
    assert folded[0] == pytest.approx(off) and 20 * plain.max() < folded.min()  # the first rounds to what float16 has
