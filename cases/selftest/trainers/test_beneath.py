"""Mistakes planted in a trainer's methods and beneath its class, in TRL's other code, transformers, PEFT or torch: each is seen,
by the case and the quantity that can see it."""

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("trl")

from cases.selftest.trainers.asked import planted, right, wrong
from parity.trainers import catalogue
from parity.trainers.checks import generation, self_distillation, twins, update
from parity.trainers.checks.twin_windows import OF_SEQUENCES
from parity.trainers.definitions import decoder
from parity.trainers.rig import drive, models


def of(trainer, check, **settings):
    return f"{trainer}-trainer", {"check": check, **settings}


def even(trainer, loss):
    return of(trainer, "losses", loss=loss, split="2x4", even=True)


SGD, ADAM = (of("sft", "update", **settings) for _, settings in update.PR)
ALONE, GROUPED = of("sft", "architecture"), of("sft", "architecture", model=models.GROUPED)
ADAPTER = of("dpo", "adapters")
RSLORA, DORA, BIASED = (of("dpo", "adapters", adapter=kind) for kind in ("rslora", "dora", "lora-bias"))
GRPO, ONLINE_DPO = (of(trainer, "generation", temperature=1.4) for trainer in ("grpo", "online-dpo"))
QUEUE, SMALL = of("async-grpo", "rollout-queue"), of("async-grpo", "rollout-queue", budget=True)
BOTH = ("loss", "gradient")
PADDED, EAGER = "logits, sdpa attention, padded on the left", "logits, eager attention, padded on the right"
LLAMA, LORA, TRAINER = "transformers.models.llama.modeling_llama", "peft.tuners.lora", "transformers.Trainer"
SCHEDULE = "transformers.optimization._get_linear_schedule_with_warmup_lr_lambda"
COLLATOR = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling.torch_call"
SERVER = "trl.experimental.server_distillation.ServerDistillationTrainer.compute_loss"
ASYNC, ATTENTION = "trl.experimental.async_grpo", "parity.trainers.checks.asynchronous._attention"
MISTAKES = []


def mistake(path, case, *quantities, name="", exactly=False):
    """A mistake in what the path stands for: of its case these quantities disagree, or others too."""

    def register(changed):
        MISTAKES.append(pytest.param(path, changed, *case, set(quantities), exactly, id=name or changed.__name__))
        return changed

    return register


def told(**options):
    """Called with these options in place of others."""
    return lambda original, *given, **more: original(*given, **more | options)


def repacked(change):
    """A row whose tensors are changed when it is packed."""

    def pack(original, row):
        batch = original(row)
        return batch | change(batch)

    return pack


@mistake("torch.nn.utils.clip_grad_norm_", SGD, "gradient of step 1")
def unclipped(original, parameters, *given, **more):
    return torch.nn.utils.get_total_norm([p.grad for p in parameters])


@mistake(f"{TRAINER}.get_decay_parameter_names", SGD, "parameters behind step 1")
def decayed_everywhere(original, self, model):
    return [n for n, _ in model.named_parameters()]


@mistake(f"{TRAINER}.get_decay_parameter_names", SGD, "parameters behind step 1")
def norms_of_keys_decayed(original, self, model):
    return [*original(self, model), *(n for n, _ in model.named_parameters() if n.endswith("k_norm.weight"))]


mistake(SCHEDULE, SGD, "parameters behind step 2", name="constant rate")(lambda *given, **more: 1.0)
mistake(f"{TRAINER}._load_optimizer_and_scheduler", ADAM, "parameters behind step 2", name="state forgotten")(
    lambda *_: None
)
mistake("transformers.trainer.skip_first_batches", ADAM, "sequences", name="seen again")(
    lambda _, loader, number: loader
)


@mistake(f"{LLAMA}.apply_rotary_pos_emb", ALONE, PADDED)
def rotated_backward(original, q, k, cos, sin, *more):
    return original(q, k, cos, -sin, *more)[0], k


