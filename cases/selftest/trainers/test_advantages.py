"""Advantages: definitions by hand, and the trainers' own held against them."""

import math

import pytest
import torch

pytest.importorskip("trl")

from cases.selftest.trainers.asked import call
from parity.trainers.catalogue import judge
from parity.trainers.checks import advantages

NAN = math.nan


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def by_definition(trainer, x, weights, quantity="advantages", **settings):
    return advantages.definition(call(trainer, "advantages", **settings), x, weights).exact[quantity].tolist()


def test_grpo_advantages_by_hand():
    x = column(1.0, 2.0, 3.0, 6.0, 5.0, NAN, 5.0, 5.0)
    exact = by_definition("grpo-trainer", x, [1.0], scale_rewards="none")
    assert exact == [-2.0, -1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    exact = by_definition("grpo-trainer", x, [1.0])
    std = math.sqrt(14 / 3) + 1e-4  # of 1, 2, 3, 6: (4 + 1 + 0 + 9) / 3
    assert exact == pytest.approx([-2 / std, -1 / std, 0.0, 3 / std, 0.0, 0.0, 0.0, 0.0])


def test_leave_one_out_by_hand():
    x = column(1.0, 2.0, 3.0, 6.0, NAN, 4.0, NAN, NAN)
    exact = by_definition("rloo-trainer", x, [1.0])
    assert exact == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 3 - 9 / 3, 6 - 6 / 3, 0.0, 0.0, 0.0, 0.0])


def test_weights_leave_out_what_a_function_does_not_score():
    x = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [NAN, NAN]], dtype=torch.float64)
    exact = by_definition("grpo-trainer", x, [1.0, -0.5], scale_rewards="none")
    assert exact == [0.0, -1.0, 1.0, 0.0]  # sums 0, -1, 1 and none: their mean is 0
    assert by_definition("grpo-trainer", x + 2, [1.0, -0.5], "reward") == pytest.approx(2 / 3)  # of 1, -2 and 3


@pytest.mark.parametrize("trainer", ["grpo-trainer", "rloo-trainer"])
def test_the_trainers_own_advantages_agree_and_a_wrong_one_does_not(trainer, monkeypatch):
    asked = call(trainer, "advantages", rewards="none")
    result, reward = map(judge, advantages.advantages(asked))
    assert result.agrees and reward.agrees
    given = advantages._asked
    monkeypatch.setattr(advantages, "_asked", lambda *args: [x * (1 + 1e-4) for x in given(*args)])
    result, reward = map(judge, advantages.advantages(asked))
    assert not result.agrees and "instead of" in result.message and not reward.agrees
