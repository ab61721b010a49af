"""Cases are moved to where an implementation does not refuse them, and nowhere else."""

import pytest

from parity.case.case import Case
from parity.registry import run_case, select
from parity.running.accepting import Accepting, refused

MANY = {
    "beta": 0.5,
    "softcap": 5.0,
    "bias": "random",
    "temperature": 0.7,
    "layouts": "mixed",
    "ignored": "some",
    "peak": 4.0,
}


def accepting(name):
    made = Accepting(select([name])[0], "cpu")
    asked = []
    made.announce = lambda case: not asked.append(case)
    return made, asked


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("liger.fused_linear_kl_div", {"temperature", "layouts", "ignored", "peak"}),
        ("trl.generalized_jsd_loss", {"beta", "temperature", "bias", "layouts", "ignored", "peak", "softcap"}),
    ],
)
def test_what_is_refused_alone_goes_back_and_the_rest_stays(name, kept):
    made, _ = accepting(name)
    case = Case("divergence", 3, "fp32", MANY)
    moved = made.moved(case)
    found = moved or case
    assert {k for k, v in found.settings.items() if MANY.get(k) == v} == kept
    rows = list(run_case(found, [made.implementation], thorough=False))
    assert rows and not refused(rows)
    assert moved is not None or kept == MANY.keys()


def test_it_is_asked_once_a_value_whatever_the_cases_are():
    made, asked = accepting("trl.gold_jsd_loss")
    first = made.moved(Case("divergence", 3, "fp32", {"temperature": 0.7, "sparse": "topk", "beta": 0.0, "k": 2}))
    count = len(asked)
    assert (
        made.moved(Case("divergence", 4, "bf16", {"temperature": 0.9, "sparse": "topk", "beta": 0.0, "k": 2}))
        is not None
    )
    assert first is not None and len(asked) == count


def test_an_implementation_that_is_not_there_gets_nothing():
    made, asked = accepting("unsloth.distillation_chunked_jsd")
    if made.implementation.missing() is None:
        pytest.skip("Unsloth is installed")
    assert made.moved(Case("divergence", 3, "fp32", MANY)) is None and not asked


def test_a_case_that_killed_the_process_is_not_asked_again():
    made, _ = accepting("liger.fused_linear_kl_div")
    made.announce = lambda case: False
    assert made.base is None and made.moved(Case("divergence", 3, "fp32", MANY)) is None


def test_a_dtype_that_is_refused_is_another():
    made, _ = accepting("cce.unfiltered")  # its backward refuses float32
    moved = made.moved(Case("logprobs", 3, "bf16", {"softcap": 5.0, "V": 33}))
    assert moved is not None and moved.settings == {"softcap": 5.0, "V": 33}
    assert moved.dtype == ("fp16" if made._skipped(Case("logprobs", 3, "bf16")) else "bf16")
