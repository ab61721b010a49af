"""Quantised heads in the definition are those that the model computes with."""

import pytest
import torch

pytest.importorskip("trl")

from cases.selftest.trainers.asked import call


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_fake_quantised_head_is_what_the_model_computes_with(name):
    """The definition's head gives the log-probs of the trainer's model, not those of the weight before quantisation."""
    from parity.trainers.checks import config_values
    from parity.trainers.rig import models, quantised_heads

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
    from parity.trainers.rig import models, quantised_heads

    model, definition = models.model("llama"), models.model("llama")
    quantised_heads.quantise(model, "quantised")
    quantised_heads.dequantised(definition, models.model("llama"))
    hidden = torch.randn(4, model.get_output_embeddings().in_features)
    own, exact = (m.get_output_embeddings()(hidden) for m in (model, definition))
    assert float((own - exact).abs().max()) < 1e-5
    assert float((own - models.model("llama").get_output_embeddings()(hidden)).abs().max()) > 0.1
