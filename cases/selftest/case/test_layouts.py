"""Memory layouts change no value, survive every move, and reach every tensor of every family."""

from __future__ import annotations

import pytest
import torch

from parity.case.layouts import elsewhere, laid_out, like
from parity.protocol.call import upstream
from parity.registry import family

SETTINGS = {
    "logprobs": {"ignored": "some", "bias": "random", "entropy": "gradient"},
    "policy": {"bias": "random", "lengths": [4, 2], "holes": True, "beta": 0.1, "off_policy_mask_threshold": 0.1},
    "divergence": {"bias": "random", "num_items": "given", "teacher_bias": "random"},
}
SETTINGS["policy"] |= {"advantages": "token", "ratio": "token"}
NUMBERS = torch.arange(6.0).view(2, 3)


def built(name, seed, **more):
    fam = family(name)
    return fam.build(fam.case(seed, "fp32", {"B": 2, "T": 4, "V": 7, "H": 3} | SETTINGS[name] | more))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_tensor_meets_every_layout_and_keeps_its_values(name):
    met: dict[str, set[tuple]] = {}
    for seed in range(24):
        plain, x = built(name, seed), built(name, seed, layouts="mixed")
        for n, t in (x.tensors | {f"d {n}": g for n, g in x.cotangents.items()}).items():
            truth = plain.cotangents[n[2:]] if n.startswith("d ") else plain.tensors[n]
            if t is not None:
                assert t.dtype == truth.dtype and torch.equal(t, truth), n
                met.setdefault(n, set()).add((t.stride(), t.storage_offset()))
    assert len(met.pop("hidden")) == 1  # it has a setting of its own
    tensors = built(name, 0).tensors
    least = {n: 3 if tensors.get(n, NUMBERS).dim() else 2 for n in met}
    assert not {n for n, ways in met.items() if len(ways) < least[n] and not n.startswith("d ")}
    assert name != "logprobs" or len(met["d logps"]) >= 4


@pytest.mark.parametrize(
    ("kind", "stride", "offset"),
    [
        ("contiguous", (3, 1), 0),
        ("offset", (4, 1), 1),
        ("flat", (3, 1), 1),
        ("strided", (6, 2), 0),
        ("transposed", (1, 2), 0),
        ("expanded", (3, 1), 0),
    ],
)
def test_each_kind(kind, stride, offset):
    x = laid_out(NUMBERS, kind)
    assert (x.stride(), x.storage_offset()) == (stride, offset)
    assert torch.equal(x, NUMBERS)
    for moved in (elsewhere(x, dtype=torch.float64), like(NUMBERS, x), upstream(x, NUMBERS.double())):
        assert torch.equal(moved.float(), NUMBERS)
        assert (moved.stride(), moved.storage_offset()) == (stride, offset)


def test_what_repeats_shares_memory():
    rows = laid_out(torch.tensor([[1.0], [2.0]]).repeat(1, 3), "expanded")
    assert rows.stride() == (1, 0)
    assert like(rows * 2, rows).stride() == (1, 0)
    other = torch.arange(6.0).view(2, 3)
    assert like(other, rows) is other
    assert elsewhere(rows, dtype=torch.float16).stride() == (1, 0)


def test_a_gap_holds_nothing_that_could_be_taken_for_the_value():
    for layout in ("strided", "offset"):
        memory = laid_out(NUMBERS, layout).untyped_storage()
        assert torch.tensor(memory.tolist(), dtype=torch.uint8).view(torch.float32).isnan().any()
    mask = torch.tensor([[1, 1, 0]], dtype=torch.uint8)
    assert laid_out(mask, "strided").as_strided((6,), (1,), 0).tolist() == [1, 0, 1, 0, 0, 1]
    ids = torch.tensor([[3, 0, -100]])
    assert laid_out(ids, "strided").as_strided((6,), (1,), 0).tolist() == [3, 0, 0, 3, -100, 0]
