"""Real vocabularies, more than 2³¹ logits, and the spin lock of cut-cross-entropy's backward, 200 times over."""

import pytest
import torch

from cases.selftest.oracles import new
from fixtures.large import embedded
from parity.implementations.implementation import Implementation
from parity.registry import family, load, run_case, select
from parity.results.report.render import text_of
from parity.sampling.capabilities import HIDDEN, VOCABULARIES

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILY = family("logprobs")


def ours() -> list[Implementation]:
    return [i for i in select(()) if i.family == "logprobs" and not i.missing()]


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_real_vocabularies(size, dtype):
    case = FAMILY.case(1, dtype, {"B": 1, "T": 4, "V": size, "H": HIDDEN})
    rows = list(run_case(case, ours(), "cuda", thorough=False))
    assert any(r.judged for r in rows) and not new(rows, case), text_of(rows)


SIZE = 131_073
ROWS = 2**31 // SIZE + 64


@pytest.mark.parametrize("id", [i.id for i in ours()])
def test_beyond_2_31_logits(id):
    case = FAMILY.case(2, "bf16", {"B": 1, "T": 4, "V": SIZE, "H": 16})
    one = embedded(load()[id], ROWS)
    rows = list(run_case(case, [one], "cuda", thorough=False))
    assert not [r for r in new(rows, case) if r.verdict != "out-of-memory"], text_of(rows)
    if not any(r.judged for r in rows):
        pytest.skip("; ".join({f"{r.verdict}: {r.message}" for r in rows}))


DEVICE, TOKENS, TURNS = "cuda", 512, 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [8_192, 131_072])
def test_the_spin_lock_200_times(size):
    """Blocks of tokens and of the vocabulary add to float16 memory under locks. Every logit is 0 here and every partial sum a
    multiple of 2⁻⁵ that float16 holds, so in any order of additions the gradients are exact, and a lost one shows in them.
    """
    hidden, weight = (torch.zeros(n, 16, dtype=torch.float16, device=DEVICE) for n in (TOKENS, size))
    hidden[:, 1], weight[:, 0] = 1.0, 1.0  # the softmax is 1/size
    right = torch.zeros_like(weight)
    right[:, 1], right[0, 1] = -TOKENS / 4096, TOKENS * torch.tensor((size - 1) / 4096, dtype=torch.float16)
    x = FAMILY.build(FAMILY.case(3, "fp16", {"B": 1, "T": TOKENS, "V": size, "H": 16}))
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=DEVICE)
    one = load()["cce.unfiltered"]
    for turn in range(TURNS):
        h, w = hidden.clone().unsqueeze(0).requires_grad_(), weight.clone().requires_grad_()
        with one.around():
            one.call(x.replace(hidden=h, weight=w, ids=ids))["logps"].backward(torch.full_like(h[..., 0], size / 4096))
        lost = int((h.grad != 0).any(-1).sum()), int((w.grad != right).any(-1).sum())
        assert lost == (0, 0), f"turn {turn}: {lost[0]} tokens and {lost[1]} rows of the head miss an addition"
