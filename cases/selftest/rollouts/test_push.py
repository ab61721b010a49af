"""TRL's own push, to a model of transformers in vLLM's place: what it does not take is named, and stays as it was."""

import dataclasses
import functools
import importlib
import json
import os
import shutil

import peft
import pytest
import torch
from click.testing import CliRunner

from parity import recording
from parity.cli.commands import main
from parity.errors import UsageError
from parity.rollouts import engine_models, push, vllm_engine

LOST = "model.layers.0.mlp.down_proj.weight"


class Engine(torch.nn.Module):
    """Takes weights by their names. Pushed one by one, which `deaf` are it passes over and which `broken` are is an error."""

    def __init__(self, folder, deaf=(), broken=()):
        super().__init__()
        self.inner, self.deaf, self.broken = engine_models.loaded(folder, torch.float32), deaf, broken

    def named_parameters(self, *args, **more):
        return self.inner.named_parameters(*args, **more)

    def load_weights(self, weights):
        for name, value in weights:
            if isinstance(weights, list) and name in self.broken:
                raise KeyError(name)
            if not isinstance(weights, list) or name not in self.deaf:
                self.inner.get_parameter(name).copy_(value)


def after(tmp_path, model="tiny-llama", asleep=False, **ways):
    """The weights before the push, the pushed ones, the engine's then; what is not pushed."""
    folder, out = engine_models.folder_of(model), tmp_path / "moved"
    (policy, _), engine = push.moved(folder, torch.float32, out), Engine(folder, **ways)
    before = {name: p.clone() for name, p in engine.named_parameters()}
    facts = push.pushed(engine, policy, out, asleep)
    assert facts["pushed_by"].startswith("trl ")
    return before, dict(policy.named_parameters()), dict(engine.named_parameters()), facts["not_pushed"]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma2"])  # the second has a tied head
def test_every_number_moves_and_arrives(model, tmp_path):
    importlib.import_module("trl.generation.vllm_generation")  # vLLM sets variables when it is imported
    environment = dict(os.environ)
    before, moved, there, lost = after(tmp_path, model)
    assert dict(os.environ) == environment
    assert not lost and all(torch.equal(p, there[name]) for name, p in moved.items())
    assert not any(bool((p == before[name]).any()) for name, p in moved.items())
    saved = engine_models.loaded(tmp_path / "moved", torch.float32).state_dict()
    assert all(torch.equal(p, saved[name]) for name, p in moved.items())


@pytest.mark.parametrize("asleep", [False, True])
def test_a_weight_that_the_engine_passes_over_is_named_and_stays(asleep, tmp_path):
    before, moved, there, lost = after(tmp_path, asleep=asleep, deaf=[LOST])
    assert lost.startswith(f"1 of vLLM's {len(moved)} parameters") and lost.endswith(f": {LOST}")
    assert torch.equal(there[LOST], 0 * before[LOST] if asleep else before[LOST])
    assert all(torch.equal(p, there[name]) for name, p in moved.items() if name != LOST)


def test_a_weight_that_is_lost_asleep_and_loaded_by_nothing_is_named(tmp_path):
    folder = engine_models.folder_of("tiny-llama")
    (policy, _), engine = push.moved(folder, torch.float32, tmp_path / "moved"), Engine(folder)
    engine.inner.scale, engine.inner.unused = (torch.nn.Parameter(torch.full((3,), x)) for x in (1.0, torch.nan))
    assert not push.pushed(engine, policy, tmp_path / "moved", False)["not_pushed"]
    assert push.pushed(engine, policy, tmp_path / "moved", True)["not_pushed"].endswith(": scale")


def test_a_folder_without_an_adapter_is_refused_before_anything_is_saved(tmp_path):
    with pytest.raises(UsageError, match="no adapter_config.json"):
        push.moved(engine_models.folder_of("tiny-llama"), torch.float32, tmp_path / "moved", tmp_path)
    assert not (tmp_path / "moved").exists()


def test_a_push_that_ends_in_an_error_is_told(tmp_path):
    _, moved, _, lost = after(tmp_path, broken=[LOST])
    behind = len(moved) - list(moved).index(LOST)
    assert lost.startswith(f"it ends in KeyError: '{LOST}'; {behind} of vLLM's {len(moved)} parameters are not")


def test_a_model_that_the_engine_itself_cannot_load_is_said(tmp_path, monkeypatch):
    """As vLLM 0.32 with a saved DeepSeek-V3."""

    def load_weights(self, weights):
        raise KeyError("experts.0")

    monkeypatch.setattr(Engine, "load_weights", load_weights)
    with pytest.raises(
        UsageError, match="^TRL's push: it ends in KeyError: 'experts.0'; vLLM cannot load .* itself: KeyError"
    ):
        after(tmp_path)


