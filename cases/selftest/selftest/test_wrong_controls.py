"""Each wrong implementation is caught within a few dozen drawn cases, whatever the seed; its honest twin is not."""

import pytest

from parity.compare.one_case import skip_reason
from parity.judging.assess import confirmed
from parity.protocol.call import execute
from parity.registry import loss_family, oracle_of
from parity.selftest.controls.wrong import WRONG
from parity.selftest.false_alarms import drawn

CASES, LOGITS = 48, 4096
"""Of the first so many cases those with so few logits: a failure is judged with 480 replicas."""


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(WRONG))
def test_caught_within_a_few_dozen_cases(name, seed):
    wrong = WRONG[name]
    tried = 0
    for case in drawn(wrong.implementation.family, CASES, 100 + seed, wrong.dtypes):
        s = loss_family(case.family).full_settings(case)
        if s.B * s.T * s.V > LOGITS:
            continue
        oracle = oracle_of(case).offered(wrong.implementation)
        if skip_reason(oracle.family, wrong.implementation, case, oracle.inputs.settings, "cpu"):
            continue
        tried += 1
        outcome = execute(wrong.implementation, oracle.inputs)
        if outcome.verdict != "ran" or all(j.agrees for j in confirmed(oracle, wrong.implementation, outcome).values()):
            continue
        honest = confirmed(oracle, wrong.base, execute(wrong.base, oracle.inputs))
        assert all(j.agrees for j in honest.values()), "the edit is what disagrees"
        return
    pytest.fail(f"not caught in {tried} cases")
