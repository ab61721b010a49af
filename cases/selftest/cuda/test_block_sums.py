"""cut-cross-entropy's gradients as CUDA sums them, block by block in 16 bits: honest ones agree, wrong ones are caught."""

import dataclasses

import pytest
import torch

from fixtures.pretended_cuda import pretended
from parity.implementations import cce
from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle, judge_all
from parity.protocol.call import execute
from parity.registry import family, load


class Blocks(torch.autograd.Function):
    """-cross entropy of h Wᵀ with float32 logits; gradients of 128 logits or tokens at a time added to 16-bit memory."""

    @staticmethod
    def forward(ctx, h, w, ids, order, factor):
        logps = torch.log_softmax(h.float() @ w.float().mT, -1)
        ctx.save_for_backward(h, w, ids, logps)
        ctx.order, ctx.factor = order, factor
        return logps.gather(-1, ids[:, None])[:, 0]

    @staticmethod
    def backward(ctx, g):
        h, w, ids, logps = ctx.saved_tensors
        d = -logps.exp()
        d.scatter_add_(1, ids[:, None], torch.ones_like(g)[:, None])
        d = (d * g[:, None]).to(h.dtype)
        return ctx.factor * added(d, w, ctx.order), added(d.mT, h, ctx.order), None, None, None


def added(d, b, order):
    parts = [x.float() @ y.float() for x, y in zip(d.split(cce.BLOCK, 1), b.split(cce.BLOCK), strict=True)]
    total = torch.zeros_like(parts[0], dtype=b.dtype)
    for part in parts[::order]:
        total = total + part.to(b.dtype)
    return total


def kernel(order=1, factor=1.0):
    def call(x):
        logps = Blocks.apply(x.hidden.flatten(0, 1), x.weight, x.ids.flatten(), order, factor)
        return {"logps": logps.view(x.ids.shape)}

    return Implementation("blocks", "logprobs", "candidate", call, cce._kernel)


@pytest.mark.parametrize(
    ("seed", "size", "width", "peak"), [(3, 8_200, 64, 4.0), (4, 32_769, 16, 4.0), (3, 32_769, 4, 12.0)]
)
def test_a_tenth_of_a_gradient_is_caught_at_any_vocabulary(seed, size, width, peak):
    """In bfloat16; with hundreds of blocks where few of them carry the gradient: honest kernels err by several percent else."""
    fam = family("logprobs")
    settings = {"B": 1, "T": 1, "V": size, "H": width, "peak": peak, "targets": "random", "grad": "hidden"}
    case = fam.case(seed, "bf16", settings)
    with pretended():
        oracle = CaseOracle.of(fam, case, "cuda")
        for order in (1, -1):  # whichever block comes last
            honest = kernel(order)
            found = judge_all(oracle, honest, execute(honest, oracle.inputs), honest.recipe_for(oracle.inputs))
            assert all(j.headroom < 0.7 for j in found.values()), {n: j.gates for n, j in found.items()}
        wrong = kernel(factor=0.9)
        found = judge_all(oracle, wrong, execute(wrong, oracle.inputs), wrong.recipe_for(oracle.inputs))
    assert not found["grad_hidden"].agrees


def test_the_kernel_under_cudas_recipe_in_the_interpreter():
    """A temperature folded into the hidden states: the kernel stores ∂loss/∂logits before the factor 58, and where float16
    flushes that to 0 no row of the head has a gradient."""
    settings = {"B": 2, "T": 4, "V": 128, "H": 5, "temperature": 0.01729, "peak": 0.4, "grad": "weight"}
    fam, one = family("logprobs"), load()["cce.unfiltered"]
    oracle = CaseOracle.of(fam, fam.case(0, "fp16", settings))
    on_cuda = dataclasses.replace(cce._kernel(oracle.inputs), logits="fp32", partials=2, partial_terms=cce.BLOCK)
    recipe = on_cuda.resolve("fp16")
    outcome = execute(one, oracle.inputs)
    found, unfolded = (judge_all(oracle, one, outcome, r) for r in (recipe, dataclasses.replace(recipe, folded=1.0)))
    assert all(j.headroom < 0.5 for j in found.values()), {n: j.gates for n, j in found.items()}
    assert unfolded["grad_weight"].headroom > 1.0
