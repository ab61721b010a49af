"""Config values and heads that hide, and advantages: definitions by hand, and real trainers held against them."""

import math

import pytest
import torch

pytest.importorskip("trl")

from parity.registry import run_case, select
from parity.trainers.catalogue import family
from parity.trainers.check import Cell
from parity.trainers.checks import advantages


def verdicts(trainer, settings, way="released"):
    case = family(trainer).case(0, "fp32", {"check": "config-values", **settings})
    return {r.quantity: r for r in run_case(case, select([f"{trainer}.{way}"]))}


@pytest.mark.parametrize("settings", [{"model": "gemma4"}, {"model": "phi"}, {"head": "modules_to_save"}])
def test_what_the_trainer_applies_agrees(settings):
    found = verdicts("grpo-trainer", settings)
    assert {q: r.verdict for q, r in found.items()} == {"logps": "agree", "gradient": "agree"}
    assert max(r.headroom for r in found.values()) < 0.7


def test_a_value_that_the_trainer_misses_is_red_and_names_the_token(monkeypatch):
    import trl.trainer.utils as utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL scores the model's own logits")
    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", _without_softcap(utils._ChunkedLogProbFunction.apply))
    found = verdicts("grpo-trainer", {"model": "gemma2"})
    assert found["logps"].verdict == found["gradient"].verdict == "disagree"
    assert "by the model's own logits" in found["logps"].message
    assert "first model.embed_tokens.weight" in found["gradient"].message


def _without_softcap(apply):
    def called(hidden, weight, bias, targets, temperature, chunk, softcap, *rest):
        return apply(hidden, weight, bias, targets, temperature, chunk, None, *rest)

    return called


def test_a_head_that_cannot_be_honoured_is_refused_not_ignored():
    found = verdicts("grpo-trainer", {"head": "lora"})
    assert [r.verdict for r in found.values()] == ["refused"]


def test_a_head_that_this_machine_cannot_make_is_unsupported_with_the_remedy(monkeypatch):
    from parity.trainers.rig import quantised_heads

    monkeypatch.setattr(quantised_heads, "_installed", lambda name: False)
    found = verdicts("grpo-trainer", {"head": "quantised"})
    assert "pip install" in found[None].message and found[None].verdict == "unsupported"


def cell(trainer, **settings):
    fam = family(trainer)
    case = fam.case(0, "fp32", {"check": "advantages", **settings})
    return Cell(case, fam.full_settings(case), "released", "cpu")


NAN = math.nan


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_grpo_advantages_by_hand():
    x = column(1.0, 2.0, 3.0, 6.0, 5.0, NAN, 5.0, 5.0)
    exact, _ = advantages._grpo(cell("grpo-trainer", scale_rewards="none"), x, [1.0])
    assert exact.tolist() == [-2.0, -1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    exact, _ = advantages._grpo(cell("grpo-trainer"), x, [1.0])
    std = math.sqrt(14 / 3) + 1e-4  # of 1, 2, 3, 6: (4 + 1 + 0 + 9) / 3
    assert exact.tolist() == pytest.approx([-2 / std, -1 / std, 0.0, 3 / std, 0.0, 0.0, 0.0, 0.0])


def test_leave_one_out_by_hand():
    x = column(1.0, 2.0, 3.0, 6.0, NAN, 4.0, NAN, NAN)
    exact, _ = advantages._rloo(cell("rloo-trainer"), x, [1.0])
    assert exact.tolist() == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 3 - 9 / 3, 6 - 6 / 3, 0.0, 0.0, 0.0, 0.0])


def test_weights_leave_out_what_a_function_does_not_score():
    x = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [NAN, NAN]], dtype=torch.float64)
    assert advantages._summed(x, [1.0, -0.5]).nan_to_num(-99.0).tolist() == [[0.0, -1.0, 1.0, -99.0]]


def test_each_function_is_normalised_first_by_hand():
    x = torch.tensor([[0.0, 4.0], [2.0, 0.0], [0.0, 0.0], [2.0, 4.0]], dtype=torch.float64)
    exact, _ = advantages._grpo(cell("grpo-trainer", aggregation="normalize_then_sum"), x, [1.0, 1.0])
    assert exact.tolist() == pytest.approx([0.0, 0.0, -math.sqrt(1.5), math.sqrt(1.5)], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("trainer", ["grpo-trainer", "rloo-trainer"])
def test_the_trainers_own_advantages_agree_and_a_wrong_one_does_not(trainer, monkeypatch):
    asked = cell(trainer, rewards="none")
    (result,) = advantages.advantages(asked)
    assert result.agrees
    given = advantages._asked
    monkeypatch.setattr(advantages, "_asked", lambda *args: given(*args) * (1 + 1e-4))
    (result,) = advantages.advantages(asked)
    assert not result.agrees and "instead of" in result.message


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_fake_quantised_head_is_what_the_model_computes_with(name):
    """The definition's head gives the log-probs of the trainer's model, not those of the weight before quantisation."""
    from parity.trainers.checks import config_values
    from parity.trainers.rig import models, quantised_heads

    case = family("grpo-trainer").case(0, "fp32", {"check": "config-values", "model": name, "head": "fake-quantised"})
    cell = Cell(case, family("grpo-trainer").full_settings(case), "released", "cpu")
    batch = config_values.Batch(cell)
    with torch.no_grad():
        exact = batch.logps(config_values.altered(models.model(name, torch.float64), cell))
        model = models.model(name)
        plain = batch.logps(model)
        quantised_heads.quantise(model, "fake-quantised")
        own = batch.logps(model)
    assert float((own - exact).abs().max()) < 1e-4 < 1e-2 < float((plain - exact).abs().max())


def test_a_trainer_that_ignores_the_quantisation_of_its_head_is_red():
    found = verdicts("grpo-trainer", {"head": "fake-quantised"})
    assert {q: r.verdict for q, r in found.items()} == {"logps": "disagree", "gradient": "disagree"}


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