without_scale = mistake(f"{LLAMA}.eager_attention_forward", ALONE, EAGER, name="without scale")(told(scaling=1.0))
ATTENDED = "torch.nn.functional.scaled_dot_product_attention"
mistake(ATTENDED, ALONE, "logits, sdpa attention, one by one", name="not causal")(told(is_causal=False))
mistake(f"{LLAMA}.repeat_kv", GROUPED, EAGER, name="keys in another order")(
    lambda _, x, count: x.repeat(1, count, 1, 1)
)
for kind in (drive.REENTRANT, drive.NON_REENTRANT):  # in what checkpointing computes again
    case = of("sft", "dropout", checkpointing=kind)
    mistake("transformers.modeling_utils.checkpoint", case, "gradient", name="dropped anew")(
        told(preserve_rng_state=False)
    )


@mistake(f"{LORA}.LoraLayer.update_layer", ADAPTER, *BOTH)
def scaled_twice(original, self, name, *given, **more):
    original(self, name, *given, **more)
    self.scaling[name] *= 2


@mistake(f"{LORA}.LoraLayer.update_layer", RSLORA, *BOTH)
def rank_as_ever(original, self, *given, config, **more):
    config.use_rslora = False
    original(self, *given, config=config, **more)


@mistake(f"{LORA}.dora.DoraLinearLayer.get_weight_norm", DORA, *BOTH)
def norm_of_the_base_alone(original, self, weight, *given, **more):
    return weight.norm(dim=1)


@mistake(f"{LORA}.Linear.merge", BIASED, "logits, merged")
def bias_left_unmerged(original, self, *given, **more):
    kept = self.base_layer.bias.clone()
    original(self, *given, **more)
    self.base_layer.bias.data.copy_(kept)


SDPO = next(of("sdpo", "self-distillation", **s) for trainer, s in self_distillation.PR if trainer == "sdpo-trainer")


@mistake("trl.experimental.sdpo.loss_utils.add_tail_bucket", SDPO, "gradient")
def tail_without_a_gradient(original, log_probs):
    *kept, tail = original(log_probs).unbind(-1)
    return torch.stack([*kept, tail.detach()], -1)


@mistake("trl.experimental.sdpo.loss_utils.compute_divergence", SDPO, *BOTH)
def mixed_the_other_way(original, student, teacher, alpha):
    return original(student, teacher, 1 - alpha)


TRAINABLE = "peft.tuners.tuners_utils.BaseTuner._mark_only_adapters_as_trainable"
mistake(TRAINABLE, ADAPTER, "trained parameters", name="trained base")(lambda *given: None)
mistake(f"{LORA}.Linear.get_delta_weight", ADAPTER, "logits, merged", name="merged by half")(
    lambda f, *given: 0.5 * f(*given)
)
mistake(f"{LORA}.Linear.unmerge", ADAPTER, "logits, unmerged", name="merged for good")(
    lambda _, x: x.merged_adapters.clear()
)


@mistake("trl.kernels.chunked_logprob._forward_tile", of("dpo", "losses", weighting=True, tile=drive.NARROW), *BOTH)
def squares_rescaled_once(original, tile, stride, targets, top, *given, **more):
    squares = given[2]  # behind the sums of exp and of x·exp
    before, kept = top.clone(), squares.clone()
    original(tile, stride, targets, top, *given, **more)
    share = (before - top).exp()
    squares += kept * (share - share.square())


@mistake(
    "peft.utils.other.AuxiliaryTrainingWrapper.enable_adapters",
    of("dpo", "adapters", adapter="saved-embeddings"),
    *BOTH,
)
def saved_modules_stay_on(original, self, enabled):
    original(self, True)


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
    for kind in ("new", "saved-head", "existing"):
        reference = no_adapter_is_on if kind == "existing" else adapter_stays_on
        path = f"trl.trainer.{trainer}_trainer.use_adapter"
        mistake(path, of(trainer, "adapters", adapter=kind), "gradient")(reference)

BEHIND = of("grpo", "adapters", checkpointing=drive.REENTRANT)


@mistake(f"{TRAINER}.create_optimizer", BEHIND, "learning rate has an effect", exactly=True)
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
    return out | {"attention_mask": torch.ones_like(out["attention_mask"])}


