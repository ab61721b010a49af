"""Blocks change no bit, and an infinity beside other entries changes none of theirs."""

import pytest
import torch

from parity.judge import blocks
from parity.judge.monte_carlo import MonteCarlo
from parity.judge.recipe import Recipe

SHAPES = [(12, 7, 33), (3, 1000), (500,), (2, 3, 200)]


def values(shape):
    """Of every size down to the subnormals of float16 and bfloat16, zeros among them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x * 10.0 ** torch.randint(-42, 4, shape, generator=generator) * (x.abs() > 0.2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_have_the_bits_of_the_whole(shape, turned, monkeypatch):
    x = values(shape).transpose(0, -1) if turned else values(shape)
    stretch = 1 + torch.rand(x.shape[:1] + (1,) * (x.dim() - 1), dtype=torch.float64)

    def all_of_them():
        grids = [blocks.on_grid(x, d, stretch) for d in ("fp16", "bf16", "fp32")]
        return [*grids, blocks.shaken(x, x.abs() * 2.0**-24, stretch)]

    whole = all_of_them()
    monkeypatch.setattr(blocks, "BLOCK", 64)
    for a, b in zip(whole, all_of_them(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("spoilt", [torch.inf, -torch.inf, torch.nan])
def test_an_infinity_leaves_the_others_as_they_are(dtype, spoilt):
    x = values((4, 50)).clamp(-100, 100)
    y = x.clone()
    y[1, 3] = spoilt

    def replica(z):
        with MonteCarlo(Recipe(elementwise=dtype, logits=dtype), dtype, 1) as mode:
            return z * 1.0, mode.store(z, dtype)

    for clean, found in zip(replica(x), replica(y), strict=True):
        assert found[1, 3].isnan() if spoilt != spoilt else found[1, 3] == spoilt
        found[1, 3] = clean[1, 3]
        assert torch.equal(clean, found)
