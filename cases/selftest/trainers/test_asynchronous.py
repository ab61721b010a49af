"""Asynchronous GRPO's check sees mistakes beside `compute_loss`: in the packed tree, the queue, the attention."""

import threading

import pytest
import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing

from cases.selftest.trainers.asked import disagreeing, verdicts
from parity.registry import run_case, select
from parity.trainers import catalogue
from parity.trainers.checks import asynchronous


def _packed(change):
    original = packing.TreeRow.pack
    return packing.TreeRow, "pack", lambda row: change(original(row))


def _places(batch):
    """Positions in the row, not in the sequence."""
    return batch | {"position_ids": torch.arange(len(batch["position_ids"]))}


def _prefix(batch):
    """A branch does not see the tokens that it shares."""
    starts = batch["tree_cu_seqlens_q"].tolist()
    return batch | {"tree_kv_index": torch.arange(starts[-1]), "tree_cu_seqlens_k": batch["tree_cu_seqlens_q"]}


def _uncapped(*given, **options):
    return attention(*given, **options | {"softcap": 0.0})


def _anywhere(*given, **options):
    return attention(*given, **options | {"causal": False})


def _short(batch):
    """The kernel stops before the end of the longest path."""
    return batch | {"tree_max_seqlens": batch["tree_max_seqlens"] - torch.tensor([0, 1])}


def _zero(trainer):
    return ((name, 0 * x) for name, x in streamed(trainer))


attention, streamed = asynchronous._attention, async_grpo_trainer.AsyncGRPOTrainer._streaming_iter
MISTAKES = {
    "places": (_packed(_places), {}, "gradient"),
    "prefix": (_packed(_prefix), {}, "gradient"),
    "advantages": (_packed(lambda batch: batch | {"advantages": -batch["advantages"]}), {}, "loss"),
    "causal": ((asynchronous, "_attention", _anywhere), {}, "gradient"),
    "lengths": (_packed(_short), {}, "gradient"),
    "weights": ((async_grpo_trainer.AsyncGRPOTrainer, "_streaming_iter", _zero), {}, "weights"),
    "softcap": ((asynchronous, "_attention", _uncapped), {"model": "gemma2"}, "gradient"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_is_seen(mistake, monkeypatch):
    changed, asked, quantity = MISTAKES[mistake]
    monkeypatch.setattr(*changed)
    assert quantity in disagreeing(verdicts("async-grpo-trainer", "rollout-queue", **asked))


@pytest.mark.parametrize("older", [1, -1])
def test_a_rollout_that_is_too_old_is_seen_and_one_that_is_not(older, monkeypatch):
    original = async_grpo_trainer.RolloutQueueDataset.__init__

    def changed(self, **given):
        original(self, **given | {"max_staleness": given["max_staleness"] + older})

    monkeypatch.setattr(async_grpo_trainer.RolloutQueueDataset, "__init__", changed)
    assert "sequences" in disagreeing(verdicts("async-grpo-trainer", "rollout-queue"))


@pytest.mark.parametrize("more", [1, -1])
def test_a_row_that_is_not_filled_to_its_budget_is_seen(more, monkeypatch):
    original = packing.TreeRow.fits
    monkeypatch.setattr(packing.TreeRow, "fits", lambda row, sample, budget: original(row, sample, budget + more))
    assert "sequences" in disagreeing(verdicts("async-grpo-trainer", "rollout-queue", budget=True))


def test_a_window_of_any_size_has_a_row_and_leaves_no_thread():
    case = catalogue.family("async-grpo-trainer").case(58, "fp32", {"check": "rollout-queue", "budget": True})
    before = set(threading.enumerate())
    assert {row.verdict for row in run_case(case, select(["async-grpo-trainer.released"]))} == {"agree"}
    assert not [thread for thread in threading.enumerate() if thread not in before and "trace" in thread.name]


def test_of_a_completion_that_is_all_a_tools_no_share_is_asked():
    case = catalogue.family("async-grpo-trainer").case(20, "fp32", {"check": "rollout-queue", "tools": True})
    rows = {row.quantity: row for row in run_case(case, select(["async-grpo-trainer.released"]))}
    assert rows["clip_ratio/low_min"].value_oracle is not None and rows["clip_ratio/low_min"].verdict == "agree"
