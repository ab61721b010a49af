"""Fixes of transformers' own Trainer: what a micro-batch's mean is divided by. Check `step` judges their numbers."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from parity.fixes import apply
from parity.fixes.patches import average_over_window, divide_by_accumulation
from parity.trainers.checks.plain_trainer import FAMILY, Rows
from parity.trainers.rig import drive, models, recorder
from parity.trainers.specs import SPECS


def built(name, split="1x4", **more):
    data = Rows(classes=name == "classifier")
    fed = {"train_dataset": data.numbers, "data_collator": data.batch}
    wanted = recorder.plain(split) | {"remove_unused_columns": False} | more
    model = models.model(name)
    if name == "qwen3_moe":
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    return drive.build(SPECS[FAMILY].upstream, model, wanted, **fed)


NEEDS = {
    "classifier": (["trainer.model_accepts_loss_kwargs"], ["trainer.get_batch_samples", "trainer.compute_loss"]),
    "qwen3_moe": (["trainer.compute_loss"], []),
    "glm4v": ([], ["trainer.get_batch_samples", "trainer.compute_loss"]),
    "llama": ([], []),
}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_model_needs_is_tried_and_taken_back(name):
    trainer = built(name)
    before, state = dict(vars(trainer)), torch.random.get_rng_state()
    with apply(trainer) as applied:
        found = [list(applied[n].changed) for n in ("divide_by_accumulation", "average_over_window")]
        assert found == list(NEEDS[name])
        again = apply(trainer)
        assert not again.changed
        again.undo()
        assert not found[0] or divide_by_accumulation(trainer).reason == "already applied"
        assert not found[1] or average_over_window(trainer).reason == "already applied"
    assert vars(trainer) == before
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("classifier", {"split": "4x1"}, "one micro-batch is a window"),
        ("glm4v", {"split": "4x1"}, "one micro-batch is a window"),
        ("glm4v", {"label_smoothing_factor": 0.1}, "smoothed labels"),
    ],
)
def test_it_says_why_there_is_no_need(name, more, reason):
    trainer = built(name, **more)
    assert reason in str(average_over_window(trainer))
    assert not divide_by_accumulation(trainer)


def test_rows_of_a_stream_are_not_taken():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    trainer = built("classifier")
    trainer.train_dataset = Stream()
    assert "stream" in str(divide_by_accumulation(trainer))
    trainer.model_accepts_loss_kwargs = False
    assert "stream" in str(average_over_window(trainer))


ROWS = [{"input_ids": models.ids(9, f"row {n}", n), "attention_mask": [1] * n} for n in (9, 4, 7, 12)]


def given(model, rows, collate=None, **more):
    wanted = recorder.plain("1x4") | {"remove_unused_columns": False} | more
    fed = {"train_dataset": rows} | ({"data_collator": collate} if collate else {})
    return drive.build(SPECS[FAMILY].upstream, model, wanted, **fed)


def summed(model, factor):
    """Its loss times a number that its batch says."""
    forward = model.forward

    def changed(*args, **kwargs):
        out = forward(*args, **{n: x for n, x in kwargs.items() if n != "num_items_in_batch"})
        out["loss"] = out["loss"] * factor(kwargs["labels"])
        return out

    model.forward = changed
    return model


def of_rows(labels):
    return labels.ne(-100).sum()


def padded(rows):
    batch = {n: [torch.tensor(row[n]) for row in rows] for n in rows[0]}
    return {n: torch.nn.utils.rnn.pad_sequence(x, True, -100 if n == "labels" else 0) for n, x in batch.items()}


@pytest.mark.parametrize("hidden", [(), (0,), (0, 1, 2)])
def test_a_model_that_divides_by_the_count_is_left_alone_whatever_its_first_rows(hidden):
    rows = [
        row | {"labels": [-100] * len(row["input_ids"]) if n in hidden else row["input_ids"]}
        for n, row in enumerate(ROWS)
    ]
    trainer = given(models.model("llama"), rows, padded)
    assert not divide_by_accumulation(trainer) and not average_over_window(trainer)


def test_a_sum_is_not_divided():
    trainer = given(
        summed(models.model("llama"), of_rows), [row | {"labels": row["input_ids"]} for row in ROWS], padded
    )
    assert "no mean over labels or rows" in str(divide_by_accumulation(trainer))


class Drawing:
    """A collator that draws from every source of random numbers, one of its own among them."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self, rows):
        drawn(self.generator)
        labels = torch.tensor([row["labels"] for row in rows])
        return padded([{n: x for n, x in row.items() if n != "labels"} for row in rows]) | {"labels": labels}


def drawn(generator):
    return random.random(), float(np.random.rand()), float(generator.random()), float(torch.rand(1))  # noqa: NPY002


def test_random_states_and_those_of_a_collator_stay():
    def next_draws(tried):
        collator = Drawing()
        trainer = given(models.model("classifier"), [row | {"labels": n % 3} for n, row in enumerate(ROWS)], collator)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
        assert not tried or divide_by_accumulation(trainer)
        assert not trainer.accelerator._dataloaders
        return drawn(collator.generator)

    assert next_draws(True) == next_draws(False)


def test_the_balance_of_experts_behind_a_lora_is_divided():
    peft = pytest.importorskip("peft")
    trainer = built("qwen3_moe")
    trainer.model = peft.get_peft_model(trainer.model, peft.LoraConfig(target_modules=["q_proj"]))
    assert divide_by_accumulation(trainer)


def test_a_loss_that_is_no_mean_over_labels_is_left_alone():
    trainer = built("glm4v")
    forward = trainer.model.forward

    def summed(*args, **kwargs):
        out = forward(*args, **kwargs)
        out["loss"] = out["loss"] * kwargs["labels"].ne(-100).sum()
        return out

    trainer.model.forward = summed
    assert "no mean over labels or rows" in str(average_over_window(trainer))


def test_coefficients_are_divided_by_processes_too(monkeypatch):
    trainer = built("qwen3_moe")
    batch = Rows(classes=False).batch([0, 1])
    count = torch.tensor(13)

    def balance():
        """The part of the loss that is the balance of experts."""
        found = []
        for coefficient in (0.5, 0.0):
            trainer.model.router_aux_loss_coef = coefficient
            found.append(float(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)))
        trainer.model.router_aux_loss_coef = 0.5
        return found[0] - found[1]

    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 4
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda self: 2))
    released = balance()
    with divide_by_accumulation(trainer):
        assert balance() == pytest.approx(released / 8, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_in_16_bits_a_mean_is_told_from_a_sum(seed):
    torch.manual_seed(seed)
    model = models.model("classifier").bfloat16()
    torch.nn.init.normal_(model.score.weight)
    rows = [row | {"labels": n % 3} for n, row in enumerate(ROWS)]
    assert divide_by_accumulation(given(model, rows, Drawing()))
    summing = summed(models.model("llama").bfloat16(), of_rows)
    assert not divide_by_accumulation(given(summing, [row | {"labels": row["input_ids"]} for row in ROWS], padded))


def test_rows_whose_tensors_cannot_be_cut_are_collated_again():
    def with_patches(rows):
        return padded(rows) | {"patches": torch.cat([torch.ones(len(row["input_ids"]), 2) for row in rows])}

    model = models.model("glm4v")
    forward = model.forward

    def seeing(*args, patches, **kwargs):
        assert len(patches) == int(kwargs["attention_mask"].sum())
        return forward(*args, **kwargs)

    model.forward = seeing
    trainer = given(model, [row | {"labels": row["input_ids"]} for row in ROWS], with_patches)
    assert average_over_window(trainer)
