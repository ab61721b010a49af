"""Mistakes in what lies beneath TRL: each is seen, by the case and the quantity that can see it."""

import functools

import pytest
import torch

pytest.importorskip("trl")

import peft
import transformers
from transformers.generation import logits_process
from transformers.models.llama import modeling_llama

from cases.selftest.trainers.asked import disagreeing, verdicts
from parity.trainers import catalogue
from parity.trainers.checks import generation, update
from parity.trainers.definitions import decoder
from parity.trainers.rig import models

SGD, ADAM = ({"check": "update", **settings} for _, settings in update.PR)


def unclipped(monkeypatch):
    norm = lambda parameters, *_, **__: torch.nn.utils.get_total_norm([p.grad for p in parameters])  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", norm)


def decayed_everywhere(monkeypatch):
    names = lambda self, model: [n for n, _ in model.named_parameters()]  # noqa: E731
    monkeypatch.setattr(transformers.Trainer, "get_decay_parameter_names", names)


def constant_rate(monkeypatch):
    monkeypatch.setattr(transformers.optimization, "_get_linear_schedule_with_warmup_lr_lambda", lambda *_, **__: 1.0)


def state_forgotten(monkeypatch):
    """Moments and step count of AdamW, and the scheduler's step."""
    monkeypatch.setattr(transformers.Trainer, "_load_optimizer_and_scheduler", lambda self, checkpoint: None)


def seen_again(monkeypatch):
    monkeypatch.setattr(transformers.trainer, "skip_first_batches", lambda loader, number: loader)


def rotated_backward(monkeypatch):
    right = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s, *more: (right(q, k, c, -s)[0], k))


def without_scale(monkeypatch):
    right = modeling_llama.eager_attention_forward
    wrong = lambda *given, **more: right(*given, **more | {"scaling": 1.0})  # noqa: E731
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", wrong)


def scaled_twice(monkeypatch):
    right = peft.tuners.lora.LoraLayer.update_layer

    @functools.wraps(right)
    def wrong(self, name, *given, **more):
        right(self, name, *given, **more)
        self.scaling[name] *= 2

    monkeypatch.setattr(peft.tuners.lora.LoraLayer, "update_layer", wrong)


def rank_as_ever(monkeypatch):
    right = peft.tuners.lora.LoraLayer.update_layer

    @functools.wraps(right)
    def wrong(self, *given, config, **more):
        config.use_rslora = False
        right(self, *given, config=config, **more)

    monkeypatch.setattr(peft.tuners.lora.LoraLayer, "update_layer", wrong)


def trained_base(monkeypatch):
    monkeypatch.setattr(
        peft.tuners.tuners_utils.BaseTuner, "_mark_only_adapters_as_trainable", lambda self, model: None
    )


def cached_in_bf16(monkeypatch):
    right = transformers.cache_utils.DynamicLayer.update

    def wrong(self, keys, values, *more, **given):
        return right(self, keys.bfloat16().to(keys.dtype), values, *more, **given)

    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", wrong)


def padding_attended(monkeypatch):
    """By the tokens that are generated."""
    right = transformers.generation.GenerationMixin._update_model_kwargs_for_generation

    def wrong(self, *given, **more):
        out = right(self, *given, **more)
        out["attention_mask"] = torch.ones_like(out["attention_mask"])
        return out

    monkeypatch.setattr(transformers.generation.GenerationMixin, "_update_model_kwargs_for_generation", wrong)


def merged_by_half(monkeypatch):
    right = peft.tuners.lora.Linear.get_delta_weight
    monkeypatch.setattr(peft.tuners.lora.Linear, "get_delta_weight", lambda self, adapter: 0.5 * right(self, adapter))


def merged_for_good(monkeypatch):
    monkeypatch.setattr(peft.tuners.lora.Linear, "unmerge", lambda self: self.merged_adapters.clear())


def loaded_in_part(monkeypatch):
    right = peft.PeftModel.load_adapter

    def wrong(self, *given, **more):
        out = right(self, *given, **more)
        next(p for n, p in self.named_parameters() if "lora_B" in n).data.zero_()
        return out

    monkeypatch.setattr(peft.PeftModel, "load_adapter", wrong)


def not_causal(monkeypatch):
    right = torch.nn.functional.scaled_dot_product_attention
    wrong = lambda *given, **more: right(*given, **more | {"is_causal": False})  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)


def dropped_anew(monkeypatch):
    """In what checkpointing computes again."""
    right = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", functools.partial(right, preserve_rng_state=False))


def keys_in_another_order(monkeypatch):
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda x, count: x.repeat(1, count, 1, 1))


def stopped_early(monkeypatch):
    right = transformers.generation.MaxLengthCriteria.__init__

    def wrong(self, max_length, *given, **more):
        right(self, max_length - 2, *given, **more)

    monkeypatch.setattr(transformers.generation.MaxLengthCriteria, "__init__", wrong)


