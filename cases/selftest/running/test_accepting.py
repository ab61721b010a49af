"""Cases are moved to where an implementation does not refuse them, and nowhere else."""

import dataclasses
import itertools

import pytest

from parity.case.case import Case
from parity.implementations.implementation import require
from parity.registry import run_case, select
from parity.running.accepting import Accepting, Draws, refused

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
    moved = made.without_refused(case)
    found = moved or case
    assert {k for k, v in found.settings.items() if MANY.get(k) == v} == kept
    rows = list(run_case(found, [made.implementation], thorough=False))
    assert rows and not refused(rows)
    assert moved is not None or kept == MANY.keys()


def test_it_is_asked_once_a_value_whatever_the_cases_are():
    made, asked = accepting("trl.gold_jsd_loss")
    first = made.without_refused(
        Case("divergence", 3, "fp32", {"temperature": 0.7, "sparse": "topk", "beta": 0.0, "k": 2})
    )
    count = len(asked)
    second = made.without_refused(
        Case("divergence", 4, "bf16", {"temperature": 0.9, "sparse": "topk", "beta": 0.0, "k": 2})
    )
    assert first is not None and second is not None
    assert [case.id for case in asked[count:]] == [second.id]  # whether it takes what the case is moved to


@pytest.mark.parametrize(
    ("settings", "kept"),
    [  # a window of its own is taken alone, and beside vespo it is not
        ({"loss_type": "vespo", "steps_per_generation": 4}, {"loss_type"}),
        ({"loss_type": "vespo", "mode": "eval", "beta": 0.5}, {"loss_type", "beta"}),
        ({"loss_type": "dapo", "mode": "eval", "softcap": 5.0, "holes": True}, {"loss_type", "holes"}),
        # taken beside dapo alone
        (
            {"loss_type": "dapo", "accumulation": 4, "steps_per_generation": 4, "softcap": 5.0},
            {"loss_type", "accumulation", "steps_per_generation"},
        ),
        # either of two would have to go with it: the loss type alone is fewer
        ({"loss_type": "vespo", "mode": "eval", "steps_per_generation": 4}, {"mode", "steps_per_generation"}),
    ],
)
def test_what_is_refused_only_together_goes_back_too_and_no_more_than_that(settings, kept):
    made, _ = accepting("liger.FusedLinearGRPOLoss")
    case = Case("policy", 3, "fp32", settings)
    moved = made.without_refused(case) or case
    assert {k for k, v in moved.settings.items() if settings.get(k) == v} == kept
    rows = list(run_case(moved, [made.implementation], thorough=False))
    assert rows and not refused(rows)


def test_an_implementation_that_is_not_there_gets_nothing():
    made, asked = accepting("unsloth.distillation_chunked_jsd")
    if made.implementation.missing() is None:
        pytest.skip("Unsloth is installed")
    assert made.without_refused(Case("divergence", 3, "fp32", MANY)) is None and not asked


def test_a_case_that_killed_the_process_is_not_asked_again():
    made, _ = accepting("liger.fused_linear_kl_div")
    made.announce = lambda case: False
    assert made.base is None and made.without_refused(Case("divergence", 3, "fp32", MANY)) is None


def test_a_dtype_that_is_refused_is_another():
    made, _ = accepting("cce.unfiltered")  # its backward refuses float32
    moved = made.without_refused(Case("logprobs", 3, "bf16", {"softcap": 5.0, "V": 33}))
    assert moved is not None and moved.settings == {"softcap": 5.0, "V": 33}
    assert moved.dtype == ("fp16" if made.skipped(Case("logprobs", 3, "bf16")) else "bf16")


def test_every_pair_that_is_taken_meets_though_the_kernel_refuses_the_rest_of_the_case():
    """All cases cap the logits, which the kernel refuses: it meets the other settings in those that are moved, no more than
    bring two together, and which these are does not depend on where a worker begins."""
    made, _ = accepting("liger.LigerFusedLinearJSDLoss")
    each = {"temperature": 0.7, "layouts": "mixed", "ignored": "some", "peak": 4.0}
    pairs = [*itertools.combinations(each, 2)]
    drawn = [
        Case("divergence", seed, "fp32", {"softcap": 5.0, **{name: each[name] for name in pair}})
        for seed, pair in enumerate(pairs * 8)
    ]
    draws = Draws(lambda: drawn, lambda case: True, 1)
    dealt = [case for case in reversed(drawn) if made.deals(case, draws)]
    assert {frozenset(made.without_refused(case).settings) for case in dealt} >= {frozenset(pair) for pair in pairs}
    assert len(pairs) <= len(dealt) <= len(pairs) + len(drawn) // 3
    assert dealt[::-1] == [case for case in drawn if accepting("liger.LigerFusedLinearJSDLoss")[0].deals(case, draws)]


def test_a_kernel_that_gets_a_share_gets_what_brings_settings_together_beside_it():
    made, _ = accepting("liger.fused_linear_kl_div")
    share, again, other = (
        Case("divergence", seed, "fp32", settings)
        for seed, settings in enumerate(
            (
                {"temperature": 0.7, "peak": 4.0},
                {"temperature": 0.7, "softcap": 5.0},
                {"temperature": 0.7, "ignored": "some"},
            )
        )
    )
    every = [other, again, share]
    draws = Draws(lambda: every, lambda case: case is share, 1)
    assert [case for case in every if made.wants(case, draws)] == [other]
    assert not any(made.wants(case, dataclasses.replace(draws, cost=4)) for case in every)
    cheap, _ = accepting("liger.LigerFusedLinearJSDLoss")
    assert not any(cheap.wants(case, draws) for case in every)


def test_of_large_cases_more_are_moved():
    made, _ = accepting("liger.LigerFusedLinearJSDLoss")
    draws = Draws(list, lambda case: True, 1)
    shares = [
        sum(made.deals(Case("divergence", seed, "fp32", {"softcap": 5.0, **size}), draws) for seed in range(400))
        for size in ({"V": 40}, {"V": 8193, "T": 2}, {"V": 4, "B": 1, "T": 300})
    ]
    assert shares[0] < 400 // 6 and all(150 < share < 250 for share in shares[1:])


def test_an_early_release_that_refuses_the_defaults_starts_from_another_base():
    """TRL 0.15 reads reference log-probs at any beta, and no old ones."""
    made, _ = accepting("trl.GRPOTrainer")
    call = made.implementation.call

    def early(x):
        require(x.ref_logps is not None and x.old_logps is None, "not in this version")
        return call(x)

    object.__setattr__(made.implementation, "call", early)
    try:
        assert made.base == {"old": "absent", "beta": 0.04}
    finally:
        object.__setattr__(made.implementation, "call", call)
