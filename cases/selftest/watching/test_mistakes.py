"""Mistakes of teams that a trial of the watch passed over: each is told, and its right neighbour is silent."""

import copy

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
