"""Many replicas of a model's step at once: as far apart as one at a time, each with its own errors."""

import pytest
import torch

from parity.trainers.definitions import windows
from parity.trainers.definitions.replicated import Replicas
from parity.trainers.definitions.step_rounding import StepRounding
from parity.trainers.rig import models, stored_window

WINDOW = stored_window.sequences(stored_window.rows())
COUNT = 16


class OneAtATime(StepRounding):
    vectorised = False


def replicas(model, define, rounding=StepRounding, differentiated=None):
    return Replicas(model, define, rounding, differentiated)


def spread(found, exact):
    return float((found - exact).square().mean().sqrt())


def grpo(model):
    return {"loss": windows.grpo(WINDOW, "llama", {"beta": 0.1, "loss_type": "grpo"}, None, None, model)}


@pytest.mark.parametrize("define", [grpo, lambda model: {"loss": windows.sft(WINDOW, model)}], ids=["grpo", "sft"])
def test_as_far_from_exact_as_one_at_a_time(define):
    model = stored_window.policy("llama", torch.float64)
    stacked, alone = (replicas(model, define, kind, "loss") for kind in (StepRounding, OneAtATime))
    exact = stacked.exact()
    ratios = [
        spread(stacked.first(COUNT)[n], e) / spread(alone.first(COUNT)[n], e) for n, e in exact.items() if e.any()
    ]
    assert stacked.at_once  # no silent fall back
    assert len(ratios) == len(exact)
    assert 0.8 < sorted(ratios)[len(ratios) // 2] < 1.25
    assert min(ratios) > 0.3 and max(ratios) < 3.0


def test_each_replica_rounds_what_constants_make():
    """Advantages, a frozen reference: vmap would compute them once, with one error for all replicas."""
    c = torch.tensor([1 / 3, 1 / 7, 1 / 9], dtype=torch.float64)
    reference = models.model("llama", torch.float64)

    def define(model):
        with torch.no_grad():
            return {"constants": (c / c.sum()).prod(), "reference": windows.sums(reference, WINDOW).sum()}

    found = replicas(stored_window.policy("llama", torch.float64), define)
    for name, exact in found.exact().items():
        stack = found.first(COUNT)[name]
        assert len(stack.unique()) == COUNT
        assert float(stack.std()) > 0.5 * spread(stack, exact)  # no error that all have in common


def test_replicas_that_were_made_stay_as_they_are():
    found = replicas(stored_window.policy("llama", torch.float64), grpo, differentiated="loss")
    few = {name: x.clone() for name, x in found.first(3).items()}
    many = found.first(5)
    assert {len(x) for x in many.values()} == {5}
    assert all(torch.equal(x, many[name][:3]) for name, x in few.items())
    assert len(many["loss"].unique()) == 5


def test_a_model_that_routes_tokens_takes_one_at_a_time():
    found = replicas(models.model("qwen3_moe", torch.float64), lambda model: {"loss": windows.sft(WINDOW, model)})
    assert len(found.first(2)["loss"].unique()) == 2
    assert not found.at_once


def test_an_error_of_the_definition_is_not_taken_for_one_of_vmap():
    def define(model):
        raise RuntimeError("this definition is wrong")

    with pytest.raises(RuntimeError, match="this definition is wrong"):
        replicas(models.model("llama", torch.float64), define).first(2)
