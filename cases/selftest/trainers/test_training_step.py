"""The steps that twins are judged against: definitions on paper, float64 throughout, what the gates see; and replicas of a step,
many at once, as far apart as one at a time."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity.judge.escalation import FEW
from parity.judge.operations import AnyOperation, Double
from parity.judge.problem import Problem
from parity.judge.recipe import IEEE_FP32
from parity.registry import run_case, select
from parity.trainers import catalogue
from parity.trainers.catalogue import judge
from parity.trainers.definitions.formulas import Generation, Loss
from parity.trainers.definitions.scored import Scored, logits
from parity.trainers.definitions.training_step import (
    AutocastRounding,
    exact_step,
    forward_order,
    gradients,
    measured,
    slopes,
)
from parity.trainers.rig import models, stored_window
from parity.trainers.rig.stored_window import Window

WINDOW = Window.of("sft-trainer").sequences


def loss_of(trainer, rows=None, **settings):
    """The loss of llama's window, called with a model."""
    asked = {name: settings.pop(name) for name in ("generation",) if name in settings}
    return Loss(Window.of(trainer, rows), SimpleNamespace(model="llama", **settings), **asked)


ROWS = [dataclasses.replace(row, ended=True) for row in stored_window.rows()]
"""As a dataset has them; a trainer that generates ends some."""
SFT = loss_of("sft-trainer", loss="nll")
GRPO = loss_of("grpo-trainer", loss="grpo", beta=0.1)
COUNT = 16


@pytest.fixture(scope="module")
def step():
    return exact_step(stored_window.policy("llama", torch.float64), SFT)


@pytest.fixture(scope="module")
def plain():
    """The gradients of the same window in float32."""
    model = stored_window.policy("llama")
    SFT(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_model_does_not_remember_the_mode_it_was_first_asked_for_in():
    stored_window.reference.cache_clear()
    with Double():
        inside = stored_window.reference("llama")
    stored_window.reference.cache_clear()
    outside = stored_window.reference("llama")
    pairs = zip(inside.named_buffers(), outside.named_buffers(), strict=True)
    assert [name for (name, a), (_, b) in pairs if a.dtype != b.dtype or not torch.equal(a, b)] == []


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_leave_one_out_of_two_is_the_difference(beta):
    """With a reward that is less the KL of the policy that generated."""
    model, old = stored_window.policy("llama", torch.float64), models.model("llama", torch.float64)
    with torch.no_grad():
        old.get_output_embeddings().weight.mul_(1.001)
        now, then = Scored(model, WINDOW).sums, Scored(old, WINDOW).sums
        kl = (then - Scored(stored_window.reference("llama"), WINDOW).sums).view(-1, 2)
        assert kl.abs().max() > 1e-3
        found = loss_of("rloo-trainer", ROWS, beta=beta, generation=Generation(WINDOW, old, 1))(model)
    r = stored_window.rewards(WINDOW) - beta * kl
    a = torch.stack([r[:, 0] - r[:, 1], r[:, 1] - r[:, 0]], 1).flatten()
    ratio = (now - then).exp()
    expected = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    assert abs(float(expected)) > 1e-3
    assert float(found) == pytest.approx(float(expected), abs=1e-12)


class Narrow(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.dtype == torch.float32 and out.numel() > 1:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_nothing_falls_back_to_float32(name):
    model = models.model(name, torch.float64)
    with Narrow() as undone:
        logits(model, [[5, 6, 7]])
    with Double(), Narrow() as narrow:
        logits(model, [[5, 6, 7]])
    assert undone.found
    assert not narrow.found


def test_honest_float32_is_within_the_gates(step, plain):
    assert judge(gradients(step, plain)).agrees


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda g: g["lm_head.weight"].mul_(1.001), "first lm_head.weight"),
        (lambda g: g["model.layers.1.mlp.up_proj.weight"][7].zero_(), "first model.layers.1.mlp.up_proj.weight"),
        (lambda g: g.update({"model.norm.weight": None}), "model.norm.weight (no gradient)"),
        (lambda g: g["model.layers.0.self_attn.k_proj.weight"].fill_(torch.nan), "k_proj.weight (not finite)"),
        (lambda g: [x.mul_(0.125) for x in g.values()], "is 0.125 times the definition's"),
    ],
    ids=["scale 1e-3", "a row", "none", "nan", "an eighth"],
)
def test_damage_is_seen_and_named(step, plain, damage, told):
    found = {name: g.clone() for name, g in plain.items()}
    damage(found)
    result = judge(gradients(step, found))
    assert not result.agrees
    assert told in result.message


