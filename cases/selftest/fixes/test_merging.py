"""`merge_into_copies`: what an engine is sent is what PEFT merges, and nothing of the model moves."""

import copy
from types import SimpleNamespace

import peft
import pytest
import torch

from parity.fixes import apply
from parity.fixes.patches import merge_into_copies
from parity.trainers.rig import drive, models, stored_window
from parity.upstream import trl

KINDS = {
    "linear": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "biases": {"lora_bias": True},
    "saved": {"modules_to_save": ["lm_head"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def adapted(kind: str, dtype: torch.dtype = torch.float32):
    name = {"experts": "qwen3_moe", "biases": "qwen2"}.get(kind, "llama")
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **KINDS[kind]}
    out = peft.get_peft_model(models.model(name, dtype), peft.LoraConfig(**options))
    stored_window.fill_adapter(out, stored_window.TRAINED)
    return out


def trainer_of(model, **more):
    return SimpleNamespace(model=model, **{"use_vllm": True, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_gets_the_merged_weights_and_the_model_stays(kind: str) -> None:
    model = adapted(kind)
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    wanted, before = dict(merged.named_parameters()), {n: p.clone() for n, p in model.named_parameters()}
    with merge_into_copies(trainer_of(model)) as patch:
        assert patch
        model.merge_adapter()
        found = dict(model.named_parameters())
        model.unmerge_adapter()
        assert all(p is q for p, q in zip(model.parameters(), dict(model.named_parameters()).values(), strict=True))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    moved = [n for n in before if "base_layer" in n and not torch.equal(wanted[n], before[n])]
    assert moved or kind == "saved"
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any(getattr(m, "merged", False) for m in model.modules())


def test_without_it_the_weights_in_16_bits_move() -> None:
    model = adapted("linear", torch.bfloat16)
    before = {n: p.clone() for n, p in model.named_parameters()}

    def unmoved() -> bool:
        model.merge_adapter()
        for _ in model.named_parameters():
            pass
        model.unmerge_adapter()
        return all(torch.equal(p, before[n]) for n, p in model.named_parameters())

    with merge_into_copies(trainer_of(model)):
        assert unmoved()
    assert not unmoved()


def test_named_adapters_are_merged_alone() -> None:
    model = adapted("linear")
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with merge_into_copies(trainer_of(model)):
        model.merge_adapter(adapter_names=["other"])  # whose B is 0
        found = dict(model.named_parameters())
        model.unmerge_adapter()
    assert all(torch.equal(p, found[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"use_vllm": False}, "no inference engine"), ({"is_fsdp_enabled": True}, "FSDP"), ({}, "already applied")],
)
def test_it_says_why_it_does_nothing(more: dict[str, bool], reason: str) -> None:
    trainer = trainer_of(adapted("linear"), **more)
    with merge_into_copies(trainer):
        assert reason in str(merge_into_copies(trainer))
    assert "no adapter" in str(merge_into_copies(trainer_of(models.model("llama"))))


def test_other_adapters_and_weights_that_two_share_are_left_to_peft():
    ia3 = peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = peft.get_peft_model(models.model("llama"), ia3)
    assert "no LoRA" in str(merge_into_copies(trainer_of(model)))
    tied = models.model("qwen2")
    model = peft.get_peft_model(tied, peft.LoraConfig(target_modules=["embed_tokens", "lm_head"]))
    assert "share a weight" in str(merge_into_copies(trainer_of(model)))


def test_weights_in_8_bits_are_left_to_peft():
    model = adapted("linear")

    class Int8Params(torch.nn.Parameter):
        pass

    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight = Int8Params(layer.weight.detach())
    assert "weights are Int8Params" in str(merge_into_copies(trainer_of(model)))


def test_a_copy_of_the_model_is_merged_by_itself():
    model = adapted("linear")
    with merge_into_copies(trainer_of(model)):
        other = copy.deepcopy(model)
        model.merge_adapter()
        mine, plain = dict(model.named_parameters()), dict(other.named_parameters())
        name = next(n for n in mine if "base_layer" in n)
        assert not torch.equal(mine[name], plain[name])
        other.merge_adapter()
        assert torch.equal(mine[name], dict(other.named_parameters())[name])
        model.unmerge_adapter()


def test_a_trainer_that_generates_with_vllm_gets_it() -> None:
    trainer = drive.build("GRPOTrainer", models.model("llama"), {"num_generations": 2}, peft_config=trl.lora())
    with apply(trainer) as applied:
        assert "no inference engine" in str(applied["merge_into_copies"])
    trainer.use_vllm = True
    with apply(trainer) as applied:
        assert applied["merge_into_copies"]
    assert "merge_adapter" not in vars(trainer.model)
