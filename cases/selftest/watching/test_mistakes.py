"""Mistakes of teams that a trial of the watch passed over: each is told, and its right neighbour is silent."""

import copy
import logging

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback

from cases.selftest.watching.runs import of, watched
from parity.trainers.rig import models


def found(watch):
    return [(f.what, f.text.partition(": ")[2]) for f in watch.findings]


class On(TrainerCallback):
    """Calls a function with what a callback gets, behind each step of the optimizer."""

    def __init__(self, do):
        self.do = do

    def on_optimizer_step(self, args, state, control, **given):
        self.do(given)


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("trainer", ["sft-trainer", "cpo-trainer"])
def test_an_optimizer_that_steps_twice(tmp_path, trainer, times):
    made = of(trainer, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    made.add_callback(On(lambda given: [given["optimizer"].step() for _ in range(times)]))
    watch, _ = watched(made, tmp_path)
    text = "the optimizer steps 2 times on the gradients of one step"
    assert found(watch) == [("update", text)] * times
    assert not made.optimizer.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_that_stay_for_the_next_step(tmp_path, kept):
    made = of("sft-trainer", max_steps=3)
    if kept:
        made.model.zero_grad = lambda **_: None
    watch, _ = watched(made, tmp_path)
    assert [text.partition(": ")[0] for _, text in found(watch)] == [
        "gradients of a step are still there at the next"
    ] * kept


ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17], [18, 19]]


def plain(tmp_path, pad="<pad>", labels=None, cls=transformers.Trainer):
    """transformers' own Trainer and collator, of rows that end with EOS."""
    model, tokenizer = copy.deepcopy((models.model("llama"), models.tokenizer()))
    tokenizer.pad_token = tokenizer.eos_token if pad == "<eos>" else tokenizer.pad_token
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    rows = Dataset.from_list([{"input_ids": [*row, tokenizer.eos_token_id]} for row in ROWS])
    made = cls(model, args, train_dataset=rows, processing_class=tokenizer, data_collator=collate)
    if labels is not None:
        made.data_collator = lambda rows: (batch := collate(rows)) | {"labels": labels(batch)}
    return made


class Own(transformers.Trainer):
    def compute_loss(self, model, inputs, **_):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        told = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none"
        )
        return (told * inputs["attention_mask"][:, 1:]).sum() / inputs["attention_mask"][:, 1:].sum()


ENDS = "the loss ends before the sequence does: the EOS token follows in 4 of 4 rows"


@pytest.mark.parametrize(
    "wanted, text",
    [
        ({}, None),
        ({"pad": "<eos>"}, ENDS),
        ({"labels": lambda batch: batch["input_ids"]}, "tokens of the loss are padding: "),
        ({"labels": lambda batch: batch["input_ids"], "cls": Own}, None),
        ({"labels": lambda batch: batch["input_ids"] + 1}, None),  # of no causal language model
    ],
)
def test_a_batch_whose_log_probs_are_not_seen(tmp_path, said, wanted, text):
    watch, _ = watched(plain(tmp_path, **wanted), tmp_path, every=50)
    assert [text in told for _, told in found(watch)] == [True] * (text is not None)
    noted = [line for line in said if line.endswith("Own has a loss of its own: no finding, if you meant that")]
    assert len(noted) == ("cls" in wanted)


@pytest.mark.parametrize("trains, dropout, random", [(True, 0.2, True), (True, 0.0, False), (False, 0.2, False)])
@pytest.mark.parametrize("trainer", ["dpo-trainer", "kto-trainer"])
def test_a_reference_in_training_mode(tmp_path, trainer, trains, dropout, random):
    made = of(trainer, max_steps=1)
    made.ref_model.config.attention_dropout = dropout
    for layer in made.ref_model.model.layers:
        layer.self_attn.attention_dropout = dropout
    made.ref_model.train(trains)
    watch, _ = watched(made, tmp_path)
    text = "the reference's log-probs are random: it is in training mode, and its dropout drops"
    assert (("reference", text) in found(watch)) == random and bool(watch.findings) == random


def test_padding_at_the_left_without_a_mask_is_seen(tmp_path):
    made = of("sft-trainer", max_steps=1)
    collate = made.data_collator

    def unmasked(rows):
        batch = collate(rows)
        for i, pads in enumerate((batch["attention_mask"] == 0).sum(1)):
            for x in batch.values():
                x[i] = x[i].roll(int(pads))
        places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": places}

    made.data_collator = unmasked
    watch, _ = watched(made, tmp_path)
    assert [text.partition(": ")[0] for _, text in found(watch)] == ["attention sees padding"]


@pytest.mark.parametrize("rates, idle", [((0.01, 0.0), True), ((0.01, 0.001), False), ((0.0, 0.0), False)])
def test_a_learning_rate_of_0_of_some_parameters(tmp_path, said, rates, idle):
    made = of("sft-trainer", max_steps=3, lr_scheduler_type="constant")
    norm = made.model.model.norm.weight
    others = [p for p in made.model.parameters() if p is not norm]
    made.optimizer = torch.optim.AdamW([{"params": others, "lr": rates[0]}, {"params": [norm], "lr": rates[1]}])
    watch, _ = watched(made, tmp_path)
    text = "watch, step 2: the learning rate is 0 of some parameters alone: model.norm.weight"
    assert not watch.findings and said == [text] * idle


def test_the_last_line_names_a_step_once(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(logging.getLogger("parity.watch"), "warning", lambda text, *given: lines.append(text % given))
    made = of("sft-trainer")
    made.model.model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    watched(made, tmp_path)
    assert lines[-1].startswith("watch: looked at step 1, 2 in ")
