"""Mistakes of teams that a trial of the watch passed over: each is told, and its right neighbour is silent."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import TrainerCallback

from cases.selftest.watching.runs import grpo, of, watched, within
from parity.trainers.rig import models
from parity.watching import batch
from parity.watching.told import Told


def found(watch):
    return [(f.what, f.text.partition(": ")[2]) for f in watch.findings]


class On(TrainerCallback):
    """Calls a function with what a callback gets, behind each step of the optimizer."""

    def __init__(self, do):
        self.do = do

    def on_optimizer_step(self, args, state, control, **given):
        self.do(given)


class Before(On):
    """Before each."""

    def on_pre_optimizer_step(self, args, state, control, **given):
        self.do(given["model"].parameters())

    def on_optimizer_step(self, *args, **given):
        pass


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("trainer", ["sft-trainer", "cpo-trainer"])
def test_an_optimizer_that_steps_twice(tmp_path, trainer, times):
    made = of(trainer, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    made.add_callback(On(lambda given: [given["optimizer"].step() for _ in range(times)]))
    watch, _ = watched(made, tmp_path)
    text = "the optimizer steps 2 times on the gradients of one step"
    assert found(watch) == [("update", text)] * times
    assert not made.optimizer.optimizer._optimizer_step_post_hooks


class OfTheUser(torch.optim.AdamW):
    """Its step calls that of its base, which has the hooks too where an AdamW was made before."""

    def step(self, closure=None):
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """One that wraps another without the constructor of its base: it has no room for hooks."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}
        self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("kind", [OfTheUser, lambda params, lr: Around(torch.optim.AdamW(params, lr))])
def test_an_optimizer_of_the_user_s_own_steps_once(tmp_path, kind):
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    made = of("sft-trainer", max_steps=3)
    made.optimizer = kind(made.model.parameters(), lr=1e-3)
    watch, _ = watched(made, tmp_path)
    assert not watch.findings


def test_no_hook_stays_behind_a_run_of_one_step(tmp_path):
    made = of("sft-trainer", max_steps=1)
    watched(made, tmp_path)
    inner = made.optimizer.optimizer
    assert not inner._optimizer_step_post_hooks and not inner._optimizer_step_pre_hooks


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


def plain(tmp_path, pad="<pad>", labels=None, cls=transformers.Trainer, size=4):
    """transformers' own Trainer and collator, of rows that end with EOS."""
    model, tokenizer = copy.deepcopy((models.model("llama"), models.tokenizer()))
    tokenizer.pad_token = tokenizer.eos_token if pad == "<eos>" else tokenizer.pad_token
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    given = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, **given)
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


class LeavesPadding(torch.nn.Module):
    """A model of the user's own, whose loss ignores padding by its id."""

    def __init__(self, inner, pad):
        super().__init__()
        self.inner, self.pad, self.config = inner, pad, inner.config

    def forward(self, input_ids, attention_mask, labels, **_):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        return {"loss": torch.nn.functional.cross_entropy(logits.mT, labels[:, 1:], ignore_index=self.pad)}


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


def test_a_model_of_the_user_s_own_may_leave_padding_out_itself(tmp_path, said):
    made = plain(tmp_path, labels=lambda batch: batch["input_ids"])
    made.model = made.model_wrapped = LeavesPadding(made.model, made.processing_class.pad_token_id)
    watch, _ = watched(made, tmp_path)
    assert not watch.findings and said[-1].endswith(
        "LeavesPadding has a loss of its own: no finding, if you meant that"
    )


def test_a_batch_without_a_tokenizer_is_judged_by_its_mask():
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    for there, lost in (([1, 1, 1], []), ([1, 0, 0], ["1 of 4"])):
        given = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[1, 1, 1], there])}
        assert [size for _, (size,) in batch.unscored(given, None)] == lost


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("row", [[5, 6, 2, 7, 2, 2, 2], [2, 2, 2, 5, 6, 2, 7]])
def test_empty_texts_of_a_packed_row_are_no_padding(row, packed):
    """Where EOS pads too; without an EOS between others the row is one text, and the rest is padding."""
    ids = torch.tensor([row, [3, 4, 5, 6, 8, 9, 10]])
    ids = ids if packed else ids.where(ids != 7, 2).where(torch.arange(7) != (2 if row[0] == 5 else 5), 5)
    ones = SimpleNamespace(eos_token_id=2, pad_token_id=2)
    given = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    assert bool([*batch.unscored(given, ones)]) != packed


