"""What a run comes to."""

import pytest

from parity.results.row import Row
from parity.running.outcome import NEW, NOTHING, judge_run
from parity.running.plan import Options


@pytest.mark.parametrize(("known", "code"), [(None, NEW), ("entry", NOTHING)])
def test_what_is_required_is_excused_by_a_new_crash_alone(known, code):
    row = {"family": "logprobs", "implementation": "trl.ChunkedLogProbFunction", "dtype": "fp32", "device": "cpu"}
    rows = [Row(**row, case=f"c{n}", verdict="agree", quantity="logps", settings={"V": 3}) for n in range(5)]
    rows.append(Row(**row, case="c9", verdict="crashed", known=known, settings={"V": 3}))
    options = Options(require=("trl.ChunkedLogProbFunction:cpu",))
    assert judge_run(options, rows, [], [], "cpu")[0] == code
