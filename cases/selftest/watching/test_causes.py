"""Faults of a trainer, of its loss and of its weights' way to the sampler, planted in real runs: each named, nothing else."""

import copy
import functools
import os
import subprocess
import sys
from types import MethodType, SimpleNamespace

import pytest
import torch

from cases.selftest.slow import HOURS
from cases.selftest.watching.runs import corrected, grpo, of, sampler, scored, watched, within
from parity.trainers.definitions.micro_batch import Loss
from parity.trainers.rig import checkpointing, models, stored_window
from parity.trainers.rig.stored_window import Sample
from parity.upstream import trl
from parity.watching import batch, definition
from parity.watching.step import Step
from parity.watching.taps import Taken


def found(watch):
    return [(f.what, *f.causes) for f in watch.findings]


def replaced(trainer, name, change):
    """A method of the trainer, what it returns changed by `change(self, out)`."""
    original = getattr(trainer, name)
    setattr(trainer, name, MethodType(lambda self, *args, **kwargs: change(self, original(*args, **kwargs)), trainer))


def test_a_ratio_that_is_applied_is_silent_and_a_dropped_one_is_named(tmp_path):
    noisy = functools.partial(sampler, change=lambda logps: logps - 0.1)
    applied, _ = watched(corrected(noisy), tmp_path)
    assert {what for what, *_ in found(applied)} == {"sampler"}
    watch, _ = watched(within(corrected(noisy), "_compute_loss", use_vllm=False), tmp_path)
    assert ("loss", "the sampler's importance ratio is not applied") in found(watch)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_each_loss_is_its_definition_until_a_count_is_forgotten(tmp_path, loss_type):
    def made():
        more = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.04}
        return corrected(sampler, loss_type=loss_type, **more)

    clean, _ = watched(made(), tmp_path)
    assert found(clean) == []
    trainer = made()
    replaced(trainer, "_compute_loss", lambda self, loss: loss * 2)
    wrong, _ = watched(trainer, tmp_path)
    ((what, *causes),) = found(wrong)
    both = "the micro-batches of an optimizer step or the micro-batches of a generation batch"
    assert what == "loss" and f"2 times too large, as if not divided by {both}" in causes


def test_padding_in_the_normaliser(tmp_path):
    trainer = grpo(sampler, loss_type="grpo", max_completion_length=24)

    def padded(self, model, inputs):
        lp = scored(self, model, inputs)
        terms = (lp - lp.detach()).exp() * inputs["advantages"][:, None] * inputs["completion_mask"]
        return -terms.mean()

    trainer._compute_loss = MethodType(padded, trainer)
    watch, _ = watched(trainer, tmp_path)
    assert set(found(watch)) == {("loss", "padding is counted in the normaliser")}


def test_a_ratio_to_old_log_probs_that_is_dropped_shows_where_completions_are_used_again(tmp_path):
    trainer = grpo(num_iterations=2, max_steps=4, learning_rate=0.1)
    original = trainer._compute_loss
    without = lambda x: {name: value for name, value in x.items() if name != "old_per_token_logps"}  # noqa: E731
    trainer._compute_loss = lambda model, inputs: original(model, without(inputs))
    watch, _ = watched(trainer, tmp_path)
    dropped = "watch, step {}: gradients of the log-probs are not those of dapo: the ratio to the old log-probs is 1"
    assert [f.text for f in watch.findings] == [dropped.format(2), dropped.format(4)]


def endless(mask):
    return mask * (mask.cumsum(1) < mask.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "changed, cause",
    [
        (lambda x: x | {"advantages": -x["advantages"]}, "-1 times the definition's"),
        (lambda x: x | {"advantages": x["advantages"] * 0.3}, "0.3 times the definition's"),
        (
            lambda x: x | {"completion_mask": endless(x["completion_mask"])},
            " tokens of the loss have none",
        ),
        (lambda x: x | {"completion_mask": torch.ones_like(x["completion_mask"])}, "masked tokens have a gradient"),
    ],
)
def test_what_is_seen_of_a_gradient_without_a_known_cause(tmp_path, changed, cause):
    trainer = grpo(max_steps=1, max_completion_length=24)
    original = trainer._compute_loss
    attention, score = None, trainer._get_per_token_logps_and_entropies

    def loss(model, inputs):
        nonlocal attention
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        return original(model, changed(inputs))

    trainer._get_per_token_logps_and_entropies = lambda model, ids, mask, *args, **kw: score(
        model, ids, mask if attention is None else attention, *args, **kw
    )
    trainer._compute_loss = loss
    watch, _ = watched(trainer, tmp_path)
    ((what, *named),) = found(watch)
    assert what == "loss" and cause in named[-1]


