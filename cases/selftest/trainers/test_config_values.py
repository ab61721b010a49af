"""Config values and heads that hide: real trainers held against the model's own logits."""

import sys

import pytest
import torch

pytest.importorskip("trl")

from cases.selftest.trainers.asked import call, planted, rows
from parity.trainers.checks import config_values
from parity.trainers.rig import models, quantised_heads


def test_a_value_that_the_trainer_misses_is_red_and_names_the_token():
    def without_softcap(apply, hidden, weight, bias, targets, temperature, chunk, softcap, *rest):
        return apply(hidden, weight, bias, targets, temperature, chunk, None, *rest)

    with planted("trl.trainer.utils._ChunkedLogProbFunction.apply", without_softcap):
        found = rows("grpo-trainer", "config-values", model="gemma2")
    assert found["logps"].verdict == found["gradient"].verdict == "disagree"
    assert "by the model's own logits" in found["logps"].message
    assert "first model.embed_tokens.weight" in found["gradient"].message


def test_a_head_that_this_machine_cannot_make_is_unsupported_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = rows("grpo-trainer", "config-values", head="quantised")
    assert "pip install" in found[None].message and found[None].verdict == "unsupported"


@pytest.mark.parametrize(
    ("path", "head", "verdicts"),
    [("released", "lora", {None: "refused"}), ("fixed", "hook", {"logps": "agree", "gradient": "agree"})],
)
def test_a_head_is_refused_or_found_with_our_fix_and_never_ignored(path, head, verdicts):
    found = rows("grpo-trainer", "config-values", path, head=head)
    assert {q: r.verdict for q, r in found.items()} == verdicts


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_fake_quantised_head_is_what_the_model_computes_with(name):
    """The definition's head gives the log-probs of the trainer's model, not those of the weight before quantisation."""
    asked = call("grpo-trainer", "config-values", model=name, head="fake-quantised")
    batch = config_values.Batch(asked)
    with torch.no_grad():
        exact = batch.logps(config_values.altered(models.model(name, torch.float64), asked))
        model = models.model(name)
        plain = batch.logps(model)
        quantised_heads.quantise(model, "fake-quantised")
        own = batch.logps(model)
    assert float((own - exact).abs().max()) < 1e-4 < 1e-2 < float((plain - exact).abs().max())


def test_four_bits_in_the_definition_are_those_of_the_head():
    pytest.importorskip("bitsandbytes", reason="pip install 'llm-parity[kbit]'")
    model, definition = models.model("llama"), models.model("llama")
    quantised_heads.quantise(model, "quantised")
    quantised_heads.dequantised(definition, models.model("llama"))
    hidden = torch.randn(4, model.get_output_embeddings().in_features)
    own, exact = (m.get_output_embeddings()(hidden) for m in (model, definition))
    assert float((own - exact).abs().max()) < 1e-5
    assert float((own - models.model("llama").get_output_embeddings()(hidden)).abs().max()) > 0.1