def test_parameters_in_the_order_of_the_forward_pass(step):
    order = forward_order(slopes(step))
    assert (order[0], order[-2], order[-1]) == ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    layers = [int(n.split(".")[2]) for n in order if ".layers." in n]
    assert layers == sorted(layers)


def test_autocast_is_judged_by_bfloat16_and_no_wider():
    coarse = exact_step(stored_window.policy("llama", torch.float64), SFT, AutocastRounding)
    model = stored_window.policy("llama")
    with torch.autocast("cpu", torch.bfloat16):
        SFT(model).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert judge(gradients(coarse, found)).agrees
    wrong = {name: 1.1 * g for name, g in found.items()}
    assert not judge(gradients(coarse, wrong)).agrees


def test_a_replica_that_is_not_finite_is_an_error():
    """Entries where replicas overflow are not judged: of such replicas alone, anything at all would agree."""

    class Broken(AnyOperation):
        def rounded(self, out, dtype=None):
            return out * torch.nan

    broken = exact_step(stored_window.policy("llama", torch.float64), SFT, Broken)
    with pytest.raises(FloatingPointError, match="embed_tokens"):
        broken.replicas(IEEE_FP32, 1)


CANCELLING = {
    "softmax": lambda x, y: torch.ops.aten._softmax_backward_data(torch.ones_like(y), y, -1, torch.float64),
    "addmm": lambda x, y: torch.addmm(torch.zeros(1).double(), x, torch.tensor([[1.0], [-1.0]]).double()) - (x @ ONE),
    "embedding": lambda x, y: torch.ops.aten.embedding_dense_backward(-ONE, torch.tensor([0, 0]), 2, -1, False)[:1],
    "silu": lambda x, y: torch.ops.aten.silu_backward(y.new_ones(1), y.new_full((1,), -1.2784645427610738)),
}
"""Each is 0: at the last one the derivative of silu is."""
ONE = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)


@pytest.mark.parametrize("op", CANCELLING)
def test_what_cancels_is_uncertain_by_its_terms(op):
    """Each of these results is smaller than what it is summed from, and its spread is that of the terms."""
    x = torch.tensor([[1.0, 1.0 + 2**-20]], dtype=torch.float64)
    worst = 0.0
    for seed in range(8):
        with AnyOperation(IEEE_FP32, "fp32", seed):
            worst = max(worst, float(CANCELLING[op](x, torch.softmax(x, -1)).abs().amax()))
    assert worst > 2.0**-28


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [("grpo-trainer", {}), ("gmpo-trainer", {}), ("grpo-trainer", {"model": "qwen3_moe"}), ("sft-trainer", {})],
)
def test_replicas_of_a_step_run_at_once(trainer, settings, monkeypatch):
    """One by one they take five times as long: so they run where a definition branches on values, or vmap cannot pass a mark."""
    widths = []

    def drawn(problem, form, recipe, width, *more, together=Problem._together):
        widths.append(width or 0)
        return together(problem, form, recipe, width, *more)

    monkeypatch.setattr(Problem, "_together", drawn)
    found = [c for c in catalogue.cases(trainer, "pr", 0) if c.settings["check"] == "twins"]
    case = next(c for c in found if settings.items() <= c.settings.items())
    rows = list(run_case(case, select((f"{trainer}.released",)), "cpu", False))
    assert all(row.verdict in ("agree", "unsupported") for row in rows)
    assert widths[0] == FEW and min(widths) > 1


def spread(found, exact):
    return float((found - exact).square().mean().sqrt())


@pytest.mark.parametrize("loss", [GRPO, SFT], ids=["grpo", "sft"])
def test_as_far_from_exact_as_one_at_a_time(loss, monkeypatch):
    model = stored_window.policy("llama", torch.float64)
    stacked, alone = exact_step(model, loss), exact_step(model, loss)
    widths = []
    monkeypatch.setattr(torch, "vmap", lambda f, vmap=torch.vmap, **options: widths.append(f) or vmap(f, **options))
    many = stacked.replicas(IEEE_FP32, COUNT)
    assert len(widths) == sum(n < COUNT for n in stacked.steps)  # no silent fall back
    monkeypatch.setattr(torch, "vmap", Mock(side_effect=RuntimeError))
    each = alone.replicas(IEEE_FP32, COUNT)
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