def test_logits_that_are_not_shifted(tmp_path):
    trainer = grpo(dtype=torch.bfloat16, max_steps=1)

    def unshifted(model, ids, mask, keep, *args, **kwargs):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep:].float().log_softmax(-1)
        logps = logits.gather(-1, ids[:, -keep:, None])[..., 0]
        return logps, torch.zeros_like(logps), None

    trainer._get_per_token_logps_and_entropies = unshifted
    watch, _ = watched(trainer, tmp_path)
    cause = "each log-prob is by the logits of the token itself, not of the one before it"
    assert [(f.what, f.causes) for f in watch.findings] == [("trainer", (cause,))]


def without_eos(trainer, batch):
    return {"labels": batch["labels"].masked_fill(batch["input_ids"] == trainer.processing_class.eos_token_id, -100)}


def at_the_left(batch):
    """The same sequences, padding moved to their left."""
    order = batch["attention_mask"].argsort(dim=1, stable=True)
    return {name: values.gather(1, order) for name, values in batch.items()}


def seen(trainer, batch):
    moved = at_the_left(batch)
    return moved | {"attention_mask": torch.ones_like(moved["attention_mask"])}


def placed(trainer, batch):
    """By twice their places."""
    moved = at_the_left(batch)
    return moved | {"position_ids": (moved["attention_mask"].cumsum(1) - 1).clamp(min=0) * 2}


