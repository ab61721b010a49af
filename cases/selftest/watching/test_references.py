"""References of LoRA runs and precomputed ones: silent where they are right, found where they are not."""

import contextlib
from unittest import mock

import peft
import pytest
import torch

from cases.selftest.watching.runs import grpo, of, watched, within
from parity.trainers.rig import models
from parity.upstream import trl

FAR = {"learning_rate": 0.05, "max_steps": 3}
TRAINERS = ("dpo-trainer", "kto-trainer", "grpo")
POLICYS = ("reference", "it computes with the policy's weights")


def made(name, **wanted):
    wanted = FAR | {"beta": 0.1} | wanted
    return grpo(**wanted) if name == "grpo" else of(name, **wanted)


def found(watch):
    return [(f.what, *f.causes) for f in watch.findings]


def adapted(seed):
    """A model with an adapter that was trained before."""
    policy = peft.get_peft_model(models.model("llama"), trl.lora())
    random = torch.Generator().manual_seed(seed)
    for n, p in policy.named_parameters():
        if ".lora_B." in n:
            p.data = torch.randn(p.shape, generator=random)
    return policy


@contextlib.contextmanager
def used(name, adapter):
    """TRL computes the reference with the adapter in training, or with none if it is ""."""
    module = f"trl.trainer.{name.removesuffix('-trainer')}_trainer.use_adapter"

    def use(model, adapter_name=None):
        return contextlib.nullcontext() if adapter is None else model.disable_adapter()

    with mock.patch(module, use):
        yield


@pytest.mark.parametrize("name", [*TRAINERS, "online-dpo-trainer"])
def test_the_reference_of_a_lora_is_the_model_below_it(tmp_path, name):
    watch, lines = watched(made(name, peft=trl.lora()), tmp_path)
    assert not watch.findings and [line["step"] for line in lines] == [1, 2, 3]
    assert all("watch/reference_units" in line for line in lines)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_reference_with_the_lora_on(tmp_path, name):
    with used(name, None):
        watch, _ = watched(made(name, peft=trl.lora()), tmp_path)
    assert found(watch)[0] == POLICYS and {what for what, *_ in found(watch)} == {"reference"}
    assert watch.findings[0].text.startswith("watch, step 2: ")


@pytest.mark.parametrize("name", ["dpo-trainer", "grpo"])
def test_the_reference_of_an_adapter_that_was_given_is_its_copy(tmp_path, name):
    def given():
        policy = adapted(0)
        return made(name, policy=policy) if name == "grpo" else made(name, model=policy)

    watch, lines = watched(given(), tmp_path)
    assert not watch.findings and all("watch/reference_units" in line for line in lines) and len(lines) == 3
    with used(name, ""):
        watch, _ = watched(given(), tmp_path)
    assert [what for what, *_ in found(watch)] == ["reference"] * 3


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dpo-trainer", "kto-trainer"])
def test_a_reference_that_is_precomputed(tmp_path, name, dtype, lora):
    """Of a model without an adapter the weights of step 1 are known at step 1 alone."""

    def given():
        return made(name, peft=trl.lora() if lora else None, dtype=dtype, precompute_ref_log_probs=True)

    watch, lines = watched(given(), tmp_path)
    assert not watch.findings
    assert ["watch/reference_units" in line for line in lines] == [True, lora, lora]
    trainer = given()
    collate = trainer.data_collator
    # each row has another's
    shifted = lambda rows: {n: x.roll(1) if n.startswith("ref_") else x for n, x in collate(rows).items()}  # noqa: E731
    trainer.data_collator = shifted
    watch, _ = watched(trainer, tmp_path)
    assert [what for what, *_ in found(watch)] == ["reference"] * (3 if lora else 1)


def test_a_reference_is_judged_by_its_own_noise(tmp_path):
    """A policy that has become sure of its tokens has less."""
    watch, lines = watched(grpo(dtype=torch.bfloat16, learning_rate=0.05, beta=0.01, max_steps=7), tmp_path)
    assert not watch.findings and len(lines) == 7
    assert all(line["watch/reference_units"] <= 1 for line in lines)


def test_log_probs_of_a_log_softmax_in_16_bits_have_its_error(tmp_path):
    """On a CPU torch keeps the sum of exponentials in bfloat16: a log-prob of -0.001 comes as 0."""
    trainer = of("online-dpo-trainer", max_steps=2, peft=trl.lora(), dtype=torch.bfloat16, seed=0)
    watch, lines = watched(trainer, tmp_path)
    assert not watch.findings and len(lines) == 2
    assert all(line["watch/trainer_units"] <= 2 and line["watch/reference_units"] <= 2 for line in lines)


def test_a_reference_that_is_the_policy_is_seen_once(tmp_path):
    trainer = of("dpo-trainer", max_steps=1)
    trainer.ref_model = trainer.model
    watch, _ = watched(trainer, tmp_path)
    assert [f.what for f in watch.findings] == ["update"]
    assert "the optimizer's step moves the reference too" in watch.findings[0].text


def test_pairs_that_are_turned_round_within_the_loss(tmp_path):
    trainer = of("dpo-trainer", max_steps=1)
    original, names = trainer._compute_loss, ("input_ids", "attention_mask", "completion_mask")

    def turned(model, inputs, *args):
        return original(model, inputs | {n: torch.cat(inputs[n].chunk(2)[::-1]) for n in names}, *args)

    trainer._compute_loss = turned
    watch, _ = watched(trainer, tmp_path)
    assert found(watch) == [("loss", "-1 times the definition's")]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_rloos_reference(tmp_path, wrong, lora, steps):
    """Its rewards have it, its batch does not."""
    small = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 4,
        "num_iterations": steps,
    }
    trainer = of("rloo-trainer", beta=0.1, peft=trl.lora() if lora else None, **FAR, **small)
    with used("rloo-trainer", None) if wrong and lora else contextlib.nullcontext():
        if wrong and not lora:
            trainer = within(trainer, "_generate_and_score_completions", ref_model=trainer.model)
        watch, lines = watched(trainer, tmp_path)
    assert all("watch/reference_units" in line for line in lines) and len(lines) == 3
    assert {f.what for f in watch.findings} == ({"reference"} if wrong else set())


def test_a_reference_that_the_optimizer_moves_is_moved_by_nothing_else(tmp_path, said):
    trainer = of("dpo-trainer", max_steps=3)
    trainer.ref_model = trainer.model
    watched(trainer, tmp_path)
    assert not any("something other than the optimizer" in line for line in said)
