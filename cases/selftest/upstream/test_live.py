"""Trainers that share a base give the bits of trainers that are built from nothing; what changed in it is seen."""

from types import SimpleNamespace

import pytest
import torch

from parity.case.drawing import cases, draws
from parity.errors import HarnessError
from parity.families.policy import FAMILY
from parity.implementations import trl_replay, trl_trainer
from parity.protocol.call import backward, execute, fresh, gradients
from parity.registry import from_file, oracle_of, select
from parity.upstream import live, trl

DTYPES = ("fp32", "fp16", "bf16")
RELEASED = select(["trl.GRPOTrainer"], "policy")[0]


@pytest.fixture(scope="module")
def drawn():
    """Cases of every kind that a trainer is given, those left out that a release refuses for the adapter on its head."""
    found = [oracle_of(case).inputs for case in draws(cases(FAMILY, DTYPES, "quick"), "live", 14)]
    return [x for x in found if x.settings.head != "lora"]


@pytest.fixture
def never(monkeypatch):
    monkeypatch.setattr(live, "due", lambda: False)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(live, "due", lambda: True)


def given(inputs, shared):
    """Loss, metrics and gradients of one call."""
    x = fresh(inputs)
    found = trl_trainer._computed(x, trl_trainer.trainer(x, shared=shared))
    backward(x, found)
    return found | gradients(x)


def test_the_same_bits_as_from_nothing_whatever_came_before(drawn):
    expected = [given(x, shared=False) for x in drawn]
    for order in (range(len(drawn)), reversed(range(len(drawn)))):
        for i in order:
            found = given(drawn[i], shared=True)
            assert found.keys() == expected[i].keys()
            assert all(live._same(found[n], expected[i][n]) for n in found), drawn[i].case.id
    assert 1 <= len({x.settings.accumulation for x in drawn}) <= len(live._BASES)


def _of_a_model(out):
    """Everything that a model holds, its own objects told apart from their contents."""
    kept = {f"parameter {n}": (p.shape, p.dtype) for n, p in out.named_parameters()}
    for name, module in out.named_modules():
        kept |= {f"{name} {n}": live._looks(v) for n, v in vars(module).items() if not n.startswith("_modules")}
        kept[f"{name} of"] = type(module)
    return kept | {"config": out.config.to_dict(), "generation": out.generation_config.to_dict(), "says": repr(out)}


def test_a_copied_model_is_one_that_was_constructed(drawn):
    tied = oracle_of(FAMILY.case(1, "fp32", {"head": "tied", "bias": "random", "softcap": 5.0})).inputs
    for x in map(fresh, (*drawn, tied)):
        one, other, built = trl_replay.model(x, True), trl_replay.model(x, True), trl_replay.model(x)
        assert _of_a_model(one) == _of_a_model(built)
        theirs = {id(m) for m in other.modules()} | {
            id(v) for m in other.modules() for v in vars(m).values() if v == {}
        }
        mine = {id(m) for m in one.modules()} | {id(v) for m in one.modules() for v in vars(m).values() if v == {}}
        assert not mine & theirs and one.config is not other.config


def test_the_base_is_built_once(drawn, never, monkeypatch):
    from transformers import Trainer

    monkeypatch.setattr(live, "_BASES", {})  # none of those that tests before this one left
    for x in drawn:
        given(x, shared=True)
    bases, built, original = len(live._BASES), [], Trainer.__init__
    monkeypatch.setattr(Trainer, "__init__", lambda self, *a, **k: built.append(1) or original(self, *a, **k))
    for x in drawn:
        execute(RELEASED, x)
    assert not built
    for base in live._BASES.values():
        base.left["accelerator"].step = 17  # what a loss might leave behind
    for x in drawn:
        execute(RELEASED, x)
    assert len(built) == bases


def test_a_trainer_that_is_not_as_from_nothing_is_a_fault_of_the_harness(drawn, always, monkeypatch):
    x = next(x for x in drawn if x.settings.temperature != 1.0 and execute(RELEASED, x).verdict == "ran")
    right = live.build

    def wrong(kind, **given):
        out = right(kind, **given)
        out.epsilon_low += 1.0
        return out

    monkeypatch.setattr(live, "build", wrong)
    outcome = execute(RELEASED, x)
    assert (outcome.verdict, outcome.blame) == ("crashed", "harness")
    assert "differs from one built from nothing: attribute epsilon_low" in outcome.message


def test_a_construction_that_fails_only_where_it_shares_is_one_too(drawn, monkeypatch):
    given(drawn[0], shared=True)

    def failing(self, trainer, model, args):
        raise AttributeError("no accelerator")

    monkeypatch.setattr(live.Base, "hand_to", failing)
    with pytest.raises(HarnessError, match="built from nothing it does not: no accelerator"):
        given(drawn[0], shared=True)


def test_what_a_release_refuses_it_refuses_in_its_own_words(drawn, never, monkeypatch):
    given(drawn[0], shared=True)
    kind = trl.class_named("GRPOTrainer")
    x = fresh(drawn[0])
    with pytest.raises(TypeError, match="processing_class"):
        live.build(
            kind, model=trl_trainer.model(x), reward_funcs=None, args=trl_trainer.arguments(x), processing_class=1
        )


def test_a_user_s_trainer_shares_nothing(drawn, always):
    before = dict(live._BASES)
    own = next(i for i in from_file("fixtures/trainers.py:Same") if i.family == "policy")
    assert execute(own, drawn[0]).verdict == "ran"
    assert before == live._BASES


def test_one_in_fifty_is_compared():
    state = torch.random.get_rng_state()
    count = sum(live.due() for _ in range(20_000))
    assert 250 < count < 550, "400 expected, 20 the standard deviation"
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(("context", "elementwise"), [("plain", "fp32"), ("autocast", "bf16")])
def test_before_1_15_logits_have_the_dtype_of_autocast(monkeypatch, context, elementwise):
    """`logits / temperature` and the log-softmax of bf16 logits, as in trl 1.13.0's _get_per_token_logps_and_entropies."""
    monkeypatch.setattr(trl, "since", lambda version: False)
    x = oracle_of(FAMILY.case(1, "fp32", {"context": context})).inputs
    assert trl_trainer._recipe(x).resolve("fp32").elementwise == elementwise


def test_a_liger_path_takes_an_advantage_for_each_completion_alone(monkeypatch):
    monkeypatch.setattr(trl, "mentions", lambda *_: True)
    monkeypatch.setattr(trl, "since", lambda release: False)
    said = {}
    for advantages in ("mixed", "token"):
        asked = FAMILY.full_settings(FAMILY.case(1, "fp32", {"advantages": advantages}))
        asked = SimpleNamespace(**vars(asked), dtype="fp32", device="cpu")
        said[advantages] = {limit(asked) for limit in trl_trainer._limits(liger=True)}
    refused = "its Liger path takes advantages of shape (B,) only"
    assert refused in said["token"] and refused not in said["mixed"]