def test_a_number_that_is_0_moves_too(tmp_path):
    folder = shutil.copytree(engine_models.folder_of("tiny-qwen2"), tmp_path / "fresh")
    fresh = engine_models.loaded(folder, torch.float32)
    torch.nn.init.zeros_(fresh.model.layers[0].self_attn.q_proj.bias)
    fresh.save_pretrained(folder)
    model, _ = push.moved(folder, torch.float32, tmp_path / "moved")
    assert bool((model.model.layers[0].self_attn.q_proj.bias.abs() == 0.02).all())


def test_a_missing_number_is_as_good_as_another(tmp_path):
    """Memory that no weight fills, behind the vocabulary, may be NaN."""
    folder = engine_models.folder_of("tiny-llama")
    (policy, _), engine = push.moved(folder, torch.float32, tmp_path / "moved"), Engine(folder)
    engine.inner.unused = torch.nn.Parameter(torch.full((3,), torch.nan))
    assert not push.pushed(engine, policy, tmp_path / "moved", False)["not_pushed"]


def opened(tmp_path, deaf, model, dtype, max_length, change):
    engine = Engine(model, deaf)
    facts = change(engine)
    engine.inner.save_pretrained(tmp_path / "engine")
    sample = engine_models.opened(str(tmp_path / "engine"), dtype, max_length)

    def sampled(request):
        found = sample(request)
        return dataclasses.replace(found, facts={**found.facts, **facts})

    return sampled


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_is_pushed_merged_and_judged_on_its_own(tied, tmp_path, monkeypatch):
    """LoRA on embeddings that are the head too: TRL merges it into both, the trainer's head has none of it."""
    folder, adapter = engine_models.folder_of("tiny-gemma2" if tied else "tiny-llama"), tmp_path / "adapter"
    base = engine_models.loaded(folder, torch.float32)
    named = ["embed_tokens", "q_proj"] if tied else "all-linear"
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=named, init_lora_weights=False))
    made.save_pretrained(adapter)
    monkeypatch.setattr(vllm_engine, "prepare", lambda: None)
    monkeypatch.setattr(vllm_engine, "opened", functools.partial(opened, tmp_path, ()))
    words = ["record", "--model", folder, "--rows", 4, "--max-tokens", 6, "--out", tmp_path]
    (tmp_path / "prompts").write_text("[3, 4, 5]")
    words += ["--prompts", tmp_path / "prompts", "--engine", "vllm", "--adapter", adapter]
    assert "need --push" in run(*words).output
    assert run(*words, "--push", tmp_path / "moved").exit_code == 0
    judged = run("judge", tmp_path / "moved-fp32-t1-p1", "--adapter", adapter)
    assert judged.exit_code == tied and "arrive: holds (1 recordings)" in judged.output, judged.output
    if not tied:
        assert run("judge", tmp_path / "moved-fp32-t1-p1").exit_code == 1
        found = recording.load(tmp_path / "moved-fp32-t1-p1")
        assert (found.trainer_logps - found.sampler_logps)[found.mask].abs().max() < 1e-4


def run(*words):
    return CliRunner().invoke(main, ["rollouts", *map(str, words)])


@pytest.mark.parametrize("deaf", [(), (LOST,)])
def test_the_commands(deaf, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "prepare", lambda: None)
    monkeypatch.setattr(vllm_engine, "opened", functools.partial(opened, tmp_path, deaf))
    words = ["record", "--model", "tiny-llama", "--rows", 4, "--max-tokens", 6, "--out", tmp_path]
    words += ["--push", tmp_path / "moved", "--engine"]
    assert "--push needs --engine vllm" in run(*words, "transformers").output
    done = run(*words, "vllm")
    assert done.exit_code == 0, done.output
    refused = run(*words, "vllm")
    assert refused.exit_code == 2 and refused.output.count("\n") == 1 and "it exists" in refused.output
    found = tmp_path / "moved-fp32-t1-p1.json"
    assert json.loads(found.read_text())["model"] == str(tmp_path / "moved")
    judged = run("judge", found)
    said = "push, all weights that TRL pushes arrive: "
    if not deaf:
        assert judged.exit_code == 0 and f"{said}holds (1 recordings)" in judged.output, judged.output
        return
    assert judged.exit_code == 1 and "fails by log-probs; weights were lost by the push" in judged.output
    assert f"{said}moved-fp32-t1-p1: 1 of vLLM's" in judged.output and LOST in judged.output
    assert ": holds (" not in judged.output
