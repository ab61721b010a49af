"""The policy oracle against the definitions written out in 50 digits: value, metrics and gradient."""

import dataclasses

import mpmath as mp
import pytest
import torch

from cases.selftest.families.written_out import Policy, Values, differences, drawn
from parity.families.policy_settings import LOSS_TYPES
from parity.judging.oracle import exact
from parity.registry import family

FAMILY = family("policy")
E = float(mp.e)


def close(value, wanted, size=1):
    return abs(mp.mpf(float(value)) - wanted) <= mp.mpf("1e-11") * (abs(wanted) + size)


def inputs(loss_type, number):
    more = {
        "importance_sampling_level": ("token", "sequence"),
        "holes": (False, False, True),
        "ratio": ("none", "token"),
    }
    return [x for x in drawn("policy", 240, **more) if x.settings.loss_type == loss_type][number]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("number", range(20))
def test_loss_and_metrics(loss_type, number):
    x = inputs(loss_type, number)
    lp, entropy = Values(x).tokens()
    definition = Policy(x)
    found = exact(FAMILY, x)
    wanted = {"loss": definition.loss(lp, entropy, lp, definition.kept_tokens(entropy))}
    wanted |= definition.metrics(lp, entropy)
    tokens = x.mask.nonzero().tolist() if x.settings.use_bias_correction_kl else []
    largest = max([1.0, *(float(definition.weight(lp, lp, b, t)) for b, t in tokens)])
    assert set(wanted) == {n for n in found if not n.startswith(("grad_", "_"))}
    for name, value in wanted.items():
        scale = float(found["_terms"].abs().sum()) + 1e-4 if name == "loss" else 1.0
        assert close(found[name], value, scale * largest), name  # k3 near 0 cancels, times a weight


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("number", range(4))
def test_gradient(loss_type, number):
    """Central differences in 50 digits, with what the definition detaches held where it was."""
    x = inputs(loss_type, number)
    values, definition = Values(x), Policy(x)
    stop, entropy = values.tokens()
    kept = definition.kept_tokens(entropy)
    found = exact(FAMILY, x)
    upstream = mp.mpf(float(x.cotangents["loss"]))

    def loss():
        return definition.loss(*values.tokens(), stop, kept)

    for name, value, slope, largest in differences(values.leaf, found, x.leaves, number, loss):
        assert close(value, upstream * slope, largest), name


@pytest.mark.parametrize(
    ("log_r", "ratio", "definition", "capped", "slope"),
    [
        (2.0, 1.0, E**2 - 3, E**2 - 3, -2.0),
        (3.0, 1.0, E**3 - 4, 10.0, 0.0),
        (-12.0, 1.0, 11 + E**-12, 10.0, 0.0),
        (-10.0, 1.0, 9 + E**-10, 9 + E**-10, 10.0),
        (1.0, 20.0, 20 * (E - 2), 10.0, 0.0),
        (25.0, 1e-9, 1e-9 * (E**25 - 26), 1e-9 * (E**20 - 21), 1e-9 * (E**20 - 21)),
    ],
)
def test_capped_kl_on_paper(log_r, ratio, definition, capped, slope):
    """One token of log-prob -log 2 and advantage 0: the loss is the KL term k3·w, its slope k3·w - (e^log_r - 1)·w."""
    half = -float(mp.log(2))
    settings = {"B": 1, "T": 2, "V": 2, "H": 1, "loss_type": "grpo", "beta": 1.0, "use_bias_correction_kl": True}
    x = FAMILY.build(FAMILY.case(0, "fp32", settings)).replace(
        hidden=torch.zeros(1, 2, 1),
        mask=torch.tensor([[1.0, 0.0]]),
        advantages=torch.zeros(1),
        ref_logps=torch.tensor([[half + log_r, 0.0]], dtype=torch.float64),
        old_logps=torch.tensor([[half - float(mp.log(ratio)), 0.0]], dtype=torch.float64),
    )
    variant = dataclasses.replace(FAMILY, oracle=FAMILY.variants["capped KL"])
    found = exact(variant, x)
    assert float(exact(FAMILY, x)["loss"]) == pytest.approx(definition)
    assert float(found["loss"]) == pytest.approx(capped)
    assert float(found["_slope"][0, 0]) == pytest.approx(slope)
