"""cut-cross-entropy's gradients as CUDA sums them, block by block in 16 bits: honest ones agree, a tenth is caught at any V."""

import torch

from fixtures.pretended_cuda import pretended
from parity.implementations import cce
from parity.implementations.implementation import Implementation
from parity.judging.assess import Bench, confirmed
from parity.judging.execute import execute
from parity.registry import family


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


def test_a_tenth_of_a_gradient_is_caught_at_a_large_vocabulary():
    fam = family("logprobs")
    case = fam.case(3, "bf16", {"B": 1, "T": 2, "V": 8200, "H": 16, "peak": 4.0})
    with pretended():
        bench = Bench.of(fam, case, "cuda")
        for order in (1, -1):  # whichever block comes last
            honest = kernel(order)
            found = confirmed(bench, honest, execute(honest, bench.inputs))
            assert all(j.agrees for j in found.values()), {n: j.gates for n, j in found.items()}
        wrong = kernel(factor=0.9)
        assert not confirmed(bench, wrong, execute(wrong, bench.inputs))["grad_hidden"].agrees
