"""Mistakes in what an inference engine is sent, each seen by the check `weight-sync`."""

import pytest

pytest.importorskip("trl")

from trl.generation import vllm_generation as generation

from parity.registry import run_case, select
from parity.trainers import catalogue

listed = generation.VLLMGeneration._iter_named_params
COLOCATE = {"check": "weight-sync", "mode": "colocate"}


def without_a_norm(self):
    yield from ((name, x) for name, x in listed(self) if "input_layernorm" not in name)


def with_a_prefix(self):
    yield from ((f"model.{name}", x) for name, x in listed(self))


def from_the_base_alone(self):
    with self.model.disable_adapter():
        for name, x in self.model.named_parameters():
            if "lora_" not in name:
                yield name.removeprefix("base_model.model.").replace(".base_layer", ""), x.data


def left_merged(self):
    self.model.merge_adapter()
    for name, x in self.model.named_parameters():
        if "lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), x.data


def one_of_two_transposed(self):
    for name, x in listed(self):
        yield name, x.flip(0) if name.endswith("layers.1.mlp.down_proj.weight") else x


def scaled(self):
    yield from ((name, x * 1.0005 if name.endswith("0.self_attn.v_proj.weight") else x) for name, x in listed(self))


MISTAKES = {
    without_a_norm: "names",
    with_a_prefix: "names",
    from_the_base_alone: "logits of the engine",
    left_merged: "state",
    one_of_two_transposed: "logits of the engine",
    scaled: "logits of the engine",
}


def failing(settings):
    case = catalogue.family("grpo-trainer").case(0, "fp32", settings)
    rows = list(run_case(case, select(["grpo-trainer.released"])))
    assert any(row.judged for row in rows)
    return [row.quantity for row in rows if row.failing]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_in_what_is_sent_is_seen(mistake, monkeypatch):
    monkeypatch.setattr(generation.VLLMGeneration, "_iter_named_params", mistake)
    assert MISTAKES[mistake] in failing(COLOCATE)


@pytest.mark.parametrize("settings", [COLOCATE, COLOCATE | {"adapter": "none", "model": "qwen2"}])
def test_what_trl_sends_to_an_engine_in_its_process_is_right(settings):
    assert failing(settings) == []
