"""The recipe of Unsloth's distillation loss, on its arithmetic written in plain torch: unsloth-zoo is not installed here."""

import pytest
import torch

from parity.families import family
from parity.families.logprobs import IGNORE_INDEX
from parity.implementations import Implementation
from parity.implementations.unsloth import _jsd_chunks
from parity.run import run_case

BOTH_HEADS_NARROW = {"B": 3, "T": 8, "V": 256, "H": 64, "teacher_H": 100, "teacher_peak": 4.0, "beta": 0.75}
STUDENT_IN_FP32 = BOTH_HEADS_NARROW | {"head_dtype": "fp32"}


def jsd(x, student=None):
    """beta·KL(q‖M) + (1 - beta)·KL(p‖M) as unsloth_zoo.rl_replacements has it; `student`: a narrower dtype of its logits."""
    beta, labelled = x.settings.beta, (x.ids != IGNORE_INDEX).flatten()
    z = x.hidden.to(x.weight.dtype) @ x.weight.T
    p = (z if student is None else z.to(student)).float().flatten(0, 1).log_softmax(-1)
    q = (x.teacher_hidden @ x.teacher_weight.T).float().flatten(0, 1).log_softmax(-1)
    beta = torch.tensor(beta)
    m = torch.logsumexp(torch.stack([p + torch.log1p(-beta), q + torch.log(beta)]), 0)
    kl = [torch.nn.functional.kl_div(m, one, reduction="none", log_target=True) for one in (q, p)]
    return {"loss": ((beta * kl[0] + (1 - beta) * kl[1]).sum(-1) * labelled).sum() / labelled.sum()}


def disagreeing(settings, dtype, **how):
    party = Implementation("lib.jsd", "divergence", "candidate", lambda x: jsd(x, **how), recipe=_jsd_chunks)
    rows = run_case(family("divergence").case(7, dtype, settings), [party], thorough=False)
    return {row["quantity"] for row in rows if row["verdict"] != "agree"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("settings", [BOTH_HEADS_NARROW, STUDENT_IN_FP32], ids=["both narrow", "student in fp32"])
def test_the_teachers_logits_round_to_the_dtype_of_its_own_head(settings, dtype):
    assert disagreeing(settings, dtype) == set()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_students_do_not(dtype):
    """Under a float32 head the student's logits are float32, and narrower ones are an error that the gates see.

    Where the teacher's logits are large, their rounding hides that of the student's: here they are small.
    """
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    settings = STUDENT_IN_FP32 | {"peak": 4.0, "teacher_peak": 0.05}
    assert disagreeing(settings, name) == set()
    assert "grad_weight" in disagreeing(settings, name, student=dtype)
