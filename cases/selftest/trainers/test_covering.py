"""The cases of profile pr: every value of every setting that the long profiles have, of each trainer."""

import pytest
import torch

from parity.trainers import catalogue
from parity.trainers.check import CheckCall, every_value, shared
from parity.trainers.checks.twins import GRPO_TYPES
from parity.trainers.specs import TRAINERS


def test_a_part_of_the_cells_has_every_value_of_each_trainer():
    cases = [("a", {"x": x, "y": y}) for x in range(4) for y in range(3)]
    cases += [("b", {}), ("b", {"x": 1}), ("b", {"y": 2})]
    part = list(every_value(cases))
    assert len(part) < len(cases) and all(case in cases for case in part)
    for trainer in ("a", "b"):
        for name in ("x", "y"):
            every = {s.get(name) for t, s in cases if t == trainer}
            assert {s.get(name) for t, s in part if t == trainer} == every
    assert sum(t == "a" for t, _ in part) == 4  # no more than its longest axis
    assert [s for t, s in every_value(cases, part[:-1]) if t == "b"] == [part[-1][1]]  # listed ones count


def test_a_value_stands_beside_no_more_than_it_needs():
    """A path that refuses `weighting` still meets `ld_alpha`; `smoothing` of exo_pair stands only beside its loss."""
    cases = [
        ("a", {"weighting": True, "ld_alpha": 0.4}),
        ("a", {"ld_alpha": 0.4}),
        ("a", {"weighting": True}),
        ("a", {"loss": "exo_pair", "smoothing": 0.1}),
        ("a", {"loss": "exo_pair", "smoothing": 0.1, "weighting": True}),
    ]
    part = [settings for _, settings in every_value(cases)]
    for name, smallest in (("weighting", 1), ("ld_alpha", 1), ("smoothing", 2)):
        assert min(len(s) for s in part if name in s) == smallest
    listed = [("a", {"ld_alpha": 0.4, "weighting": True})]
    assert ("a", {"ld_alpha": 0.4}) in list(every_value(cases, listed))


def _values(name, check, profile):
    cases = catalogue.cases(name, profile, 3)
    return {kv for c in cases if c.settings["check"] == check for kv in c.settings.items()}


@pytest.mark.parametrize("check", ["losses", "sampler", "metrics", "advantages", "windows", "twins", "config-values"])
def test_pr_has_every_value_that_nightly_has_but_models_and_heads_of_shared_code(check):
    gone = {name: _values(name, check, "nightly") - _values(name, check, "pr") for name in TRAINERS}
    left = {(name, *kv) for name, values in gone.items() for kv in values}
    moved = {
        "twins": {"model", "checkpointing", "precision", "frozen"},
        "metrics": {"model"},
        "config-values": {"model", "head"},
    }
    assert {name for _, name, _ in left} <= moved.get(check, set())
    assert not {name for name, _, _ in left} & {"grpo-trainer", *(["sft-trainer"] if check == "twins" else [])}
    assert check != "config-values" or not {value for _, _, value in left} & {"gemma4", "phi", "hook"}


def test_the_ways_of_a_case_share_its_definition_and_no_other_case_does():
    fam = catalogue.family("sft-trainer")
    first, other = (fam.case(0, "fp32", {"check": "twins", "split": split}) for split in ("4x2", "2x4"))
    calls = [CheckCall(case, None, way, "cpu") for case in (first, other) for way in ("released", "fixed")]
    made = [shared(call, "step", lambda: torch.zeros(1)) for call in calls]
    assert made[0] is made[1] and made[2] is made[3] and made[0] is not made[2]
    assert shared(calls[2], "logged", lambda: torch.zeros(1)) is not made[2]
    assert shared(calls[0], "step", lambda: torch.zeros(1)) is not made[0]  # only the last case's is kept


@pytest.mark.parametrize("kind", ["evaluation", "truncated", "clipped"])
def test_pr_looks_at_each_loss_of_grpo_in_evaluation_truncated_and_with_ratios(kind):
    """Each is a branch of its own, with a normaliser and a ratio of its own."""
    asked = [s for t, s in catalogue.load()["windows"].listed("pr", 0) if t == "grpo-trainer" and s["kind"] == kind]
    assert {s["loss"] for s in asked} == set(GRPO_TYPES)


def test_quick_asks_more_than_one_case_of_a_users_trainer():
    mine, theirs = (catalogue.cases("sft-trainer", "quick", 0, asked=True, own=own) for own in (True, False))
    assert len(mine) > 20 and len(theirs) == 1


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_of_values_of_a_reward_model_is_asked_where_no_known_finding_moves_all_numbers(seed):
    """A loss that forgets the center where pairs have no margin was met with <eos> as padding alone."""
    asked = [case.settings for case in catalogue.cases("reward-trainer", "nightly", seed)]
    for margin in (False, True):
        for center in (0.0, 0.1):
            alike = [s for s in asked if s.get("margin", False) == margin and s.get("center", 0.0) == center]
            assert any(s.get("pad", "<pad>") == "<pad>" for s in alike), (margin, center)
    assert {"check": "reward-model", "pad": "<eos>"} in asked
