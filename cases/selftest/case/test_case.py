"""A case is data: JSON in and out, values that a smaller shape keeps and that no process changes."""

import json
import subprocess
import sys

import pytest
import torch

from parity.case.case import SCHEMA, Case, hashes, rounded
from parity.errors import UsageError
from parity.judge.values import integers, normal, uniform
from parity.registry import family

SHAPE = (4, 6, 9)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("make", [uniform, normal])
def test_a_smaller_shape_keeps_every_other_value(make, axis):
    whole = make(7, "hidden", SHAPE)
    for size in range(1, SHAPE[axis]):
        smaller = [*SHAPE]
        smaller[axis] = size
        assert torch.equal(make(7, "hidden", smaller), whole.narrow(axis, 0, size))


def test_integers_keep_what_a_smaller_bound_allows():
    for bound in range(1, 40):
        whole, smaller = integers(3, "ids", (500,), bound + 1), integers(3, "ids", (500,), bound)
        assert int(smaller.min()) >= 0
        assert int(smaller.max()) < bound
        if bound.bit_length() == (bound - 1).bit_length() and bound > 1:  # bound + 1 needs no more bits than bound
            kept = whole < bound
            assert torch.equal(whole[kept], smaller[kept])
    assert sorted(integers(3, "ids", (500,), 7).unique().tolist()) == list(range(7))


@pytest.mark.parametrize("name", ["B", "T", "V", "H"])
@pytest.mark.parametrize("loss", ["logprobs", "policy"])
def test_inputs_of_a_smaller_case_are_a_corner_of_the_larger(loss, name):
    fam = family(loss)
    large = {"B": 3, "T": 4, "V": 7, "H": 4, "bias": "random"}
    small = large | {name: large[name] - 1}
    a, b = fam.build(fam.case(5, "bf16", large)), fam.build(fam.case(5, "bf16", small))
    for tensor in ("hidden", "bias") if name != "H" else ("bias",):
        corner = a.tensors[tensor][tuple(slice(n) for n in b.tensors[tensor].shape)]
        assert torch.equal(corner, b.tensors[tensor])
    if name != "H":  # the weight is scaled by 1/√H
        assert torch.equal(a.weight[: b.weight.shape[0]], b.weight)
    if name in ("B", "T"):
        assert torch.equal(a.ids[: b.ids.shape[0], : b.ids.shape[1]], b.ids)


PINNED = (
    "from parity.judge.values import *; from parity.case.case import Case, hashes; "
    "print(hashes(1, 'hidden', (2, 2)).tolist(), uniform(1, 'u', (2,)).tolist(), "
    "normal(1, 'n', (2,)).tolist(), integers(1, 'i', (5,), 1000).tolist(), Case('logprobs', 1, 'bf16', {'V': 9}).id)"
)


