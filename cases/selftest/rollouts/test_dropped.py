"""The dropped ratio on real rollouts: two orders of magnitude in the gradient norm."""

from parity import recording
from parity.case.drawing import cases, draws
from parity.families import policy_inputs
from parity.registry import loss_family
from parity.rollouts.dropped import dropped


def test_the_first_failure_is_replayed():
    token, sequence = dropped(recording.named("gemma2-bf16-t0.7-p0.8"))
    assert token.without / token.with_ratio < 1.5
    assert sequence.ratios[1] < 0.02 and sequence.without / sequence.with_ratio > 100, sequence.line()


def test_without_truncated_sampling_there_is_little_to_drop():
    for found in dropped(recording.named("llama-fp32-t1-p1")):
        assert abs(found.without / found.with_ratio - 1) < 1e-3


def test_drawn_policy_cases_take_recordings():
    family = loss_family("policy")
    drawn = list(draws(cases(family, ("fp32", "bf16"), "nightly"), "recordings", 60))
    named = [c for c in drawn if c.settings.get("recording", "none") != "none"]
    assert 3 <= len(named) < 40
    inputs = family.build(named[0])
    assert inputs.importance_sampling_ratio is not None


def test_a_case_has_the_recorded_log_ratios():
    name = "gemma2-bf16-t1-p0.8"
    taken = recording.named(name)
    family = loss_family("policy")
    case = family.case(3, "fp32", {"ratio": "token", "recording": name, "B": 2, "T": 4})
    d = policy_inputs.recorded_log_ratios(case, family.full_settings(case)).flatten()
    recorded = (taken.trainer_logps.double() - taken.sampler_logps.double())[taken.mask]
    at = (recorded == d[0]).nonzero()[:, 0]
    assert any((recorded[i : i + 8] == d).all() for i in at)
    ratio = family.build(case).importance_sampling_ratio
    assert (ratio.flatten().double() - d.exp()).abs().max() < 1e-6
