"""Mistakes that once got past every check of their trainer: each is caught, by the case and the quantity that can see it."""

import functools
import inspect
import textwrap

import pytest

from cases.selftest.mutants.trainers import EDITS, mutated
from cases.selftest.trainers.asked import right, wrong
from parity.trainers.rig import drive

METRICS = {"check": "metrics"}
GENERATED = {"check": "ragged-control", "sampler": "student", "prompts": "ragged"}
QUEUE = {"check": "rollout-queue"}
SELF = {"check": "self-distillation"}
ENTROPIES = {"check": "windows", "kind": "entropies", "loss": "dapo"}
CLIPPED = {"check": "windows", "kind": "clipped"}
CASES = {
    "grpo-trainer.reward-std": (METRICS, "reward_std"),
    "grpo-trainer.terminated": (METRICS, "completions/min_terminated_length"),
    "grpo-trainer.kl-weight-detached": ({"check": "windows", "kind": "sequence"}, "gradient"),
    "grpo-trainer.padding": (ENTROPIES, "gradient"),
    "grpo-trainer.iterations": ({"check": "windows", "kind": "again", "loss": "dapo"}, "gradient of step 2"),
    "grpo-trainer.aggregated": (
        {"check": "advantages", "rewards": "weighted", "multi_objective_aggregation": "normalize_then_sum"},
        "advantages",
    ),
    "online-dpo-trainer.weighted": ({"check": "losses", "weight": -1.0}, "loss"),
    "dpo-trainer.sync": ({"check": "windows", "kind": "synced"}, "gradient of step 2"),
    "distillation-trainer.temperature": ({"check": "twins", "temperature": 0.7}, "loss"),
    "gmpo-trainer.quantile": ({"check": "windows", "kind": "entropies"}, "gradient"),
    "grpo-trainer.share-bound": (CLIPPED | {"loss": "dapo"}, "clip_ratio/high_mean"),
    "rloo-trainer.bounds": (CLIPPED, "gradient"),
    "rloo-trainer.clip-range": ({"check": "windows", "kind": "bounded"}, "gradient"),
    "dpo-trainer.ties": ({"check": "step-one"}, "accuracy"),
    "dpo-trainer.accuracy": (METRICS, "mean_token_accuracy"),
    "dpo-trainer.weights": ({"check": "losses", "loss": "sum"}, "loss"),
    "grpo-trainer.evaluation-steps": ({"check": "windows", "kind": "evaluation"}, "evaluation loss"),
    "grpo-trainer.counted": (METRICS, "eval_num_tokens"),
    "kto-trainer.beside": ({"check": "losses", "loss": "kto", "split": "2x4"}, "loss"),
    "online-dpo-trainer.kl": (METRICS | {"brief": True}, "objective/kl"),
    "sft-trainer.seen": (METRICS, "num_tokens"),
    "dpo-trainer.last": (METRICS | {"split": "2x4"}, "entropy"),
    "dpo-trainer.kept": (METRICS, "eval_entropy"),
    "dpo-trainer.scores-logged": (METRICS | {"divergence": "forward_kl"}, "rewards/chosen"),
    "dpo-trainer.evaluation-weights": ({"check": "losses", "loss": "sigmoid_ipo"}, "evaluation loss"),
    "grpo-trainer.bonus": ({"check": "windows", "kind": "bonus", "loss": "dapo"}, "gradient"),
    "rloo-trainer.behind": ({"check": "generation"}, "sequences"),
    "sft-trainer.first": (METRICS | {"whole": True}, "mean_token_accuracy"),
    "sft-trainer.assistant-all": ({"check": "conversations", "turns": "assistant"}, "sequences"),
    "sft-trainer.prompt-open": ({"check": "conversations"}, "sequences"),
    "dpo-trainer.prompt-open": ({"check": "conversations"}, "sequences"),
    "rloo-trainer.prompt-open": ({"check": "conversations"}, "sequences"),
    "gkd-trainer.prompt": (GENERATED, "sequences"),
    "gkd-trainer.padding": (GENERATED, "gradient"),
    "gkd-trainer.temperature": (GENERATED | {"temperature": 0.7}, "sampling"),
    "gold-trainer.behind": (GENERATED, "gradient"),
    "gold-trainer.temperature": ({"check": "ragged-control", "beta": 0.3, "temperature": 0.7}, "gradient"),
    "gold-trainer.flags": ({"check": "ragged-control", "split": "1x2", "path": "fixed"}, "sequences"),
    "iw-opd-trainer.prefix": (GENERATED | {"objective": "iw_opd"}, "loss"),
    "iw-opd-trainer.attached": (GENERATED | {"objective": "iw_opd"}, "gradient"),
    "gold-trainer.places": ({"check": "ragged-control", "prompts": "ragged"}, "loss"),
    "transformers-trainer.batches-alike": ({"check": "step", "model": "classifier"}, "evaluation loss"),
    **{f"reward-trainer.{name}": ({"check": "reward-model"}, "loss") for name in ("sides", "end")},
    "reward-trainer.accuracy": ({"check": "reward-model"}, "accuracy"),
    "reward-trainer.center": ({"check": "reward-model", "center": 0.1}, "gradient"),
    "reward-trainer.longest": ({"check": "reward-model", "limit": True}, "sequences"),
    **{f"reward-trainer.{name}": ({"check": "reward-model", "margin": True}, "loss") for name in ("margin", "columns")},
    "async-grpo-trainer.bounds": (QUEUE, "loss"),
    "async-grpo-trainer.places": (QUEUE, "gradient"),
    "async-grpo-trainer.accumulation": (QUEUE | {"split": "2x4", "even": True}, "gradient"),
    "async-grpo-trainer.share": (QUEUE, "clip_ratio/low_mean"),
    "sdft-trainer.ratio": (SELF | {"window": "again"}, "gradient"),
    "sdft-trainer.average": (SELF | {"teacher": "ema", "window": "second"}, "gradient"),
    "sdpo-trainer.unshown": (SELF | {"window": "second"}, "loss"),
    "a2po-trainer.value": (SELF, "loss"),
}


