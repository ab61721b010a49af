"""Advantages of a run that is watched: TRL's are silent, wrong ones are named."""

import functools
import math

import pytest
import torch

import parity
from cases.selftest.watching.runs import grpo, of, sampler, watched
from parity.trainers.definitions.baselines import Baseline
from parity.watching import rewards

NAN = math.nan
TABLE = torch.tensor([[0.1, 3.0], [0.7, 1.0], [0.2, NAN], [0.4, 1.0], [0.3, 0.0], [NAN, NAN], [0.6, 2.0], [0.6, 2.5]])
ALIKE = torch.tensor([[0.1]] * 4 + [[0.3], [0.1], [0.1], [0.1]])
PLAIN = torch.tensor([[0.1], [0.7], [0.2], [0.4], [0.3], [0.9], [0.6], [0.5]])


def earning(trainer, table=TABLE, weights=(1.0, -0.5)):
    """The trainer, whose completions earn the same each time."""
    trainer.reward_funcs = trainer.reward_processing_classes = [None] * table.shape[1]
    trainer.reward_func_names = [f"function {i}" for i in range(table.shape[1])]
    trainer.reward_weights = torch.tensor(weights[: table.shape[1]])
    trainer._calculate_rewards = lambda *_: table.to(trainer.accelerator.device)
    return trainer


def changed(change, **methods):
    """A subclass's method that hands out other advantages."""

    def generate(self, inputs):
        out = super(type(self), self)._generate_and_score_completions(inputs)
        return out | {"advantages": change(out["advantages"])}

    return generate


def subclassed(trainer, change):
    trainer.__class__ = type("Users", (type(trainer),), {"_generate_and_score_completions": changed(change)})
    return trainer


@pytest.mark.parametrize("table", [TABLE, ALIKE])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"scale_rewards": "batch"}, {"scale_rewards": False}, {"multi_objective_aggregation": "normalize_then_sum"}],
)
def test_trls_advantages_are_silent(tmp_path, said, table, wanted):
    watch, lines = watched(earning(grpo(sampler, **wanted), table), tmp_path)
    assert not watch.findings and not said and len(lines) == 2


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("more", [{"beta": 0.0}, {"beta": 0.5}, {"beta": 0.5, "reward_clip_range": (-0.1, 0.3)}])
def test_rloos_are_silent_and_turned_ones_are_not(tmp_path, normalize, more, monkeypatch):
    asked = []
    monkeypatch.setattr("parity.watching.watch.advantage_faults", lambda *given: asked.append(rewards.faults(*given)))
    rloo = functools.partial(
        of, "rloo-trainer", **more, learning_rate=0.1, normalize_advantages=normalize, num_generations=4
    )
    run = functools.partial(rloo, per_device_train_batch_size=8, max_completion_length=4)
    trainer = earning(run())
    watched(trainer, tmp_path)
    watched(subclassed(earning(run()), lambda a: -a), tmp_path)
    assert len(asked) == 4 and asked[:2] == [None, None]
    assert asked[-1][1] == ["turned in sign"]


WRONG = {
    "not divided by n - 1, but by n": Baseline(4, less=0),
    "less the mean of the batch, not of the group": Baseline(8),
    "as with scale_rewards='none'": Baseline(4, "none"),
    "as with scale_rewards='batch'": Baseline(4, "batch"),
}


@pytest.mark.parametrize("cause", WRONG)
def test_a_baseline_of_another_kind_is_said_and_no_finding(tmp_path, said, cause):
    other = WRONG[cause].of(PLAIN, ~PLAIN.isnan(), torch.ones(1))
    watch, _ = watched(subclassed(earning(grpo(sampler), PLAIN), lambda a: other.to(a)), tmp_path)
    assert not watch.findings
    assert any(f": {cause}; Users has a loss of its own" in line for line in said), said


