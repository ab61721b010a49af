"""Mistakes planted beneath a trainer's class, in TRL's other code, transformers, PEFT or torch: each is seen, by the case and
the quantity that can see it."""

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("trl")

from cases.selftest.trainers.asked import planted, right, wrong
from parity.trainers import catalogue
from parity.trainers.checks import generation, twins, update
from parity.trainers.definitions import decoder
from parity.trainers.rig import drive, models


def of(trainer, check, **settings):
    return f"{trainer}-trainer", {"check": check, **settings}


SGD, ADAM = (of("sft", "update", **settings) for _, settings in update.PR)
ALONE, GROUPED = of("sft", "architecture"), of("sft", "architecture", model=models.GROUPED)
ADAPTER, RSLORA = of("dpo", "adapters"), of("dpo", "adapters", adapter="rslora")
GRPO, ONLINE_DPO = (of(trainer, "generation", temperature=1.4) for trainer in ("grpo", "online-dpo"))
QUEUE, ASYNC = of("async-grpo", "rollout-queue"), "trl.experimental.async_grpo"
PADDED, EAGER = "logits, sdpa attention, padded on the left", "logits, eager attention, padded on the right"
LLAMA, LORA = "transformers.models.llama.modeling_llama", "peft.tuners.lora"
MISTAKES = []


def mistake(name, case, *quantities, exactly=False):
    """A mistake in what the name stands for: of its case these quantities disagree, or others too."""

    def register(changed):
        MISTAKES.append(pytest.param(name, changed, *case, set(quantities), exactly, id=changed.__name__))
        return changed

    return register


@mistake("torch.nn.utils.clip_grad_norm_", SGD, "gradient of step 1")
def unclipped(original, parameters, *given, **more):
    return torch.nn.utils.get_total_norm([p.grad for p in parameters])


@mistake("transformers.Trainer.get_decay_parameter_names", SGD, "parameters behind step 1")
def decayed_everywhere(original, self, model):
    return [n for n, _ in model.named_parameters()]


@mistake("transformers.optimization._get_linear_schedule_with_warmup_lr_lambda", SGD, "parameters behind step 2")
def constant_rate(original, *given, **more):
    return 1.0


@mistake("transformers.Trainer._load_optimizer_and_scheduler", ADAM, "parameters behind step 2")
def moments_step_count_and_schedule_forgotten(original, self, checkpoint):
    return None


@mistake("transformers.trainer.skip_first_batches", ADAM, "sequences")
def seen_again(original, loader, number):
    return loader


@mistake(f"{LLAMA}.apply_rotary_pos_emb", ALONE, PADDED)
def rotated_backward(original, q, k, cos, sin, *more):
    return original(q, k, cos, -sin, *more)[0], k


@mistake(f"{LLAMA}.eager_attention_forward", ALONE, EAGER)
def without_scale(original, *given, **more):
    return original(*given, **more | {"scaling": 1.0})


@mistake(f"{LLAMA}.repeat_kv", GROUPED, EAGER)
def keys_in_another_order(original, x, count):
    return x.repeat(1, count, 1, 1)


@mistake("torch.nn.functional.scaled_dot_product_attention", ALONE, "logits, sdpa attention, one by one")
def not_causal(original, *given, **more):
    return original(*given, **more | {"is_causal": False})


@mistake("transformers.modeling_utils.checkpoint", of("sft", "dropout"), "gradient")
@mistake("transformers.modeling_utils.checkpoint", of("sft", "dropout", checkpointing="non-reentrant"), "gradient")
def dropped_anew(original, *given, **more):
    """In what checkpointing computes again."""
    return original(*given, **more | {"preserve_rng_state": False})


@mistake(f"{LORA}.LoraLayer.update_layer", ADAPTER, "loss", "gradient")
def scaled_twice(original, self, name, *given, **more):
    original(self, name, *given, **more)
    self.scaling[name] *= 2


@mistake(f"{LORA}.LoraLayer.update_layer", RSLORA, "loss", "gradient")
def rank_as_ever(original, self, *given, config, **more):
    config.use_rslora = False
    original(self, *given, config=config, **more)


