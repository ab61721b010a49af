"""What precision is asked for: of float32 inputs float32, also under autocast where autocast changes nothing."""

import dataclasses

import pytest
import torch

from cases.selftest.oracles import oracle_of
from parity.implementations.implementation import Implementation
from parity.implementations.user import recipe_of
from parity.judge.escalation import ladder
from parity.judge.recipe import Recipe
from parity.judging.assess import confirmed
from parity.judging.oracle import largest, replicas
from parity.protocol.call import execute
from parity.registry import family as family_of

SHAPE = {"B": 3, "T": 5, "V": 37, "H": 8, "peak": 2.0}


def logps(x, factor=1.0):
    """In float32, whatever autocast says; `factor` too large."""
    with torch.autocast(x.device.type, enabled=False):
        z = x.hidden.float() @ x.weight.float().T / x.settings.temperature
        return factor * torch.log_softmax(z, -1).gather(-1, x.ids.long().unsqueeze(-1)).squeeze(-1)


def judged(family, call, dtype, recipe, **settings):
    contexts = frozenset({"plain", "autocast"})
    implementation = Implementation(f"lib.{family}", family, "candidate", call, recipe, contexts=contexts)
    oracle = oracle_of(family_of(family).case(3, dtype, SHAPE | settings)).offered(implementation)
    outcome = execute(implementation, oracle.inputs)
    assert outcome.verdict == "ran"
    return confirmed(oracle, implementation, outcome)


def loss(x):
    """grpo on policy."""
    lp = logps(x)
    w = (lp - lp.detach()).exp() * x.advantages * x.mask
    return -(w.sum(1) / x.mask.sum(1).clamp(min=1)).mean()


def judged_loss(kept, dtype, recipe):
    """A loss that is handed out in dtype `kept`."""
    settings = {"old": "absent", "advantages": "token"}
    return judged("policy", lambda x: {"loss": loss(x).to(kept)}, dtype, recipe, **settings)["loss"]


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output", ["fp32", "any"])
def test_a_loss_of_float32_inputs_that_comes_in_16_bits_disagrees(narrow, output):
    good, wrong = (judged_loss(dtype, "fp32", Recipe(output=output)) for dtype in (torch.float32, narrow))
    assert good.agrees
    assert not wrong.agrees
    assert "expected fp32" in wrong.message


def test_log_probs_of_float32_inputs_in_bf16_disagree_unless_declared():
    def call(x):
        return {"logps": logps(x).bfloat16()}

    assert not judged("logprobs", call, "fp32", Recipe(output="any"))["logps"].agrees
    assert judged("logprobs", call, "fp32", Recipe(output="bf16"))["logps"].agrees


def test_a_16_bit_loss_of_16_bit_inputs_is_held_to_its_own_dtype():
    assert judged_loss(torch.bfloat16, "bf16", Recipe()).agrees


def test_a_wrong_percent_under_autocast_is_caught_where_the_code_computes_in_float32():
    recipe = recipe_of(logps)  # what a user's function gets that declares none
    calls = (lambda x, f=f: {"logps": logps(x, f)} for f in (1.0, 1.01))
    right, wrong = (judged("logprobs", call, "fp32", recipe, context="autocast") for call in calls)
    assert all(j.agrees for j in right.values())
    assert {"logps", "grad_hidden", "grad_weight"} == {n for n, j in wrong.items() if not j.agrees}


def test_what_autocast_does_change_keeps_its_own_recipe():
    def call(x):
        z = torch.nn.functional.linear(x.hidden, x.weight).float()
        return {"logps": torch.log_softmax(z, -1).gather(-1, x.ids.long().unsqueeze(-1)).squeeze(-1)}

    assert all(j.agrees for j in judged("logprobs", call, "fp32", Recipe(), context="autocast").values())


def test_a_16_bit_output_gets_a_16_bit_upstream_gradient():
    """autograd rounds it on the way in, which is no error of the library: the oracle is asked with what arrived."""
    case = family_of("logprobs").case(3, "bf16", SHAPE | {"B": 1, "T": 1, "V": 5, "H": 2000, "cotangent": "fine"})
    oracle = oracle_of(case)

    def call(x):
        return {"logps": logps(x).bfloat16()}

    narrow = Implementation("narrow", "logprobs", "candidate", call, Recipe(output="bf16"))
    outcome = execute(narrow, oracle.inputs)
    arrived = oracle.heard(outcome.quantities)
    assert torch.equal(arrived.inputs.cotangents["logps"], oracle.inputs.cotangents["logps"].bfloat16().double())
    assert arrived is oracle.heard(outcome.quantities) is not oracle
    assert oracle.heard({"logps": outcome.quantities["logps"].float()}) is oracle
    assert all(j.agrees for j in confirmed(oracle, narrow, outcome).values())


def test_an_upstream_gradient_beyond_the_range_of_a_loss_stays_as_it_is():
    """65,536 in float16 would be infinite, and the gradients of the oracle no numbers that anything could be held to."""
    oracle = oracle_of(family_of("policy").case(5, "fp16", {"B": 2, "cotangent": "scaled"}))
    assert float(oracle.inputs.cotangents["loss"].abs()) > 65504
    assert oracle.heard({"loss": torch.zeros((), dtype=torch.float16)}) is oracle


def test_an_upstream_gradient_that_comes_last_flushes_no_gradient_to_0():
    """Liger's JSD takes its gradients in the forward pass: one of 3e-7 makes none of them subnormal there."""
    family = family_of("divergence")
    x = family.build(family.case(3, "fp32", SHAPE | {"cotangent": "small"}))
    factor = abs(float(x.cotangents["loss"]))
    early = Recipe(elementwise="fp16", softmax="fp16", dlogits="fp16", accumulate="fp16", partials=3)
    found = replicas(family, x, dataclasses.replace(early, upstream=factor), range(4), 0)["grad_weight"]
    alone = dataclasses.replace(x, cotangents={"loss": x.cotangents["loss"] / factor})
    assert torch.equal(found, factor * replicas(family, alone, early, range(4), 0)["grad_weight"])
    assert not replicas(family, x, early, range(4), 0)["grad_weight"].any()


def test_a_teachers_head_counts_among_what_a_replica_holds():
    """Else a disagreement beside one of a million weights is judged with 480 replicas, by its few logits: 46 CPU seconds."""
    sizes, family = {"B": 1, "T": 2, "V": 64, "H": 4}, family_of("divergence")
    small, wide = (oracle_of(family.case(3, "fp32", sizes | {"teacher_H": h})) for h in (4, 4723))
    assert largest(small.family, small.inputs) == 64 * 4
    assert largest(wide.family, wide.inputs) == wide.inputs.teacher_weight.numel() == 64 * 4723
    assert ladder(largest(wide.family, wide.inputs))[-1] < ladder(largest(small.family, small.inputs))[-1]
