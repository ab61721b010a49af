"""Asynchronous GRPO on stored rollouts: the released trainer agrees, a mistake shows in what it is about."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from parity.errors import Unsupported
from parity.selftest.mutants.trainers import EDITS, mutated
from parity.trainers import catalogue
from parity.trainers.checks import asynchronous
from parity.trainers.execute import rows
from parity.trainers.rig import drive, queued

TRAINER = "async-grpo-trainer"


def wrong(**settings):
    case = catalogue.family(TRAINER).case(0, "fp32", {"check": "async-step", **settings})
    found = list(rows(case, [i for i in catalogue.implementations().values() if i.id == f"{TRAINER}.released"]))
    assert found and {row.verdict for row in found} <= {"agree", "disagree"}
    return {row.quantity for row in found if row.verdict == "disagree"}


@pytest.mark.parametrize("settings", [s for _, s in asynchronous.cases("pr", 0)])
def test_as_released(settings):
    assert wrong(**settings) == set()


@pytest.mark.parametrize(("mutant", "seen"), [("bounds", {"loss"}), ("kl", {"kl"})])
def test_a_mistake_is_seen(mutant, seen):
    with drive.using(mutated(TRAINER, next(e for e in EDITS[TRAINER] if e.name == mutant))):
        assert wrong() == seen


def test_samples_that_see_each_other_are_seen(monkeypatch):
    """As packing would have it that forgets where a sample ends: every query sees all keys up to its own place."""
    attend = queued.attention

    def across(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        ends = torch.tensor([0, len(q)])
        n = len(q)
        return attend(q, k[:n], v[:n], ends, ends, n, n, **options)

    monkeypatch.setattr(queued, "attention", across)
    assert {"loss", "gradient"} <= wrong()


def test_the_attention_that_stands_in():
    """Two segments, the second behind a prefix of three keys, two heads on one: torch's own, with the mask written out."""
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 2, 8), torch.randn(9, 1, 8), torch.randn(9, 1, 8)
    ends = torch.tensor([0, 4, 6]), torch.tensor([0, 4, 9])
    found = queued.attention(q, k, v, *ends, 4, 5, causal=True)
    for a, b, c, d in ((0, 4, 0, 4), (4, 6, 4, 9)):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        parts = (x.transpose(0, 1) for x in (q[a:b], k[c:d].expand(-1, 2, -1), v[c:d].expand(-1, 2, -1)))
        expected = scaled_dot_product_attention(*parts, attn_mask=mask).transpose(0, 1)
        torch.testing.assert_close(found[a:b], expected)
    with pytest.raises(Unsupported, match="without a window"):
        queued.attention(q, k, v, *ends, 4, 5, causal=True, window_size=(2, 0))