@mistake("peft.tuners.tuners_utils.BaseTuner._mark_only_adapters_as_trainable", ADAPTER, "trained parameters")
def trained_base(original, self, model):
    return None


@mistake(f"{LORA}.Linear.get_delta_weight", ADAPTER, "logits, merged")
def merged_by_half(original, self, adapter):
    return 0.5 * original(self, adapter)


@mistake(f"{LORA}.Linear.unmerge", ADAPTER, "logits, unmerged")
def merged_for_good(original, self):
    self.merged_adapters.clear()


@mistake("peft.PeftModel.load_adapter", ADAPTER, "logits, saved and loaded")
def loaded_in_part(original, self, *given, **more):
    out = original(self, *given, **more)
    next(p for n, p in self.named_parameters() if "lora_B" in n).data.zero_()
    return out


@contextlib.contextmanager
def adapter_stays_on(original, model, adapter_name):
    yield


@contextlib.contextmanager
def no_adapter_is_on(original, model, adapter_name):
    with model.disable_adapter():
        yield


for trainer in ("dpo", "kto", "grpo"):
    for kind, reference in (
        ("new", adapter_stays_on),
        ("saved-head", adapter_stays_on),
        ("existing", no_adapter_is_on),
    ):
        name, case = f"trl.trainer.{trainer}_trainer.use_adapter", of(trainer, "adapters", adapter=kind)
        mistake(name, case, "gradient")(reference)


BEHIND = of("grpo", "adapters", checkpointing=drive.REENTRANT)


@mistake("transformers.Trainer.create_optimizer", BEHIND, "learning rate has an effect", exactly=True)
def others_are_optimised(original, self):
    self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@mistake("transformers.GenerationMixin._sample", ONLINE_DPO, "tokens")
def greedy(original, self, input_ids, logits_processor, stopping_criteria, generation_config, *given, **more):
    generation_config.do_sample = False
    return original(self, input_ids, logits_processor, stopping_criteria, generation_config, *given, **more)


@mistake("transformers.generation.MaxLengthCriteria.__init__", GRPO, "length")
def stopped_early(original, self, max_length, *given, **more):
    original(self, max_length - 2, *given, **more)


@mistake("transformers.cache_utils.DynamicLayer.update", GRPO, "probabilities")
def cached_in_bf16(original, self, keys, values, *more, **given):
    return original(self, keys.bfloat16().to(keys.dtype), values, *more, **given)


@mistake("transformers.GenerationMixin._update_model_kwargs_for_generation", ONLINE_DPO, "probabilities")
def padding_attended(original, self, *given, **more):
    """By the tokens that are generated."""
    out = original(self, *given, **more)
    out["attention_mask"] = torch.ones_like(out["attention_mask"])
    return out


PROCESSORS = {
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
}
for setting in generation.FILTERS:
    most = max((s for _, s in generation.PR if setting in s), key=len)  # beside all others that a case of pr has
    name, case = (
        f"transformers.generation.logits_process.{PROCESSORS[setting]}.__call__",
        of("grpo", "generation", **most),
    )

    @mistake(name, case, "probabilities", exactly=True)
    def setting_ignored(original, self, ids, scores):
        return scores


KL, BOTH = of("kto", "truncation", kl=True), ("loss", "gradient")


@mistake("trl.trainer.kto_trainer.DataCollatorForUnpairedPreference.torch_call", KL, *BOTH, exactly=True)
def sequences_of_the_kl_uncut(original, self, examples):
    whole = original(dataclasses.replace(self, max_length=None), examples)
    return original(self, examples) | {name: x for name, x in whole.items() if name.startswith("KL_")}


@mistake("parity.trainers.checks.variations.cut", of("dpo", "truncation"), "sequences", *BOTH, exactly=True)
def cut_at_the_other_end(original, window, mode):
    return original(window, "keep_end")


COLLATOR = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling.torch_call"


