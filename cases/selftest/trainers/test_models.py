"""The tiny models: real classes, the same weights everywhere, heads past the softcap, a wrapper that shows when lost."""

import pytest
import torch

pytest.importorskip("transformers")

from parity.errors import Unsupported
from parity.judge.operations import Double
from parity.trainers.checks import twins
from parity.trainers.rig import checkpointing, drive, models
from parity.trainers.rig.models import SOFTCAP
from parity.trainers.rig.twin_runs import Run

IDS = torch.arange(3, 59).remainder(53).add(3).view(2, 28)
ALL = tuple(models.ARCHITECTURES)


def made(name, dtype=torch.float32):
    try:
        return models.model(name, dtype)
    except Unsupported as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", ALL)
def test_logits_pass_the_softcap_and_float64_agrees(name):
    model = made(name)
    with torch.no_grad():
        z = model(input_ids=IDS).logits
        with Double():
            exact = made(name, torch.float64)(input_ids=IDS).logits
    capped = any("cap" in value for value in models.ARCHITECTURES[name].changes_logits)
    if capped:
        assert 0.95 * SOFTCAP < float(z.abs().max()) <= SOFTCAP
    else:
        assert float(z.square().mean().sqrt()) == pytest.approx(models.LOGITS, rel=0.02)
    assert exact.dtype == torch.float64
    assert float((z - exact).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ALL)
def test_what_changes_logits_is_there(name):
    model = made(name)
    config = model.config.get_text_config()
    for value in models.ARCHITECTURES[name].changes_logits:
        if value == "tied head":
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        elif value == "prediction head":
            assert model.lm_head is not model.get_output_embeddings()
        elif value == "lm_head.bias":
            assert bool(model.get_output_embeddings().bias.any())
        else:
            assert getattr(config, value) not in (None, 0, 1.0)
    assert (config is not model.config) == ("text_config" in models.ARCHITECTURES[name].options)


def test_weights_depend_on_the_name_alone():
    first, second = made("llama"), made("llama")
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, dict(first.named_parameters())[name])
    models.saved.cache_clear()
    models._loaded.cache_clear()
    for (name, a), (_, b) in zip(first.named_parameters(), made("llama").named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_model_is_its_own():
    one, other = models.model("llama"), models.model("llama")
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.fill_(7.0)
    assert not any(bool((parameter == 7.0).any()) for parameter in other.parameters())


def sft():
    return Run("sft-trainer", twins.twin("sft-trainer")).built


@pytest.mark.parametrize("build", [lambda: drive.build("DPOTrainer", models.model("llama"), {}), sft])
def test_a_trainer_has_a_tokenizer_of_its_own(build):
    """One that was changed cut the prompts of the next case in the same process."""
    one = build().processing_class
    one.model_max_length = 2
    assert build().processing_class.model_max_length > 2
    assert all(models.tokenizer(*pad).model_max_length > 2 for pad in ((), ("<pad>",)))


def test_the_tokenizer_round_trips():
    text = models.words(1, "some", 5)
    ids = models.tokenizer()(text)["input_ids"]
    assert len(ids) == 5 and models.tokenizer().decode(ids) == text
    assert min(ids) > models.BOS


@pytest.mark.parametrize("name", ["llama", "gemma4", "qwen3_moe"])
def test_the_wrapper_agrees_with_plain_and_shows_when_it_is_lost(name):
    model = made(name).train()
    with torch.no_grad():
        bare = model(input_ids=IDS).logits
    wrapper = checkpointing.install(model, checkpoint=False)
    plain = model(input_ids=IDS).logits.detach()
    assert not torch.equal(bare, plain)
    wrapper = checkpointing.install(fresh := made(name).train())
    assert torch.equal(fresh(input_ids=IDS).logits.detach(), plain) and wrapper.calls > 0
    assert checkpointing.wrapped(fresh, wrapper) == []
    fresh.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(fresh(input_ids=IDS).logits.detach(), bare)
    assert len(checkpointing.wrapped(fresh, wrapper)) == len(checkpointing.layers(fresh)) >= 2
