"""Asynchronous GRPO's check sees mistakes beside `compute_loss`: in the packed tree, the queue, the attention."""

import pytest
import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing

from cases.selftest.trainers.asked import disagreeing, verdicts
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


attention = asynchronous._attention
MISTAKES = {
    "places": (_packed(_places), {}, "gradient"),
    "prefix": (_packed(_prefix), {}, "gradient"),
    "advantages": (_packed(lambda batch: batch | {"advantages": -batch["advantages"]}), {}, "loss"),
    "softcap": ((asynchronous, "_attention", _uncapped), {"model": "gemma2"}, "gradient"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_is_seen(mistake, monkeypatch):
    changed, asked, quantity = MISTAKES[mistake]
    monkeypatch.setattr(*changed)
    assert quantity in disagreeing(verdicts("async-grpo-trainer", "rollout-queue", **asked))


def test_a_rollout_that_is_too_old_is_seen(monkeypatch):
    original = async_grpo_trainer.RolloutQueueDataset.__init__
    kept = {"max_staleness": 1000}
    monkeypatch.setattr(
        async_grpo_trainer.RolloutQueueDataset, "__init__", lambda self, **given: original(self, **given | kept)
    )
    assert "sequences" in disagreeing(verdicts("async-grpo-trainer", "rollout-queue"))
