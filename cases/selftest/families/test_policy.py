"""The policy oracle against the definitions written out in 50 digits: value, metrics and gradient."""

import dataclasses
import random

import mpmath as mp
import pytest
import torch

from cases.selftest.families.written_out import Policy, Values, differences
from parity.families.policy_settings import LOSS_TYPES
from parity.judging.oracle import exact
from parity.registry import family

FAMILY = family("policy")
E = float(mp.e)
CHOICES = {
    "importance_sampling_level": ["token", "sequence"],
    "epsilon": [0.2, 0.05],
    "epsilon_high": [None, 0.28, 0.5],
    "delta": [None, 1.1, 1.8, 4.0],
    "beta": [0.0, 0.04, 0.5],
    "use_bias_correction_kl": [False, True],
    "ref": ["near", "apart", "far"],
    "old": ["mixed", "mixed", "inside", "absent", "extreme"],
    "ratio": ["none", "token", "sequence"],
    "ratio_range": ["unit", "wide", "zeros"],
    "off_policy_mask_threshold": [None, 0.1, 1.0],
    "sampler": ["none", "given", "nan"],
    "entropy_quantile": [False, True],
    "entropy_coef": [0.0, 0.3],
    "advantages": ["mixed", "positive", "negative", "zero", "equal", "token"],
    "accumulation": [1, 2, 5],
    "steps_per_generation": [1, 4, 10],
    "other_tokens": [0, 7],
    "max_completion_length": [16, 3],
    "sapo_temperature_pos": [1.0, 0.6],
    "sapo_temperature_neg": [1.05, 2.0],
    "vespo_k_pos": [2.0, 1.0],
    "vespo_lambda_pos": [3.0, 1.5],
    "vespo_k_neg": [3.0, 1.5],
    "vespo_lambda_neg": [2.0, 1.0],
    "mode": ["train", "eval"],
    "head": ["plain", "plain", "tied", "lora"],
    "lengths": [None, [4, 1, 0], [2, 4, 3], [0, 0, 0]],
    "holes": [False, True],
    "bias": ["none", "random", "banned"],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.3],
    "temperature": [1.0, 0.7],
    "peak": [1.0, 4.0],
    "mask_dtype": ["int64", "bool", "fp32"],
}


def inputs(loss_type, seed):
    """A tiny case, every setting chosen anew."""
    choose = random.Random(f"{loss_type}/{seed}")
    settings = {name: choose.choice(values) for name, values in CHOICES.items()}
    if loss_type == "cispo":
        settings["epsilon_high"] = choose.choice([5.0, 1.3])
    settings |= {"B": 3, "T": 4, "V": 5, "H": 3, "loss_type": loss_type, "grad": "hidden weight bias"}
    return FAMILY.build(FAMILY.case(seed, "fp32", settings))


def close(value, wanted, size=1):
    return abs(mp.mpf(float(value)) - wanted) <= mp.mpf("1e-11") * (abs(wanted) + size)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("seed", range(12))
def test_loss_and_metrics(loss_type, seed):
    x = inputs(loss_type, seed)
    lp, entropy = Values(x).tokens()
    definition = Policy(x)
    found = exact(FAMILY, x)
    wanted = {"loss": definition.loss(lp, entropy, lp, definition.kept_tokens(entropy))}
    wanted |= definition.metrics(lp, entropy)
    assert set(wanted) == {n for n in found if not n.startswith(("grad_", "_"))}
    for name, value in wanted.items():
        scale = float(found["_terms"].abs().sum()) + 1e-4 if name == "loss" else 1.0  # k3 near 0 cancels
        assert close(found[name], value, scale), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_gradient(loss_type, seed):
    """Central differences in 50 digits, with what the definition detaches held where it was."""
    x = inputs(loss_type, seed + 100)
    values, definition = Values(x), Policy(x)
    stop, entropy = values.tokens()
    kept = definition.kept_tokens(entropy)
    found = exact(FAMILY, x)
    upstream = mp.mpf(float(x.cotangents["loss"]))

    def loss():
        return definition.loss(*values.tokens(), stop, kept)

    for name, value, slope, largest in differences(values.leaf, found, x.leaves, seed, loss):
        assert close(value, upstream * slope, largest), name


def by_hand(**settings):
    """Two tokens of one sequence, two token ids with logits ±h: everything below fits on paper."""
    settings = {"B": 1, "T": 2, "V": 2, "H": 1, "loss_type": "grpo"} | settings
    x = FAMILY.build(FAMILY.case(0, "fp32", settings))
    return x.replace(
        hidden=torch.zeros(1, 2, 1),
        weight=torch.tensor([[1.0], [-1.0]]),
        ids=torch.tensor([[0, 1]]),
        mask=torch.ones(1, 2),
        advantages=torch.tensor([2.0]),
        old_logps=torch.tensor([[-1.0, 1.0]]) - torch.tensor(2.0).log(),
        num_items_in_batch=torch.tensor(2),
    )


def loss_of(x, **settings):
    """The oracle's loss with some settings exchanged."""
    for name, value in settings.items():
        setattr(x.settings, name, value)
    return float(exact(FAMILY, x)["loss"])


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
    x = by_hand(beta=1.0, use_bias_correction_kl=True).replace(
        mask=torch.tensor([[1.0, 0.0]]),
        advantages=torch.zeros(1),
        ref_logps=torch.tensor([[half + log_r, 0.0]], dtype=torch.float64),
        old_logps=torch.tensor([[half - float(mp.log(ratio)), 0.0]], dtype=torch.float64),
    )
    variant = dataclasses.replace(FAMILY, oracle=FAMILY.variants["capped KL"])
    found = exact(variant, x)
    assert loss_of(x) == pytest.approx(definition)
    assert float(found["loss"]) == pytest.approx(capped)
    assert float(found["_slope"][0, 0]) == pytest.approx(slope)
