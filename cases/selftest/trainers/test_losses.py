"""Losses of the preference trainers: what no control shows by hand, and each judged in a real trainer."""

import inspect
import math
import re
from types import SimpleNamespace

import pytest
import torch

from cases.selftest.mutants import trainers as mutants
from cases.selftest.trainers.asked import rows, wrong
from parity.families.preference_losses import CPO, DPO, Pairs
from parity.trainers import check
from parity.trainers.checks import losses
from parity.trainers.definitions import formulas, scored, training_step
from parity.trainers.definitions.formulas import MIXED, Loss
from parity.trainers.rig import drive, stored_window
from parity.trainers.rig.stored_window import Window

PLAIN = {"beta": 0.5, "smoothing": 0.0}


def pairs(chosen, rejected, ref_chosen, ref_rejected, **settings):
    """Pairs of given log-probs of whole completions."""
    policy, reference = (torch.tensor(x, dtype=torch.float64) for x in ((chosen, rejected), (ref_chosen, ref_rejected)))
    return Pairs(SimpleNamespace(**PLAIN | settings), policy, reference, (), torch.zeros(()))


def test_the_loss_that_draws_seldom_have_by_hand():
    """Log-ratios 3 and -1, beta 0.5."""
    found = DPO["sppo_hard"](pairs([2.0], [-4.0], [-1.0], [-3.0]))
    assert found.item() == pytest.approx((3 - 1) ** 2 + (-1 + 1) ** 2, rel=1e-12)


def test_the_sorted_losses_compare_order_statistics():
    two = pairs([2.0, 0.0], [1.0, -3.0], [0.0, 0.5], [0.0, 0.0], beta=1.0)
    # policy 1 and 3, reference 0 and 0.5: sorted differences 1 and 2.5
    expected = [math.log1p(math.exp(-1.0)), math.log1p(math.exp(-2.5))]
    assert DPO["aot"](two).tolist() == pytest.approx(expected)
    # chosen ratios 2 and -0.5, rejected 1 and -3: sorted differences 2.5 and 1
    assert DPO["aot_unpaired"](two).tolist() == pytest.approx(expected[::-1])
    smoothed = DPO["aot"](pairs([2.0, 0.0], [1.0, -3.0], [0.0, 0.5], [0.0, 0.0], beta=1.0, smoothing=0.1))
    assert smoothed[0].item() == pytest.approx(0.9 * expected[0] + 0.1 * math.log1p(math.exp(1.0)))


def test_what_lies_behind_the_shorter_completion_is_weighted():
    sides = [[torch.tensor([-1.0, -2.0, -4.0])], [torch.tensor([-8.0])]]
    assert [s.item() for s in formulas._summed(sides, 0.5)] == [-1.0 - 3.0, -8.0]


def test_prompts_take_the_completion_of_the_sequence_before():
    window = [([1, 2, 10], 2), ([3, 20, 21], 1), ([4, 5, 6, 30], 3)]
    assert stored_window.mismatched(window, 3) == [([1, 2, 30], 2), ([3, 10], 1), ([4, 5, 6, 20, 21], 3)]
    assert stored_window.mismatched(window, 2) == [([1, 2, 20, 21], 2), ([3, 10], 1), ([4, 5, 6, 30], 3)]


def test_both_sides_of_the_pairs_are_one_batch_of_each_model(monkeypatch):
    """Each is what it would be in a batch of its own."""
    loss = Loss(Window.of("dpo-trainer"), SimpleNamespace(loss="sigmoid", model="llama"))
    model = stored_window.policy("llama", torch.float64)
    alone = [loss.scored(model, side) for side in loss.window.pair()]
    wanted = [torch.cat(side.tokens) for side in alone] + [torch.cat(side.base.tokens) for side in alone]
    called, own = [], scored.logits
    monkeypatch.setattr(scored, "logits", lambda model, window: called.append(len(window)) or own(model, window))
    sides = loss.sides(model)
    found = [torch.cat(side.tokens) for side in sides] + [torch.cat(side.base.tokens) for side in sides]
    assert called == [16, 16]
    assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("ratios", "expected"), [([3.0, -1.0, 2.0], [1, 1, 2]), ([-3.0, 1.0, 2.0], [0, 0, 2])])
def test_the_kl_of_other_prompts_is_a_mean_and_not_negative(monkeypatch, ratios, expected):
    loss = Loss(Window.of("kto-trainer"), SimpleNamespace(model="llama", split="2x4"))
    asked = []
    given = SimpleNamespace(ratios=torch.tensor(ratios, dtype=torch.float64))
    monkeypatch.setattr(loss, "scored", lambda model, window: asked.append(window) or given)
    assert formulas.kl_of_others(loss, None).tolist() == expected
    assert asked == [stored_window.mismatched(loss.window.sequences, 2)]


def test_a_likelihood_that_leaves_out_a_word_with_id_0_is_told():
    """TRL's DPO up to 0.28 ignores label 0, which most vocabularies have."""
    asked = {"check": "losses", "loss": "sft"}
    (edit,) = (e for e in mutants.EDITS["dpo-trainer"] if e.name == "first-id")
    with drive.using(mutants.mutated("dpo-trainer", edit)):
        assert wrong("dpo-trainer", **asked) == set()
        assert wrong("dpo-trainer", **asked, zero=True) == {"loss", "gradient", "evaluation loss"}


def test_every_loss_type_of_the_installed_trainers_has_a_definition():
    source = inspect.getsource(drive.trl_class("DPOTrainer")._compute_loss)
    named = set(re.findall(r'loss_type == "(\w+)"', source))
    assert named == set(DPO)
    assert {name for mixed in MIXED.values() for name in mixed} <= named
    source = inspect.getsource(drive.trl_class("CPOTrainer").cpo_loss)
    assert {*re.findall(r'loss_type == "(\w+)"', source), "alphapo"} == set(CPO)


def test_a_loss_of_another_trainer_is_not_run():
    (row,) = rows("kto-trainer", "losses", loss="hinge").values()
    message = "kto-trainer has no loss type hinge: kto, apo_zero_unpaired"
    assert (row.verdict, row.message) == ("unsupported", message)


def test_cells_of_nightly_name_every_loss_of_every_trainer():
    seen = {(t, c.get("loss", losses.SETTINGS["loss"].default)) for t, c in losses.cases(0)}
    assert seen == {(t, name) for t, names in losses.OWN.items() for name in names}


def test_an_oracle_that_cannot_be_judged_with_is_a_fault_and_no_skipped_case(monkeypatch):
    """Hinge too: a pair beyond the margin stays off in every replica."""
    found = rows("dpo-trainer", "losses", loss="hinge")
    assert {r.verdict for r in found.values()} == {"agree"} and found.keys() >= {"loss", "gradient"}
    monkeypatch.setattr(training_step, "FARTHEST", 0.0)
    monkeypatch.setattr(check, "_SHARED", {})
    crashed = rows("dpo-trainer", "losses", loss="hinge")[None]
    assert (crashed.verdict, crashed.blame) == ("crashed", "harness")