def test_padding_in_each_micro_batch_of_a_step_is_one_finding(tmp_path):
    made = plain(tmp_path, labels=lambda batch: torch.nn.functional.pad(batch["input_ids"], (0, 3)), size=2)
    collate = made.data_collator

    def padded(rows):
        batch = collate(rows)
        return {n: x if n == "labels" else torch.nn.functional.pad(x, (0, 3)) for n, x in batch.items()}

    made.data_collator = padded
    watch, _ = watched(made, tmp_path, every=50)
    assert len(watch.findings) == 1


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


def test_a_finding_with_another_count_is_said_once(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(logging.getLogger("parity.watch"), "warning", lambda text: lines.append(text))
    made = Told(SimpleNamespace(state=SimpleNamespace(global_step=1)), "warn", tmp_path)
    monkeypatch.setattr(made, "_known", lambda what: "")
    for rows in (2, 3, 4):  # the last of another micro-batch of the step
        made.trainer.state.global_step = min(rows, 3)
        made._wrong(("the collator turns labels", [f"in {rows} of 4 rows"]))
    made._wrong(("the loss is another", ["a factor of 2"]))
    made._wrong(("the loss is another", ["a factor of 4"]))
    assert len(made.findings) == 4 and [line.rpartition(": ")[2] for line in lines] == [
        "in 2 of 4 rows",
        "a factor of 2",
        "a factor of 4",
    ]


def exchanged(batch):
    half = len(batch["input_ids"]) // 2
    return {name: x.roll(half, 0) for name, x in batch.items()}


COLLATED = {
    "chosen and rejected": ("dpo-trainer", exchanged, "the collator exchanges chosen and rejected"),
    "prompts": (
        "dpo-trainer",
        lambda batch: batch | {"completion_mask": batch["attention_mask"]},
        "the collator puts tokens into the loss that the columns leave out",
    ),
    "labels": ("kto-trainer", lambda batch: batch | {"label": ~batch["label"]}, "the collator turns labels"),
    "KL": (
        "kto-trainer",
        lambda batch: batch | {f"KL_{n}": batch[n] for n in ("input_ids", "attention_mask", "completion_mask")},
        "the collator exchanges completions and those of the KL",
    ),
    "cut": (
        "sft-trainer",
        lambda batch: {name: x[:, :-2] for name, x in batch.items()},
        "the collator drops tokens of the loss",
    ),
}


@pytest.mark.parametrize("name", COLLATED)
def test_a_collator_that_contradicts_its_rows(tmp_path, said, name):
    trainer, change, text = COLLATED[name]
    made = of(trainer, max_steps=1)
    collate = made.data_collator
    made.data_collator = lambda rows: change(collate(rows))
    watch, _ = watched(made, tmp_path)
    assert text in [told.partition(": ")[0] for _, told in found(watch)]


@pytest.mark.parametrize(
    "trainer, wanted",
    [
        ("dpo-trainer", {"max_length": 6}),
        ("kto-trainer", {"max_length": 6}),
        ("sft-trainer", {"max_length": 6}),
        ("sft-trainer", {"packing": True, "max_length": 16}),
        ("sft-trainer", {"padding_free": True, "max_length": None}),
    ],
)
def test_what_a_collator_may_do_is_silent(tmp_path, said, trainer, wanted):
    """TRL's cuts and packing, and rows in another order, padded at the left."""
    made = of(trainer, max_steps=1, **wanted)
    collate = made.data_collator

    def moved(rows):
        batch = collate(rows[::-1])
        for i, pads in enumerate((batch["attention_mask"] == 0).sum(1) if "attention_mask" in batch else ()):
            for x in batch.values():
                if x.dim() == 2:
                    x[i] = x[i].roll(int(pads))
        return batch

    made.data_collator = moved if "packing" not in wanted else collate
    watch, _ = watched(made, tmp_path)
    assert not watch.findings and not any("collator" in line for line in said)


def test_prompts_that_a_collator_cuts_are_a_note(tmp_path, said):
    made = of("dpo-trainer", max_steps=1)
    collate = made.data_collator
    made.data_collator = lambda rows: {name: x[:, 1:] for name, x in collate(rows).items()}
    watch, _ = watched(made, tmp_path)
    (line,) = [line for line in said if "the collator drops tokens outside the loss" in line]
    assert not watch.findings and line.endswith("DPOTrainer has a collator of its own: no finding, if you meant that")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor, text", [(-1, "-1 times"), (3, "3 times"), (0.3, None), (1, None)])
def test_gradients_that_are_changed_before_the_step(tmp_path, factor, text, dtype):
    """Clipping, by TRL too, is silent."""
    made = of("sft-trainer", dtype=dtype, max_steps=1, gradient_accumulation_steps=2, max_grad_norm=0 if text else 0.1)
    made.add_callback(Before(lambda parameters: [p.grad.mul_(factor) for p in parameters if p.grad is not None]))
    watch, _ = watched(made, tmp_path)
    of_them = [told for _, told in found(watch) if "backward passes" in told]
    start = "the optimizer gets other gradients than backward passes left: "
    assert len(watch.findings) == len(of_them) == (text is not None)
    assert text is None or of_them[0] == f"{start}{text} those"


@pytest.mark.parametrize("factor, found", [(1 / 2, True), (1 / 3, True), (0.3, False), (1 / 100, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_part_of_the_gradients_is_no_clipping(tmp_path, factor, found, dtype):
    """In 16 bits any factor may be one."""
    made = of("sft-trainer", dtype=dtype, max_steps=1)
    made.add_callback(Before(lambda parameters: [p.grad.mul_(factor) for p in parameters if p.grad is not None]))
    watch, _ = watched(made, tmp_path)
    text = f"the optimizer gets other gradients than backward passes left: {factor:.4g} times those"
    assert [f.text.partition(": ")[2] for f in watch.findings] == [text] * (found and dtype is torch.float32)


class Kept:
    """A collator that keeps its batches: `again` in the same memory, or the first one for good."""

    def __init__(self, inner, again):
        self.inner, self.again, self.batch = inner, again, None

    def __call__(self, rows):
        batch = self.inner(rows)
        wide = {n: torch.nn.functional.pad(x, (0, 40 - x.shape[1])) for n, x in batch.items()}
        self.batch = self.batch or wide
        for n, x in wide.items() if self.again else ():
            self.batch[n].copy_(x)
        return {n: x[:, :20] for n, x in self.batch.items()}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_collator_that_writes_over_a_batch(tmp_path, again, steps):
    """Accelerate asks for the next batch before it hands one out."""
    made = of("sft-trainer", max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=steps)
    made.data_collator = Kept(made.data_collator, again)
    watch, _ = watched(made, tmp_path)
    text = "the collator writes over a batch before the step has used it: "
    assert sum(f.text.partition(": ")[2].startswith(text) for f in watch.findings) == again


def test_a_batch_that_is_changed_on_its_way_is_none_that_is_written_over(tmp_path):
    made = of("sft-trainer", max_steps=1)

    def masked(self, *args, **kwargs):
        out = super(type(self), self).get_batch_samples(*args, **kwargs)
        for given in out[0]:
            given["attention_mask"][:, -1] = 1
        return out

    made.__class__ = type("Users", (type(made),), {"get_batch_samples": masked})
    watch, _ = watched(made, tmp_path)
    assert not any("writes over" in f.text for f in watch.findings)


@pytest.mark.parametrize("fresh, tied, noted", [(True, True, True), (True, False, False), (False, True, False)])
def test_an_lm_head_that_the_config_ties_and_the_model_does_not(tmp_path, said, fresh, tied, noted):
    model = models.model("qwen2")
    model.config.tie_word_embeddings = tied
    if fresh:
        weight = model.get_input_embeddings().weight
        model.lm_head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        model.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    watch, _ = watched(of("sft-trainer", model=model), tmp_path)
    text = "watch: the config ties the LM head to the embedding, but they are two tensors"
    assert not watch.findings and said == [text] * noted


class Follows(TrainerCallback):
    """Makes the reference the policy, behind each step; `Synced` by a name as TRL's."""

    def on_step_end(self, args, state, control, model, **_):
        self.reference.load_state_dict(model.state_dict())


class Synced(Follows):
    pass


@pytest.mark.parametrize("kind, noted", [(Follows, True), (Synced, False), (TrainerCallback, False)])
def test_a_reference_that_something_else_moves(tmp_path, said, kind, noted):
    made, callback = of("dpo-trainer", max_steps=3), kind()
    callback.reference = made.ref_model
    made.add_callback(callback)
    watched(made, tmp_path)
    text = "watch: something other than the optimizer has changed weights of the reference"
    assert [line for line in said if "other than the optimizer" in line] == [text] * noted


def summed(shift=1, by=None):
    """A loss of the logits, -Σ log p / N; `shift`: how far labels are ahead of logits; `by`: other than N tokens of the step."""

    def of(out, labels, num_items_in_batch=None):
        z, y = out.logits[:, : out.logits.shape[1] - shift].float(), labels[:, shift:]
        each = torch.nn.functional.cross_entropy(z.transpose(1, 2), y, reduction="none")
        return each.sum() / (num_items_in_batch if by is None else by(y))

    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "loss, cause",
    [
        (summed(), None),
        (summed(shift=0), "no known cause"),
        (
            summed(by=lambda y: (y != -100).sum()),
            "each micro-batch is averaged by itself, and their sum is not divided",
        ),
    ],
)
def test_a_loss_by_plain_logits_is_told_where_it_is_not_sfts(tmp_path, said, loss, cause, dtype):
    made = of("sft-trainer", dtype=dtype, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    made.compute_loss_func = loss
    watch, _ = watched(made, tmp_path)
    told = [line for line in said if "the loss that is logged" in line]
    assert not watch.findings and len(told) <= (cause is not None)
    if dtype is torch.float32:
        assert [f": {cause}; SFTTrainer has a loss of its own" in line for line in told] == [True] * (cause is not None)


def test_a_model_that_cannot_be_scored_ends_nothing(tmp_path, said, monkeypatch):
    monkeypatch.setattr("parity.watching.definition.score", lambda *_: 1 / 0)
    made = of("sft-trainer", max_steps=1)
    made.compute_loss_func = summed()
    made.add_callback(Before(lambda parameters: [p.grad.mul_(-1) for p in parameters if p.grad is not None]))
    watched(made, tmp_path)
    assert [sum(part in line for line in said) for part in ("backward passes", "not compared: Zero", "unwatched")] == [
        1,
        1,
        0,
    ]


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_a_micro_batch_that_are_lost(tmp_path, said, kept):
    """Of one that keeps them elsewhere the step has all."""
    made = of("sft-trainer", max_steps=1, gradient_accumulation_steps=2)
    step, sums = made.training_step, {}

    def stepped(*args, **kwargs):
        out = step(*args, **kwargs)
        for p in made.model.parameters():
            sums[p] = sums.get(p, 0) + p.grad
            p.grad = sums[p].clone() if kept and len(made.seen) else torch.zeros_like(p)
        made.seen.append(1)
        return out

    def lost(*args, **kwargs):
        out = step(*args, **kwargs)
        if not made.seen:
            made.model.zero_grad()
        made.seen.append(1)
        return out

    made.seen, made.training_step = [], stepped if kept else lost
    watch, _ = watched(made, tmp_path)
    text = "gradients of earlier micro-batches are lost"
    assert [told.partition(": ")[0] for _, told in found(watch)] == [text] * (not kept)


@pytest.mark.parametrize("name, value", [("temperature", 0.5), ("top_p", 0.9), (None, None)])
def test_a_model_that_is_sampled_by_other_settings(tmp_path, name, value):
    made = grpo(max_steps=1, temperature=0.8, generation_kwargs={"top_k": 7})
    if name:
        setattr(made.generation_config, name, value)
    watch, _ = watched(made, tmp_path)
    meant = {"temperature": 0.8, "top_p": 1}.get(name)
    text = f"completions are sampled by {name} {value} where the trainer's is {meant}"
    assert found(watch) == [("sampler", text)] * (name is not None)


def test_a_kl_that_is_subtracted(tmp_path):
    watch, _ = watched(within(grpo(beta=0.2, learning_rate=0.05), "_compute_loss", beta=-0.2), tmp_path)
    assert "gradients of the log-probs are not those of dapo: the KL is subtracted" in dict(found(watch)).values()


def test_a_step_that_changes_nothing(tmp_path, said):
    made = of("sft-trainer", max_steps=3, lr_scheduler_type="constant")
    made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.001)
    made.optimizer.step = lambda closure=None: None
    watched(made, tmp_path)
    assert said == ["watch, step 2: the optimizer's step, at lr 0.001, changes no parameter"]
