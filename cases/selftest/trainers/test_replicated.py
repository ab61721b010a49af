"""Many replicas of a model's step at once: as far apart as one at a time, each with its own errors."""

from types import SimpleNamespace

import pytest
import torch

from parity.judge.operations import AnyOperation
from parity.judge.recipe import IEEE_FP32
from parity.trainers.definitions.formulas import Loss
from parity.trainers.definitions.scored import Scored
from parity.trainers.definitions.training_step import exact_step, measured
from parity.trainers.rig import models, stored_window
from parity.trainers.rig.stored_window import Window

WINDOW = Window.of("sft-trainer").sequences
COUNT = 16


class OneAtATime(AnyOperation):
    vectorised = False


def spread(found, exact):
    return float((found - exact).square().mean().sqrt())


GRPO = Loss(Window.of("grpo-trainer"), SimpleNamespace(model="llama", loss="grpo", beta=0.1))
SFT = Loss(Window.of("sft-trainer"), SimpleNamespace(model="llama", loss="nll"))


@pytest.mark.parametrize("loss", [GRPO, SFT], ids=["grpo", "sft"])
def test_as_far_from_exact_as_one_at_a_time(loss, monkeypatch):
    model = stored_window.policy("llama", torch.float64)
    stacked, alone = (exact_step(model, loss, kind) for kind in (AnyOperation, OneAtATime))
    widths = []
    monkeypatch.setattr(torch, "vmap", lambda f, vmap=torch.vmap, **options: widths.append(f) or vmap(f, **options))
    many, each = (step.replicas(IEEE_FP32, COUNT) for step in (stacked, alone))
    assert len(widths) == sum(n < COUNT for n in alone.steps)  # no silent fall back
    ratios = [spread(many[n], e) / spread(each[n], e) for n, e in stacked.exact.items() if e.any()]
    assert len(ratios) == len(stacked.exact)
    assert 0.8 < sorted(ratios)[len(ratios) // 2] < 1.25
    assert min(ratios) > 0.3 and max(ratios) < 3.0


def test_each_replica_rounds_what_constants_make():
    """Advantages, a frozen reference: vmap would compute them once, with one error for all replicas."""
    c = torch.tensor([1 / 3, 1 / 7, 1 / 9], dtype=torch.float64)
    reference = models.model("llama", torch.float64)

    def define(model):
        with torch.no_grad():
            return {"constants": (c / c.sum()).prod(), "reference": Scored(reference, WINDOW).sums.sum()}

    found = measured(stored_window.policy("llama", torch.float64), define)
    for name, exact in found.exact.items():
        stack = found.replicas(IEEE_FP32, COUNT)[name]
        assert len(stack.unique()) == COUNT
        assert float(stack.std()) > 0.5 * spread(stack, exact)  # no error that all have in common


def test_a_model_that_vmap_cannot_run_takes_one_at_a_time():
    """A loop over the experts that some token is sent to: how many there are depends on values."""
    routed = models.model("qwen3_moe", torch.float64)
    routed.set_experts_implementation("eager")
    found = measured(routed, lambda model: {"loss": SFT(model)})
    assert len(found.replicas(IEEE_FP32, 2)["loss"].unique()) == 2
    assert len(found.replicas(IEEE_FP32, 61)["loss"]) == 60  # no more: they take minutes


def test_an_error_of_the_definition_is_not_taken_for_one_of_vmap():
    def define(model):
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("this definition is wrong")
        return {"loss": SFT(model)}

    with pytest.raises(RuntimeError, match="this definition is wrong"):
        measured(models.model("llama", torch.float64), define).replicas(IEEE_FP32, 2)