@mistake(COLLATOR, of("sft", "twins", padding="none", split="2x4"), *BOTH)
@mistake(COLLATOR, of("sft", "twins", padding="packed", split="2x4"), *BOTH)
def first_token_predicted_from_the_sequence_before(original, self, examples):
    out = original(self, examples)
    return out | {"labels": torch.where(out["position_ids"] == 0, out["input_ids"], out["labels"])}


@mistake("parity.trainers.rig.twin_runs.generate_tools", of("grpo", "twins", tools=True), "gradient")
def tool_mask_lost(original, trainer):
    return None


@mistake(f"{ASYNC}.packing.TreeRow.pack", QUEUE, "gradient")
def places_in_the_row(original, row):
    batch = original(row)
    return batch | {"position_ids": torch.arange(len(batch["position_ids"]))}


@mistake(f"{ASYNC}.packing.TreeRow.pack", QUEUE, "gradient")
def branches_do_not_see_what_they_share(original, row):
    batch = original(row)
    starts = batch["tree_cu_seqlens_q"].tolist()
    return batch | {"tree_kv_index": torch.arange(starts[-1]), "tree_cu_seqlens_k": batch["tree_cu_seqlens_q"]}


@mistake(f"{ASYNC}.packing.TreeRow.pack", QUEUE, "loss")
def advantages_turned_round(original, row):
    batch = original(row)
    return batch | {"advantages": -batch["advantages"]}


@mistake(f"{ASYNC}.packing.TreeRow.pack", QUEUE, "gradient")
def kernel_stops_before_the_end_of_the_longest_path(original, row):
    batch = original(row)
    return batch | {"tree_max_seqlens": batch["tree_max_seqlens"] - torch.tensor([0, 1])}


@mistake("parity.trainers.checks.asynchronous._attention", QUEUE, "gradient")
def attention_both_ways(original, *given, **options):
    return original(*given, **options | {"causal": False})


@mistake(
    "parity.trainers.checks.asynchronous._attention", of("async-grpo", "rollout-queue", model="gemma2"), "gradient"
)
def attention_without_softcap(original, *given, **options):
    return original(*given, **options | {"softcap": 0.0})


@mistake(f"{ASYNC}.async_grpo_trainer.AsyncGRPOTrainer._streaming_iter", QUEUE, "weights")
def server_gets_zeros(original, trainer):
    return ((name, 0 * x) for name, x in original(trainer))


for step in (1, -1):

    @mistake(f"{ASYNC}.async_grpo_trainer.RolloutQueueDataset.__init__", QUEUE, "sequences")
    def another_staleness(original, self, step=step, **given):
        original(self, **given | {"max_staleness": given["max_staleness"] + step})

    @mistake(f"{ASYNC}.packing.TreeRow.fits", of("async-grpo", "rollout-queue", budget=True), "sequences")
    def another_budget(original, row, sample, budget, step=step):
        return original(row, sample, budget + step)


@pytest.mark.parametrize(("name", "changed", "trainer", "asked", "quantities", "exactly"), MISTAKES)
def test_the_mistake_is_seen(name, changed, trainer, asked, quantities, exactly):
    right(trainer, **asked)
    with planted(name, changed):
        found = wrong(trainer, **asked)
    assert found == quantities if exactly else found >= quantities


def test_what_the_model_gets_wrong_is_said_of_a_trainer_that_disagrees():
    case = catalogue.family("dpo-trainer").case(0, "fp32", {"check": "twins"})
    catalogue._alone.cache_clear()
    assert catalogue.of_model(case, lambda row, its: False) == ""
    catalogue._alone.cache_clear()
    with planted(f"{LLAMA}.eager_attention_forward", without_scale):
        told = catalogue.of_model(case, lambda row, its: False)
    assert told == f"without a trainer the model is wrong too (check architecture: {EAGER}; gradient{EAGER[6:]})"
    assert catalogue.of_model(case, lambda row, its: its.settings["check"] == "architecture") == ""  # known
    catalogue._alone.cache_clear()


def test_every_architecture_of_the_twins_is_written_out():
    assert set(twins.SETTINGS["model"].choices) <= set(decoder.WRITTEN)