def shifted(trainer, batch):
    """As the model's own loss shifts them once more."""
    return {"labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def lengthened(trainer, batch):
    """Padding next to a sequence counts."""
    more = torch.nn.functional.pad(batch["attention_mask"], (1, 0), value=1)[:, :-1]
    return {
        "attention_mask": more,
        "labels": batch["labels"].where(more == batch["attention_mask"], batch["input_ids"]),
    }


def counted(trainer, batch):
    """From 1 on, which a rotary embedding does not see."""
    moved = at_the_left(batch)
    return moved | {"position_ids": moved["attention_mask"].cumsum(1)}


@pytest.mark.parametrize(
    "change, what",
    [
        (without_eos, "the EOS token follows in 4 of 4 rows"),
        (seen, " tokens before a sequence, in "),
        (placed, "position_ids are not the places in the sequence"),
        (shifted, "labels are not the input_ids at their places, where they belong unshifted"),
        (lengthened, " of 4 rows"),
        (counted, None),
    ],
)
def test_what_a_collator_makes_of_sequences(tmp_path, change, what):
    trainer = of("sft-trainer", max_steps=1)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: (batch := collate(rows)) | change(trainer, batch)
    watch, lines = watched(trainer, tmp_path)
    causes = {cause for f in watch.findings for cause in f.causes if "the collator" not in f.text}
    assert lines and bool(causes) == (what is not None) and all(what in cause for cause in causes)


@pytest.mark.parametrize(
    "row, pad, others, found",
    [
        ([5, 1, 0, 0], 0, (2,), True),
        ([5, 1, 6, 0], 0, (2,), False),
        ([5, 1, 2, 6], 2, (2,), False),  # <bos>, with which a turn begins, is the padding token
        ([5, 6, 1, 2], 2, (2,), False),  # and is cut behind it
        ([5, 1, 2, 2], 2, (2,), True),
        ([5, 6, 1, 1], 1, (2,), False),  # a text that ends with two
        ([5, 1, 1, 1], 1, (2,), True),
    ],
)
def test_padding_that_counts_is_nothing_but_padding_to_the_end(row, pad, others, found):
    ids = torch.tensor([row])
    taken = Taken(ids, torch.ones_like(ids), torch.zeros(1, 3), None, None, True, None)
    assert (batch.beyond(taken, torch.ones(1, 3), 1, pad, others) is not None) == found


def test_padding_that_is_trained_on(tmp_path):
    trainer = of("sft-trainer", max_steps=1)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: (batch := collate(rows)) | {"labels": batch["input_ids"].clone()}
    watch, _ = watched(trainer, tmp_path)
    told = [f.text.rpartition(":")[0] for f in watch.findings if "the collator" not in f.text]
    assert told == ["watch, step 1: tokens of the loss are padding"]


@pytest.mark.parametrize("divided", [True, False])
def test_micro_batches_that_are_averaged_one_by_one(tmp_path, divided):
    trainer = of("sft-trainer", max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    original, by, collate, seen = trainer.compute_loss, 4 if divided else 1, trainer.data_collator, []

    def ragged(rows):
        batch, _ = collate(rows), seen.append(rows)
        batch["labels"][0] = torch.where(torch.tensor(len(seen) == 1), -100, batch["labels"][0])
        return batch

    trainer.data_collator = ragged
    trainer.compute_loss = lambda model, inputs, *args, **kwargs: original(model, inputs) / by
    watch, _ = watched(trainer, tmp_path)
    cause = f"each micro-batch is averaged by itself{'' if divided else ', and their sum is not divided'}"
    assert found(watch) == [("loss", cause)]


def test_a_model_that_left_padding_changes(tmp_path):
    policy = copy.deepcopy(models.model("llama"))
    forward = policy.model.forward
    policy.model.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, **kwargs)
    watch, _ = watched(grpo(policy=policy, max_steps=1, num_generations=2), tmp_path)
    assert found(watch) == [("trainer", "padding at the left changes what the model computes")]


ALIKE = "no cause that was tried; by size alone as far apart as the arithmetic of bf16"
STALE = {"max_steps": 3, "learning_rate": 0.1}


@pytest.mark.parametrize(
    "planted, wanted, causes",
    [
        (lambda: {"model": models.model("llama", torch.bfloat16)}, {}, [ALIKE]),
        (lambda: {"change": lambda x: x.bfloat16().float()}, {}, [ALIKE]),
        (lambda: {"model": models.model("llama")}, STALE, ["weights 1 update old", "weights 2 updates old"]),
        *(
            (
                lambda by=by: {"repetition_penalty": by},
                {"temperature": 0.7},
                [f"the sampler has a repetition penalty of {by}"],
            )
            for by in (1.01, 1.15, 0.9)
        ),
        (lambda: {"begins": [models.BOS]}, {}, ["prompts begin with one more BOS token there"]),
    ],
)
def test_what_a_sampler_did_is_all_that_is_named(tmp_path, planted, wanted, causes):
    """In bfloat16, or its log-softmax alone; with the weights of the first step; with a penalty, or a BOS token that it adds."""
    rollout = functools.partial(sampler, **planted())
    watch, _ = watched(grpo(rollout, **{"max_steps": 1, **wanted}), tmp_path, every=2)
    assert found(watch) == [("sampler", cause) for cause in causes]


ALONE = SimpleNamespace(
    args=SimpleNamespace(gradient_accumulation_steps=1), accelerator=SimpleNamespace(num_processes=1)
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_long_completion_are_judged_beside_a_short_ones(dtype):
    """4 tokens and 900, each with 1/length of its completion's share."""
    mask = (torch.arange(1000) < torch.tensor([[4], [900]])).double()
    loss = Loss("grpo", lambda lp: -((lp * mask).sum(1) / mask.sum(1)).mean(), mask)
    logps = -torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, slope = definition.slopes(loss.of, logps.double())
    for factor in (1.0, 0.0, -1.0):
        found = slope * torch.tensor([[1.0], [factor]])
        assert (definition.faults(ALONE, loss, logps, found, None) is None) == (factor == 1.0)


@pytest.mark.parametrize("size, silent", [(0.0, False), (2.0, True)])
def test_clipped_terms_that_cancel_are_rounded_at_their_size(size, silent):
    loss = Loss("grpo", lambda lp: 5e-4 + 0 * lp.sum(), torch.ones(2, 3), size=size)
    still = torch.zeros(2, 3)
    assert (definition.faults(None, loss, still, still.double(), 5e-4 + 5e-9) is None) == silent


@pytest.mark.parametrize("margin", [5.0, 12.0, 16.0, 25.0, 100.0])
def test_a_saturated_loss_is_off_by_the_rounding_of_its_own_operations(margin):
    """KTO's 1 - sigmoid in float32."""
    logps = -torch.tensor([[1.1, 2.2, 2.7], [1.0, 2.0, 3.1]])
    ref = torch.tensor([-2 * margin - 6, -2 * margin - 5])
    loss = Loss("kto", lambda lp: (1 - (0.5 * (lp.sum(1) - ref)).sigmoid()).mean(), torch.ones(2, 3))
    value, slope = definition.slopes(loss.of, logps)
    assert definition.faults(ALONE, loss, logps, slope.double(), float(value)) is None
    doubled = definition.faults(ALONE, loss, logps, 2 * slope.double(), None)
    assert (doubled is None) == (margin > 14)  # slopes below the rounding


def test_what_float32_flushes_to_0_is_no_other_loss():
    logps = torch.zeros(1, 3)
    loss = Loss("forward_kl", lambda lp: (lp - 720).exp().sum(), torch.ones(1, 3))
    assert definition.faults(None, loss, logps, logps.double(), 0.0) is None
    assert definition.faults(None, loss, logps, logps.double(), 1e-30) is not None


@pytest.mark.parametrize("warm", [0, 1])
def test_a_sync_that_fails_shows_behind_the_first_update_that_moves_weights(tmp_path, warm):
    """A warmup's first update has the learning rate 0."""
    rollout = functools.partial(sampler, model=models.model("llama"))
    wanted = {"learning_rate": 0.1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": warm, "max_steps": 7}
    watch, lines = watched(grpo(rollout, **wanted), tmp_path, every=5)
    assert [f.text.partition(":")[0] for f in watch.findings] == [f"watch, step {2 + warm}", "watch, step 6"]
    assert "weights 1 update old" in watch.findings[0].causes
    assert [line["step"] for line in lines] == [1, 2, *[3] * warm, 6]


def test_a_kl_that_is_dropped_shows_behind_the_first_update(tmp_path):
    trainer = grpo(beta=0.5, learning_rate=0.1)
    watch, lines = watched(within(trainer, "_compute_loss", beta=0.0), tmp_path, every=50)
    assert [line["step"] for line in lines] == [1, 2]
    assert [f.text.partition(":")[0] for f in watch.findings if f.causes[0].startswith("beta is ignored")] == [
        "watch, step 2"
    ]


def test_an_adapter_that_the_sampler_lacks(tmp_path):
    base = models.model("llama")
    trainer = grpo(functools.partial(sampler, model=base), peft=trl.lora(), learning_rate=5.0)
    watch, _ = watched(trainer, tmp_path)
    ((what, *causes),) = found(watch)
    assert what == "sampler" and "the adapter is left out" in causes


def test_prompts_that_the_sampler_cut(tmp_path):
    trainer = grpo(functools.partial(sampler, cut=2))
    trainer.processing_class.model_max_length = 2
    watch, _ = watched(trainer, tmp_path)
    assert set(found(watch)) == {("sampler", "prompts are cut to their last 2 tokens")}


def test_a_checkpointing_function_that_was_replaced(tmp_path):
    policy = models.model("llama")
    checkpointing.install(policy)  # the trainer takes the stock function in its place
    watch, _ = watched(grpo(sampler, policy=policy, gradient_checkpointing=True, max_steps=1), tmp_path)
    by = "activations checkpointed by torch.utils.checkpoint.checkpoint"
    assert found(watch) == [("trainer", f"in training the model computes something else ({by})")]


def detached(function, *args):
    return function(*args).detach().requires_grad_()


def test_a_checkpointing_function_through_which_no_gradient_passes(tmp_path):
    policy = models.model("llama")
    original = policy.gradient_checkpointing_enable

    def enable(*args, **kwargs):
        original(*args, **kwargs)
        for layer in policy.model.layers:
            layer._gradient_checkpointing_func = detached

    policy.gradient_checkpointing_enable = enable
    watch, _ = watched(grpo(sampler, policy=policy, gradient_checkpointing=True, max_steps=1), tmp_path)
    (text,) = (f.text for f in watch.findings)
    by = f"checkpointed by {detached.__module__}.detached"
    assert text == f"watch, step 1: no gradient reaches model.layers.0, model.layers.1, {by}"


@pytest.mark.parametrize("name", ["grpo", "rloo-trainer", "dpo-trainer", "kto-trainer", "sft-trainer"])
@pytest.mark.parametrize("change", [lambda loss: loss * 2, lambda loss: loss + loss.detach().abs() + 1])
def test_a_loss_that_is_not_divided_and_one_that_is_logged_wrong(tmp_path, name, change):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = grpo(sampler, **settings) if name == "grpo" else of(name, **settings)
    replaced(trainer, "compute_loss", lambda self, loss: change(loss))
    watch, _ = watched(trainer, tmp_path)
    ((what, *causes),) = found(watch)
    assert what == "loss"
    if float(change(torch.tensor(0.0))):
        assert "the loss that is logged is " in watch.findings[0].text and causes[0].endswith("gradients are right")
    else:
        assert causes[0].startswith("2 times too large, as if not divided by the micro-batches of an optimizer step")


@pytest.mark.parametrize(
    ("model", "name", "without", "what"),
    [("gemma2", "final_logit_softcapping", None, "softcap"), ("cohere", "logit_scale", 1.0, "scale")],
)
def test_what_the_trainers_head_lacks(tmp_path, model, name, without, what):
    policy = models.model(model)
    value = getattr(policy.config, name)
    setattr(policy.config, name, without)
    trainer = grpo(policy=policy)
    setattr(policy.config, name, value)
    watch, _ = watched(trainer, tmp_path)
    cause = f"the {what} {value:g} of the logits is left out"
    assert found(watch) and all(side == "trainer" and cause in causes for side, *causes in found(watch))


def test_a_temperature_that_the_trainers_head_was_not_given(tmp_path):
    trainer = grpo(temperature=1.0)
    trainer.temperature = 0.7
    watch, _ = watched(trainer, tmp_path)
    cause = "logits 0.7 times the model's own: a scale is left out, or the temperature is 1"
    asked = "completions are sampled by temperature 1 where the trainer's is 0.7"
    assert set(found(watch)) == {("trainer", cause), ("sampler", asked)}


def test_a_known_defect_is_named_with_its_fix(tmp_path):
    watch, _ = watched(grpo(model="recurrent_gemma", max_steps=1, per_device_train_batch_size=4), tmp_path)
    assert found(watch) == [("trainer", "the softcap 3 of the logits is left out")]
    assert watch.findings[0].text.endswith("known of this stack: softcap-names, fix: `apply`")


@pytest.mark.parametrize(("name", "old"), [("grpo", "old_per_token_logps"), ("rloo-trainer", "old_logps")])
def test_old_log_probs_of_another_policy(tmp_path, name, old):
    """Of tokens, or of whole completions."""
    trainer = grpo(num_iterations=2, max_steps=1) if name == "grpo" else of(name, max_steps=1)
    replaced(trainer, "_generate_and_score_completions", lambda self, out: out | {old: out[old] + 0.1})
    watch, _ = watched(trainer, tmp_path)
    assert [what for what, *_ in found(watch)] == ["old"]


def test_a_reference_of_other_weights_is_meant_so_and_said(tmp_path, said):
    trainer = grpo(beta=0.04, max_steps=1)
    with torch.no_grad():
        for p in trainer.ref_model.parameters():
            p.mul_(1.1)
    watch, _ = watched(trainer, tmp_path)
    assert found(watch) == []
    assert said == ["watch: at step 1 the reference has other weights than the policy: the two are not compared"]


@pytest.mark.parametrize("name", ["dpo-trainer", "grpo"])
def test_a_reference_of_nan_is_said_to_be_it(tmp_path, said, name):
    trainer = grpo(beta=0.04, max_steps=1) if name == "grpo" else of(name, max_steps=1)
    next(trainer.ref_model.parameters()).data.fill_(torch.nan)
    watch, _ = watched(trainer, tmp_path)
    assert found(watch)[0] == ("reference", "log-probs of the reference are NaN")
    assert [what for what, *_ in found(watch)] == ["reference", "gradient"]
    assert said[1] == "watch: at step 1 the reference has other weights than the policy: the two are not compared"


def test_a_loss_whose_gradient_reaches_no_parameter(tmp_path):
    policy = copy.deepcopy(models.model("llama"))
    for p in policy.parameters():
        p.register_hook(torch.zeros_like)
    trainer = grpo(sampler, policy=policy, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    watch, _ = watched(trainer, tmp_path)
    assert [f.text for f in watch.findings] == ["watch, step 1: no parameter has a gradient, and the loss has one"]


@pytest.mark.parametrize("name", ["ref_model", "teacher_model"])
def test_a_reference_that_shares_its_weights_with_the_policy_moves_and_a_teacher_may(tmp_path, name):
    trainer = grpo(sampler, beta=0.04, max_steps=1)
    setattr(trainer, name, trainer.model)
    watch, _ = watched(trainer, tmp_path)
    text = "step 1: the optimizer's step moves the reference too: model.embed_tokens.weight, "
    assert [(f.what, text in f.text) for f in watch.findings] == [("update", True)] * (name == "ref_model")


def test_what_a_step_lacks_is_found_once_while_the_learning_rate_rises(tmp_path, monkeypatch):
    trainer = grpo(sampler, max_steps=6, lr_scheduler_type="constant_with_warmup", warmup_steps=4)
    trainer.create_optimizer()
    (lost,) = [p for n, p in trainer.model.named_parameters() if n == "model.norm.weight"]
    for group in trainer.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not lost]
    made = []
    monkeypatch.setattr(Step, "faults", lambda self, top, faults=Step.faults: made.append(self) or faults(self, top))
    watch, _ = watched(trainer, tmp_path, every=9)
    text = "parameters with a gradient that the optimizer does not have: model.norm.weight"
    assert [(f.what, f.text) for f in watch.findings] == [("update", f"watch, step 1: {text}")]
    assert len(made) == 3  # at 0, at the first rate above, at the last


@pytest.mark.parametrize("lora", [None, trl.lora()])
def test_a_kl_of_the_policy_on_the_same_completions_is_no_reference(tmp_path, lora):
    """KTO pairs each prompt with the completion of another row; those of a classifier are often the same."""
    same = stored_window.dataset([Sample("a question ", " yes", " no", label=True)] * 8, "labels")
    trainer = of("kto-trainer", lora, learning_rate=0.05, data=same)
    watch, lines = watched(trainer, tmp_path)
    assert not watch.findings and all("watch/reference_units" in line for line in lines)


def test_a_reference_of_another_config_is_not_held_against_the_policys_forward(tmp_path):
    trainer = grpo(sampler, beta=0.04)
    trainer.ref_model.config.rms_norm_eps = 0.5
    for module in trainer.ref_model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    watch, _ = watched(trainer, tmp_path)
    assert [f.text[:28] for f in watch.findings] == ["watch, step 1: reference and"]


@pytest.mark.parametrize("follows", [True, False])
def test_a_reference_that_computes_with_the_policys_weights(tmp_path, follows):
    """As a copy does whose forward is the original's."""
    trainer = grpo(sampler, beta=0.04)
    trainer.ref_model.forward = (trainer.model if follows else trainer.ref_model).forward
    watch, lines = watched(trainer, tmp_path)
    assert found(watch) == [("reference", "it computes with the policy's weights")] * follows
    assert all(f.text.startswith("watch, step 2: the reference's log-probs differ from those") for f in watch.findings)
    assert all("watch/reference_units" in line for line in lines)


@pytest.mark.parametrize(
    "dtype, lr, lost", [(torch.bfloat16, 1e-5, True), (torch.bfloat16, 1e-2, False), (torch.float32, 1e-5, False)]
)
def test_steps_that_round_away_are_said_where_the_learning_rate_no_longer_rises(tmp_path, said, dtype, lr, lost):
    """AdamW's first step is the learning rate; bfloat16 weights of 0.15 are 1e-3 apart."""
    wanted = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 1.0}
    wanted |= {"learning_rate": lr, "max_steps": 4}
    watch, _ = watched(grpo(dtype=dtype, **wanted), tmp_path, every=9)
    assert not watch.findings
    assert [line[:42] for line in said if "optimizer" in line] == ["watch, step 4: the optimizer's step leaves"] * lost


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("seed", range(1, 21))
def test_each_is_named_and_nothing_else_under_another_seed(seed):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=os.environ | {"SELFTEST_SEED": str(seed)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
