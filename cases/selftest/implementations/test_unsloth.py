"""The adapter of Unsloth's distillation loss and its recipe, on the loss written in plain torch: it is not installed here."""

import sys
import types

import pytest
import torch

from parity.families.head import IGNORE_INDEX
from parity.implementations.implementation import Implementation
from parity.implementations.unsloth import _jsd_chunks, distillation_chunked_jsd
from parity.registry import family, run_case

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
    return {row.quantity for row in rows if row.verdict != "agree"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("settings", [BOTH_HEADS_NARROW, STUDENT_IN_FP32], ids=["both narrow", "student in fp32"])
def test_the_teachers_logits_round_to_the_dtype_of_its_own_head(settings, dtype):
    assert disagreeing(settings, dtype) == set()


def test_the_students_do_not():
    """Under a float32 head the student's logits are float32, and narrower ones are an error that the gates see.

    Where the teacher's logits are large, their rounding hides that of the student's: here they are small.
    """
    settings = STUDENT_IN_FP32 | {"peak": 4.0, "teacher_peak": 0.05}
    assert disagreeing(settings, "fp16") == set()
    assert "grad_weight" in disagreeing(settings, "fp16", student=torch.float16)


def asked(monkeypatch, function, **settings):
    """The inputs of a float16 case and what the adapter hands to `function`, the released one's stand-in."""
    module = types.ModuleType("unsloth_zoo.rl_replacements")
    module.distillation_chunked_jsd = function
    monkeypatch.setitem(sys.modules, "unsloth_zoo", types.ModuleType("unsloth_zoo"))
    monkeypatch.setitem(sys.modules, "unsloth_zoo.rl_replacements", module)
    sys.modules["unsloth_zoo"].rl_replacements = module
    fam = family("divergence")
    x = fam.build(fam.case(7, "fp16", settings))
    return x, distillation_chunked_jsd(x)["loss"]


def released(*tensors, scaler=None, **options):
    return [scaler]


def test_a_scaled_upstream_gradient_comes_with_its_scaler(monkeypatch):
    """The loss takes its gradients in float16 before it sees the upstream gradient: the scale is what it asks for."""
    x, scaler = asked(monkeypatch, released, cotangent="scaled")
    scale, upstream = scaler.get_scale(), abs(float(x.cotangents["loss"]))
    assert upstream / 2 < scale <= upstream
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5, "a power of two, so that scaling rounds nothing"


def older(*tensors, beta, chunk_size, **options):
    return ["scaler" in options or None]


@pytest.mark.parametrize(
    ("function", "cotangent"), [(released, "ones"), (released, "random"), (released, "zero"), (older, "scaled")]
)
def test_no_scaler_where_no_loss_is_scaled_or_the_release_takes_none(monkeypatch, function, cotangent):
    assert asked(monkeypatch, function, cotangent=cotangent)[1] is None
