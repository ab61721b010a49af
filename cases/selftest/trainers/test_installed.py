"""The trainers of the installed TRL: each has a check, or a reason why it has none."""

from parity.trainers import catalogue
from parity.trainers.checks import installed
from parity.trainers.execute import rows


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