BEHIND = {
    "bfloat16": ("weights", lambda model: model.to(torch.bfloat16)),
    "training mode": ("mode", lambda model: model.train()),
    "evaluation mode": ("mode", lambda model: model.eval()),
}
for name, (quantity, leave) in BEHIND.items():

    @mistake("trl.GRPOTrainer._generate_single_turn", of("grpo", "around-generation"), quantity, name=f"left in {name}")
    def left_behind(original, self, *given, leave=leave, **more):
        out = original(self, *given, **more)
        leave(self.model)
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
    path, case = (
        f"transformers.generation.logits_process.{PROCESSORS[setting]}.__call__",
        of("grpo", "generation", **most),
    )
    ignored = mistake(path, case, "probabilities", name=f"{setting} ignored", exactly=True)
    ignored(lambda original, self, ids, scores: scores)


KL = "trl.trainer.kto_trainer.DataCollatorForUnpairedPreference.torch_call"


@mistake(KL, of("kto", "truncation", kl=True), *BOTH, exactly=True)
def sequences_of_the_kl_uncut(original, self, examples):
    whole = original(dataclasses.replace(self, max_length=None), examples)
    return original(self, examples) | {name: x for name, x in whole.items() if name.startswith("KL_")}


@mistake("parity.trainers.checks.variations.cut", of("dpo", "truncation"), "sequences", *BOTH, exactly=True)
def cut_at_the_other_end(original, window, mode):
    return original(window, "keep_end")


@mistake(COLLATOR, of("sft", "twins", padding="none", split="2x4"), *BOTH)
@mistake(COLLATOR, of("sft", "twins", padding="packed", split="2x4"), *BOTH)
def first_token_predicted_from_the_sequence_before(original, self, examples):
    out = original(self, examples)
    return out | {"labels": torch.where(out["position_ids"] == 0, out["input_ids"], out["labels"])}


TOOLS = "parity.trainers.rig.twin_runs.generate_tools"
mistake(TOOLS, of("grpo", "twins", tools=True), "gradient", name="tool mask lost")(lambda original, trainer: None)

ROWS = {
    "places in the row": ("gradient", lambda row: {"position_ids": torch.arange(len(row["position_ids"]))}),
    "branches do not see what they share": (
        "gradient",
        lambda row: {
            "tree_kv_index": torch.arange(row["tree_cu_seqlens_q"][-1]),
            "tree_cu_seqlens_k": row["tree_cu_seqlens_q"],
        },
    ),
    "advantages turned round": ("loss", lambda row: {"advantages": -row["advantages"]}),
    "kernel stops before the end of the longest path": (
        "gradient",
        lambda row: {"tree_max_seqlens": row["tree_max_seqlens"] - torch.tensor([0, 1])},
    ),
}
for name, (quantity, change) in ROWS.items():
    mistake(f"{ASYNC}.packing.TreeRow.pack", QUEUE, quantity, name=name)(repacked(change))
mistake(ATTENTION, QUEUE, "gradient", name="attention both ways")(told(causal=False))
CAPPED = of("async-grpo", "rollout-queue", model="gemma2")
mistake(ATTENTION, CAPPED, "gradient", name="attention without softcap")(told(softcap=0.0))


@mistake(f"{ASYNC}.async_grpo_trainer.AsyncGRPOTrainer._streaming_iter", QUEUE, "weights")
def server_gets_zeros(original, trainer):
    return ((name, 0 * x) for name, x in original(trainer))


for step in (1, -1):

    @mistake(f"{ASYNC}.async_grpo_trainer.RolloutQueueDataset.__init__", QUEUE, "sequences")
    def another_staleness(original, self, step=step, **given):
        original(self, **given | {"max_staleness": given["max_staleness"] + step})

    @mistake(f"{ASYNC}.packing.TreeRow.fits", SMALL, "sequences")
    def another_budget(original, row, sample, budget, step=step):
        return original(row, sample, budget + step)


