"""The trainers of the installed TRL: each has a check, or a reason why it has none."""

from types import SimpleNamespace

import pytest

from parity.errors import Unsupported
from parity.trainers import catalogue
from parity.trainers.checks import installed
from parity.trainers.execute import rows
from parity.trainers.rig import drive


def outcome(trainer, check="twins", path="released", **settings):
    family = catalogue.family(trainer)
    case = family.case(0, "fp32", {"check": check, **settings})
    chosen = [i for i in catalogue.implementations().values() if i.id == f"{trainer}.{path}"]
    return {row.quantity: row for row in rows(case, chosen)}


def test_every_trainer_is_covered_or_explained(monkeypatch):
    assert outcome("sft-trainer", check="found")["trainers"].verdict == "agree"
    real = installed.classes()
    monkeypatch.setattr(installed, "classes", lambda: real | {"BrandNewTrainer": "trl.experimental.new"})
    found = outcome("sft-trainer", check="found")["trainers"]
    assert found.verdict == "disagree"
    assert "BrandNewTrainer (trl.experimental.new)" in found.message


def test_reasons_are_about_trainers_without_checks():
    assert not set(installed.covered()) & set(installed.UNCOVERED)
    assert set(installed.covered()) <= set(installed.classes())


def test_what_is_covered_does_not_depend_on_what_was_loaded_before(monkeypatch):
    monkeypatch.setattr(catalogue, "load", dict)
    assert installed.covered() == {}


class PolicyTrainer:
    """As RLOOTrainer was before TRL 0.21: another trainer under the same name."""

    def __init__(self, config, processing_class, policy, ref_policy, reward_model):
        raise AssertionError("nobody builds it")


def test_another_trainer_under_the_name_is_refused_by_name(monkeypatch):
    released = drive.trl_class
    monkeypatch.setattr(drive, "trl_class", lambda name: PolicyTrainer if name == "RLOOTrainer" else released(name))
    found = outcome("rloo-trainer", check="advantages")
    assert {row.verdict for row in found.values()} == {"unsupported"}
    assert all("RLOOTrainer is another one: it takes no `model`" in row.message for row in found.values())


def test_a_release_that_scores_inside_its_loss_has_no_method_to_ask():
    assert drive.scorer(SimpleNamespace(_get_per_token_logps=None)) == "_get_per_token_logps"
    with pytest.raises(Unsupported, match="scores inside its loss"):
        drive.scorer(SimpleNamespace())
