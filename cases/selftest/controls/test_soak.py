"""The soak: no control is called wrong on many drawn cases."""

import pytest

from cases.selftest.controls.correct import CONTROLS
from cases.selftest.controls.soak import drawn, rows, soak
from cases.selftest.slow import HOURS, number


@pytest.mark.slow
@pytest.mark.timeout(HOURS)
@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_no_control_is_called_wrong(name, device, record_property):
    cases = list(drawn(name, number("CASES", 600), number("SEED", 0)))
    found = soak(cases, device=device)
    record_property("false alarms", rows(found))
    assert found.alarms == []
    assert found.total > 0.7 * len(cases) * len(CONTROLS[name]), found.silent.most_common(10)