@pytest.mark.parametrize(
    "change, cause",
    [
        (lambda a: a.flip(0), "in another order"),
        (lambda a: -a, "turned in sign"),
        (lambda a: PLAIN[:, 0].to(a), "the rewards themselves"),
        (lambda a: a * 1.01, "no known cause"),
    ],
)
def test_other_advantages_are_said(tmp_path, said, change, cause):
    watched(subclassed(earning(grpo(sampler), PLAIN), change), tmp_path)
    assert any(
        line.startswith("watch, step 1: advantages are not GRPO's") and f": {cause};" in line for line in said
    ), said


def test_weights_that_are_left_out_are_a_finding_where_trl_generates(tmp_path):
    trainer = earning(grpo(sampler))
    generate = trainer._generate_and_score_completions

    def unweighted(inputs):
        kept, trainer.reward_weights = trainer.reward_weights, torch.ones(2)
        out = generate(inputs)
        trainer.reward_weights = kept
        return out

    trainer._generate_and_score_completions = unweighted
    watch, _ = watched(trainer, tmp_path)
    (text,) = {f.text for f in watch.findings if "advantages" in f.text and "step 1" in f.text}
    assert "without reward_weights" in text


BELOW = torch.where(torch.arange(8)[:, None] == 2, -math.inf, PLAIN)


@pytest.mark.parametrize("table", [PLAIN.bfloat16(), BELOW, PLAIN[:7], PLAIN[:, 0], TABLE, PLAIN.tolist()])
def test_what_the_definition_is_not_of_is_not_compared(table):
    trainer = earning(grpo(sampler, multi_objective_aggregation="normalize_then_sum"), PLAIN)
    assert rewards.faults(trainer, table, {"advantages": torch.zeros(len(table))}) is None


def test_equal_rewards_whose_sums_are_all_off_alike_are_silent():
    table = torch.full((256, 3), 0.3)
    table[::5], table[1] = NAN, 0.0
    found = Baseline(64, late=True).of(table.nan_to_num(0.0), ~table.isnan(), torch.ones(3))
    trainer = earning(grpo(sampler, multi_objective_aggregation="normalize_then_sum"), table, (1.0, 1.0, 1.0))
    trainer.num_generations = 64
    assert rewards.faults(trainer, table, {"advantages": found}) is None
    assert rewards.faults(trainer, table, {"advantages": 1.01 * found}) is not None


def test_an_own_loss_is_said_beside_own_advantages(tmp_path, said):
    def doubled(self, model, inputs):
        return 2 * super(type(self), self)._compute_loss(model, inputs)

    trainer = earning(grpo(sampler), PLAIN)
    methods = {"_generate_and_score_completions": changed(lambda a: -a), "_compute_loss": doubled}
    trainer.__class__ = type("Users", (type(trainer),), methods)
    watched(trainer, tmp_path)
    assert any("turned in sign; Users" in line for line in said)
    assert any("2 times the definition's; Users" in line for line in said), said


def test_rewards_that_no_generation_asked_for_are_not_kept(tmp_path):
    trainer = earning(grpo(sampler))
    watch = parity.watch(trainer, to=tmp_path / "watch.ndjson")
    for _ in range(9):
        trainer._calculate_rewards()
    assert len(watch._rewards) == 2


@pytest.mark.parametrize("change", [lambda a: a[:4], lambda a: a[:, None].expand(-1, 3)])
def test_advantages_of_another_shape_are_not_compared(change):
    trainer = earning(grpo(sampler))
    assert rewards.faults(trainer, TABLE, {"advantages": change(torch.zeros(8))}) is None


def test_a_kl_that_rloo_leaves_out_is_named(tmp_path, said):
    run = of(
        "rloo-trainer",
        beta=0.5,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=4,
        learning_rate=0.1,
    )
    alone = Baseline(4, others=True).of(PLAIN, ~PLAIN.isnan(), torch.ones(1))
    watched(subclassed(earning(run, PLAIN), lambda a: alone.to(a)), tmp_path)
    assert any("without the KL;" in line for line in said), said
