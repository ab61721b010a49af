"""What a run comes to."""

import pytest

from parity import data
from parity.results.row import Row
from parity.running.outcome import AGREE, NEW, NOTHING, STALE, judge_run
from parity.running.plan import Options


@pytest.mark.parametrize(("known", "code"), [(None, NEW), ("entry", NOTHING)])
def test_what_is_required_is_excused_by_a_new_crash_alone(known, code):
    row = {"family": "logprobs", "implementation": "trl.ChunkedLogProbFunction", "dtype": "fp32", "device": "cpu"}
    rows = [Row(**row, case=f"c{n}", verdict="agree", quantity="logps", settings={"V": 3}) for n in range(5)]
    rows.append(Row(**row, case="c9", verdict="crashed", known=known, settings={"V": 3}))
    options = Options(require=("trl.ChunkedLogProbFunction:cpu",))
    assert judge_run(options, rows, [], [], "cpu")[0] == code


@pytest.mark.parametrize(
    ("name", "code"),
    [("trl.selective_log_softmax", AGREE), ("trl.selective_log_softmix", STALE), ("mine.py:loss", AGREE)],
)
def test_an_entry_whose_implementation_is_not_there_is_stale(tmp_path, name, code):
    path = tmp_path / "ledger.toml"
    case = data.cases_dir() / "regressions" / "one-token.json"
    fields = {
        "id": "one",
        "family": "logprobs",
        "reason": "it is",
        "date": "2026-11-22",
        "link": "here",
        "case": str(case),
    }
    lines = [f"{key} = {value!r}" for key, value in fields.items()]
    path.write_text("\n".join(["[[finding]]", *lines, f"implementations = [{name!r}]", 'quantities = ["logps"]']))
    row = {"family": "logprobs", "implementation": "fixes.selective_log_probs", "dtype": "fp32", "device": "cpu"}
    rows = [Row(**row, case="c", verdict="agree", quantity="logps", settings={"V": 3})]
    found, reasons = judge_run(Options(ledger=path), rows, [], [], "cpu")
    assert found == code
    said = [f"ledger entry one: there is no implementation {name}: {path} line 2"]
    assert reasons == (said if code == STALE else [])