def greedy(monkeypatch):
    right = transformers.GenerationMixin._sample

    def wrong(self, input_ids, logits_processor, stopping_criteria, generation_config, *given, **more):
        generation_config.do_sample = False
        return right(self, input_ids, logits_processor, stopping_criteria, generation_config, *given, **more)

    monkeypatch.setattr(transformers.GenerationMixin, "_sample", wrong)


MISTAKES = [
    (greedy, "online-dpo-trainer", {"check": "generation", "temperature": 1.4}, {"tokens"}),
    (
        keys_in_another_order,
        "sft-trainer",
        {"check": "architecture", "model": models.GROUPED},
        {"logits, eager attention, padded on the right"},
    ),
    (stopped_early, "grpo-trainer", {"check": "generation", "temperature": 1.4}, {"length"}),
    (merged_by_half, "dpo-trainer", {"check": "adapters"}, {"logits, merged"}),
    (merged_for_good, "dpo-trainer", {"check": "adapters"}, {"logits, unmerged"}),
    (loaded_in_part, "dpo-trainer", {"check": "adapters"}, {"logits, saved and loaded"}),
    (not_causal, "sft-trainer", {"check": "architecture"}, {"logits, sdpa attention, one by one"}),
    (dropped_anew, "sft-trainer", {"check": "dropout"}, {"gradient"}),
    (dropped_anew, "sft-trainer", {"check": "dropout", "checkpointing": "non-reentrant"}, {"gradient"}),
    (unclipped, "sft-trainer", SGD, {"gradient of step 1"}),
    (decayed_everywhere, "sft-trainer", SGD, {"parameters behind step 1"}),
    (constant_rate, "sft-trainer", SGD, {"parameters behind step 2"}),
    (state_forgotten, "sft-trainer", ADAM, {"parameters behind step 2"}),
    (seen_again, "sft-trainer", ADAM, {"sequences"}),
    (rotated_backward, "sft-trainer", {"check": "architecture"}, {"logits, sdpa attention, padded on the left"}),
    (without_scale, "sft-trainer", {"check": "architecture"}, {"logits, eager attention, padded on the right"}),
    (scaled_twice, "dpo-trainer", {"check": "adapters"}, {"loss", "gradient"}),
    (rank_as_ever, "dpo-trainer", {"check": "adapters", "adapter": "rslora"}, {"loss", "gradient"}),
    (cached_in_bf16, "grpo-trainer", {"check": "generation", "temperature": 1.4}, {"probabilities"}),
    (padding_attended, "online-dpo-trainer", {"check": "generation", "temperature": 1.4}, {"probabilities"}),
    (trained_base, "dpo-trainer", {"check": "adapters"}, {"trained parameters"}),
]


@functools.cache
def without_mistake(trainer, *asked):
    return disagreeing(verdicts(trainer, **dict(asked)))


@pytest.mark.parametrize(("mistake", "trainer", "asked", "wanted"), MISTAKES, ids=[m[0].__name__ for m in MISTAKES])
def test_the_mistake_is_seen(mistake, trainer, asked, wanted, monkeypatch):
    assert without_mistake(trainer, *asked.items()) == set()
    mistake(monkeypatch)
    assert wanted <= disagreeing(verdicts(trainer, **asked))


PROCESSORS = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
}


@pytest.mark.parametrize("name", generation.FILTERS)
def test_every_setting_of_generation_has_an_effect(name, monkeypatch):
    """A library that ignores one of them is seen, beside all others that a case of pr has."""
    settings = max((s for _, s in generation.PR if name in s), key=len)
    asked = {"check": "generation", **settings}
    assert without_mistake("grpo-trainer", *asked.items()) == set()
    processor = getattr(logits_process, PROCESSORS[name])
    monkeypatch.setattr(processor, "__call__", lambda self, ids, scores: scores)
    assert disagreeing(verdicts("grpo-trainer", **asked)) == {"probabilities"}


def test_what_the_model_gets_wrong_is_said_of_a_trainer_that_disagrees(monkeypatch):
    case = catalogue.family("dpo-trainer").case(0, "fp32", {"check": "twins"})
    catalogue._alone.cache_clear()
    assert catalogue.of_model(case, lambda row, its: False) == ""
    catalogue._alone.cache_clear()
    without_scale(monkeypatch)
    wrong = "logits, eager attention, padded on the right; gradient, eager attention, padded on the right"
    told = catalogue.of_model(case, lambda row, its: False)
    assert told == f"without a trainer the model is wrong too (check architecture: {wrong})"
    assert catalogue.of_model(case, lambda row, its: its.settings["check"] == "architecture") == ""  # known
    catalogue._alone.cache_clear()


def test_every_architecture_of_the_twins_is_written_out():
    from parity.trainers.checks.twins import SETTINGS

    assert set(SETTINGS["model"].choices) <= set(decoder.WRITTEN)
