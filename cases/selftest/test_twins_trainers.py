"""The twins against trainers that are wrong on purpose: each fault must show in the quantity that is about it."""

import pytest

from parity import trainers
from parity.trainers import drive, installed, twin_runs
from parity.trainers.execute import rows


def outcome(trainer, check="twins", **settings):
    family = trainers.family(trainer)
    case = family.case(0, "fp32", {"check": check, **settings})
    chosen = [i for i in trainers.implementations().values() if i.id == f"{trainer}.released"]
    return {row["quantity"]: row for row in rows(case, chosen)}


def verdicts(found):
    return {quantity: row["verdict"] for quantity, row in found.items()}


@pytest.mark.parametrize("trainer", list(twin_runs.CLASSES))
def test_a_window_cut_into_eight(trainer):
    assert set(verdicts(outcome(trainer, split="1x8")).values()) == {"agree"}


def test_divided_twice(monkeypatch):
    """What transformers 5.2.0 to 5.5.0 did: accelerate divides by the accumulation steps once more."""
    build = twin_runs.build

    def divided(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.accelerator.gradient_accumulation_steps = 4
        return trainer

    monkeypatch.setattr(twin_runs, "build", divided)
    found = outcome("sft-trainer", split="2x4")
    assert verdicts(found)["loss"] == "agree"
    assert found["gradient"]["verdict"] == "disagree"
    assert "is 0.25 times the definition's" in found["gradient"]["message"]
    assert "first model.embed_tokens.weight" in found["gradient"]["message"]


def test_a_lost_sequence(monkeypatch):
    dataset = twin_runs.dataset
    monkeypatch.setattr(twin_runs, "dataset", lambda trainer, chosen: dataset(trainer, [*chosen[:7], chosen[0]]))
    found = outcome("sft-trainer", split="2x4")
    assert found["sequences"]["verdict"] == "disagree"
    assert "missing" in found["sequences"]["message"]


def test_a_lost_tool_mask(monkeypatch):
    monkeypatch.setattr(twin_runs, "_with_tools", lambda trainer: None)
    assert outcome("grpo-trainer", tools=True)["gradient"]["verdict"] == "disagree"


def test_checkpointing_that_does_nothing(monkeypatch):
    monkeypatch.setattr(drive, "checkpointing", lambda kind: {"gradient_checkpointing": False})
    found = outcome("sft-trainer", checkpointing=drive.NON_REENTRANT)
    assert found["gradient"]["verdict"] == "agree"
    assert found["saved activations"]["headroom"] == pytest.approx(1.0)


def test_checkpointing_keeps_less():
    assert outcome("sft-trainer", checkpointing=drive.REENTRANT)["saved activations"]["headroom"] < 0.5


def test_a_resumed_run_that_starts_elsewhere(monkeypatch):
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda self, folder, model=None: None)
    found = outcome("sft-trainer", check="windows", kind="resumed")
    assert found["parameters"]["verdict"] == "disagree"


def test_uneven_windows():
    assert set(verdicts(outcome("sft-trainer", check="windows", kind="uneven")).values()) == {"agree"}
    kto = verdicts(outcome("kto-trainer", check="windows", kind="uneven"))
    assert (kto["windows"], kto["gradient of window 2"]) == ("agree", "disagree")


def test_every_trainer_is_covered_or_explained(monkeypatch):
    assert outcome("sft-trainer", check="found")["trainers"]["verdict"] == "agree"
    real = installed.classes()
    monkeypatch.setattr(installed, "classes", lambda: real | {"BrandNewTrainer": "trl.experimental.new"})
    found = outcome("sft-trainer", check="found")["trainers"]
    assert found["verdict"] == "disagree"
    assert "BrandNewTrainer (trl.experimental.new)" in found["message"]


def test_reasons_are_about_trainers_without_checks():
    assert not set(installed.covered()) & set(installed.UNCOVERED)
    assert set(installed.covered()) <= set(installed.classes())