@mistake(
    "trl.GRPOTrainer._generate_and_score_completions",
    of("grpo", "windows", kind="adapter", loss="dapo"),
    "gradient of step 1",
    "gradient of step 2",
    exactly=True,
)
def old_log_probs_without_the_adapter(original, self, inputs):
    with self.accelerator.unwrap_model(self.model).disable_adapter():
        return original(self, inputs)


OWN = of("grpo", "sampler", mode="token_truncate", threshold=0.1)


@mistake("trl.GRPOTrainer.get_off_policy_mask", OWN, *BOTH, exactly=True)
def mask_by_own_log_probs_instead_of_the_sampler_s(original, self, per_token_logps, **given):
    given["sampling_per_token_logps"] = per_token_logps.detach()
    return original(per_token_logps=per_token_logps, **given)


@mistake("trl.experimental.gkd.GKDTrainer.__init__", of("gkd", "ragged-control", beta=0.3), *BOTH, exactly=True)
@mistake("trl.DistillationTrainer.__init__", of("distillation", "twins"), *BOTH, exactly=True)
def student_and_teacher_exchanged_in_the_mixture(original, self, *given, **more):
    """At beta 0.5 they stand alike."""
    original(self, *given, **more)
    self.beta = 1 - self.beta


@mistake("trl.RLOOTrainer.log", of("rloo", "metrics"), "entropy", exactly=True)
def nan_logged(original, self, *given, **more):
    """TRL logs None for it, which was taken for an adapter that does not fit: nothing was compared."""
    self._metrics["train"]["entropy"] = [torch.nan]
    return original(self, *given, **more)


GUESSES = ("entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy")


@mistake("parity.trainers.definitions.formulas.Scored", of("sft", "metrics"), *GUESSES, exactly=True)
def prompts_scored(original, model, window, *given):
    """SFT up to 1.2 took the entropy over the prompt too."""
    return original(model, [(tokens, 1) for tokens, _ in window], *given)


# Beside a mean over the tokens of each micro-batch, which the ledger knows, a window that nobody divides would hide
@mistake("trl.experimental.cpo.CPOTrainer.compute_loss", even("cpo", "sigmoid"), *BOTH, exactly=True)
@mistake("trl.experimental.orpo.ORPOTrainer.compute_loss", even("orpo", "orpo"), *BOTH, exactly=True)
@mistake(SERVER, of("server-distillation", "teacher-server", beta=0.3, split="1x2"), *BOTH, exactly=True)
def undivided(original, self, *given, **more):
    return original(self, *given, **more) * self.args.gradient_accumulation_steps


for setting in OF_SEQUENCES:

    @mistake("trl.GRPOTrainer.__init__", of("grpo", "windows", kind="sequence"), "loss", name=f"{setting} ignored")
    def setting_of_the_ratio_ignored(original, self, *given, args, setting=setting, **more):
        setattr(args, setting, {"importance_sampling_level": "token", "use_bias_correction_kl": False}.get(setting))
        original(self, *given, args=args, **more)


@pytest.mark.parametrize(("path", "changed", "trainer", "asked", "quantities", "exactly"), MISTAKES)
def test_the_mistake_is_seen(path, changed, trainer, asked, quantities, exactly):
    right(trainer, **asked)
    with planted(path, changed):
        found = wrong(trainer, **asked)
    assert found == quantities if exactly else found >= quantities


def test_two_steps_of_an_adapter_are_judged_by_their_gradients():
    asked = {"check": "windows", "kind": "adapter", "loss": "dapo"}
    assert right("grpo-trainer", **asked) == {"gradient of step 1", "gradient of step 2"}


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


def test_a_model_that_is_not_looked_at_alone_is_left_out_of_what_is_said():
    case = catalogue.family("transformers-trainer").case(0, "fp32", {"check": "step", "model": "classifier"})
    assert catalogue.of_model(case, lambda row, its: False) == ""


def test_every_architecture_of_the_twins_is_written_out():
    uncounted = {"gemma4"}  # there for its loss, which is told no count; its layers are in no definition
    assert set(twins.SETTINGS["model"].choices) - uncounted <= set(decoder.WRITTEN)