@pytest.mark.parametrize("mistake", CASES)
def test_the_mistake_is_seen(mistake):
    (family, name), (asked, quantity) = mistake.split("."), CASES[mistake]
    right(family, **asked)
    with drive.using(mutated(family, next(e for e in EDITS[family] if e.name == name))):
        assert quantity in wrong(family, **asked)


def test_a_reward_model_that_reads_completions_alone_is_seen_beside_its_missing_bos():
    asked, texts = {"check": "conversations", "turns": "texts"}, "reward model's texts"
    edit = next(e for e in EDITS["grpo-trainer"] if e.name == "reward-prompt")
    before = wrong("grpo-trainer", **asked)
    with drive.using(mutated("grpo-trainer", edit)):
        assert wrong("grpo-trainer", **asked) == before | {texts} != before


@pytest.mark.parametrize("trainer", ["sft-trainer", "grpo-trainer"])
def test_a_call_of_which_a_table_has_the_arguments_of_all_others_is_seen(trainer, monkeypatch):
    from datasets import Dataset

    asked = {"check": "conversations", "beside": "calls"}
    assert wrong(trainer, **asked) == {"sequences"}
    monkeypatch.setattr(Dataset, "from_list", functools.partial(Dataset.from_list, on_mixed_types="use_json"))
    assert not wrong(trainer, **asked)


def test_a_softmax_without_its_derivative_is_seen_at_the_beta_of_trl(monkeypatch):
    """The reverse KL has a backward pass of its own."""
    from trl.kernels import chunked_divergence

    asked, backward = {"check": "twins", "mixture": 1.0}, chunked_divergence._backward_tile
    source = textwrap.dedent(inspect.getsource(backward))
    assert "log_pt - aux.unsqueeze(-1))" in source
    made = {}
    exec(source.replace(" - aux.unsqueeze(-1))", ")"), vars(chunked_divergence), made)
    right("distillation-trainer", **asked)
    monkeypatch.setattr(chunked_divergence, "_backward_tile", made["_backward_tile"])
    assert wrong("distillation-trainer", **asked) == {"gradient"}