def test_values_are_the_same_in_every_process():
    expected = (
        "[[2923032566869740370, 13502201783191755343], [15418727510572188953, 6745081026121338812]] [0.237508"
        "29696655273, 0.044044673442840576] [0.1708698272705078, -0.9416484832763672] [538, 775, 646, 592, 32"
        "3] logprobs-9c8d94f7e9"
    )
    for hashseed in ("0", "1"):
        environment = {"PYTHONHASHSEED": hashseed, "PYTHONPATH": ":".join(sys.path)}
        found = subprocess.run(
            [sys.executable, "-c", PINNED], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == expected


def test_values_have_the_spread_they_claim():
    u, n = uniform(0, "u", (200, 200)), normal(0, "n", (200, 200))
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(n.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(n.std()) == pytest.approx(1.03, abs=0.02)
    assert float(n.abs().max()) <= 3.6
    assert abs(float(torch.corrcoef(torch.stack([n.flatten(), normal(0, "m", (200, 200)).flatten()]))[0, 1])) < 0.02
    assert torch.equal(rounded(n), (n * 1024).round() / 1024)


def test_json_round_trip(tmp_path):
    case = Case("policy", 12, "fp16", {"T": 3, "delta": 1.8, "lengths": [1, 0], "bias": "banned", "epsilon_high": None})
    text = json.dumps(case.to_json())
    assert Case.from_json(json.loads(text)) == case
    assert Case.from_json(json.loads(text)).id == case.id
    (tmp_path / "case.json").write_text(text)
    (tmp_path / "wrapped.json").write_text(json.dumps({"case": case.to_json(), "remark": "found on a Friday"}))
    assert Case.load(tmp_path / "case.json") == Case.load(tmp_path / "wrapped.json") == case
    reordered = Case("policy", 12, "fp16", dict(reversed(list(case.settings.items()))))
    assert reordered.id == case.id
    assert Case("policy", 13, "fp16", case.settings).id != case.id


GOOD = {"schema": SCHEMA, "family": "logprobs", "seed": 1, "dtype": "fp32", "settings": {}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "list"),
        (GOOD | {"schema": 99}, "99"),
        (GOOD | {"schema": True}, "True"),
        (GOOD | {"seed": "1"}, "$.seed"),
        (GOOD | {"seed": True}, "$.seed"),
        (GOOD | {"dtype": "fp8"}, "'fp8'"),
        (GOOD | {"settings": [1]}, "$.settings"),
        ({k: v for k, v in GOOD.items() if k != "family"}, "family"),
    ],
)
def test_a_malformed_case_is_one_line(data, says):
    with pytest.raises(UsageError) as error:
        Case.from_json(data, "x.json")
    assert says in str(error.value)
    assert "x.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("loss", "settings", "says"),
    [
        ("logprobs", {"V": 0}, "V=0"),
        ("logprobs", {"H": 2.5}, "H=2.5"),
        ("logprobs", {"temperature": 0.0}, "temperature=0.0"),
        ("logprobs", {"temperature": -1.0}, "temperature=-1.0"),
        ("logprobs", {"softcap": 0.0}, "softcap=0.0"),
        ("logprobs", {"softcap": [1.0]}, "softcap=[1.0] must lie in (0, inf)"),
        ("logprobs", {"colour": 1}, "colour"),
        ("logprobs", {"bias": "loud"}, "'loud'"),
        ("logprobs", {"grad": "hidden nothing"}, "nothing"),
        ("logprobs", {"temperature": "warm"}, "warm"),
        ("logprobs", {"V": True}, "V=True"),
        ("logprobs", {"V": 256, "rare": 0}, "rare=0"),
        ("logprobs", {"V": 256, "rare": -1.0}, "rare=-1.0"),
        ("logprobs", {"level": 1e6}, "level=1000000.0"),
        ("logprobs", {"level": float("nan")}, "level=nan"),
        ("logprobs", {"smoothing": 1.5}, "smoothing=1.5"),
        ("logprobs", {"smoothing": 0.1, "bias": "banned"}, "smoothing=0.1"),
        ("logprobs", {"z_loss": -1.0}, "z_loss=-1.0"),
        ("divergence", {"hard_loss": 1.5}, "hard_loss=1.5"),
        ("divergence", {"hard_loss": 0.5, "sparse": "topk"}, "hard_loss=0"),
        ("preference", {"B": 3}, "B=3"),
        ("preference", {"method": "kto"}, "loss_type='sigmoid'"),
        ("preference", {"beta": 0.0}, "beta=0.0"),
        ("preference", {"loss_type": "exo_pair"}, "smoothing=0.0"),
        ("preference", {"smoothing": 0.5}, "smoothing=0.5"),
        ("policy", {"loss_type": "ppo"}, "'ppo'"),
        ("policy", {"lengths": [1]}, "lengths=[1]"),
        ("policy", {"lengths": [1, 9]}, "[1, 9]"),
        ("policy", {"loss_type": "dr_grpo", "max_completion_length": 0}, "max_completion_length=0"),
        ("policy", {"loss_type": "dapo", "steps_per_generation": 0}, "steps_per_generation=0"),
        ("policy", {"epsilon": 2.0, "old": "mixed"}, "epsilon=2.0"),
        ("policy", {"accumulation": 0}, "accumulation=0"),
    ],
)
def test_settings_without_a_value_are_one_line(loss, settings, says):
    with pytest.raises(UsageError) as error:
        family(loss).build(Case(loss, 0, "fp16", settings))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_default_written_out_is_the_same_case():
    fam = family("logprobs")
    assert fam.case(1, "fp32", {"V": 7, "T": 5}).id == fam.case(1, "fp32", {"T": 5}).id
    assert hashes(1, "a", (3,)).tolist() != hashes(2, "a", (3,)).tolist()
