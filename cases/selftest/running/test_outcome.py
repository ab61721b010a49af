"""What a run comes to."""

import pytest

from cases.selftest.results.runs import ledger_of, row
from parity import data
from parity.errors import AGREE, NEW, NOTHING, STALE
from parity.running.outcome import judge_run
from parity.running.plan import Options


@pytest.mark.parametrize(("known", "code"), [(None, NEW), ("entry", NOTHING)])
def test_what_is_required_is_excused_by_a_new_crash_alone(known, code):
    rows = [row(f"c{n}", family="logprobs") for n in range(5)]
    rows.append(row("c9", None, "crashed", family="logprobs", known=known))
    options = Options(require=("lib.loss:cpu",))
    assert judge_run(options, rows, [], "cpu")[0] == code


@pytest.mark.parametrize(
    ("name", "code"),
    [("trl.selective_log_softmax", AGREE), ("trl.selective_log_softmix", STALE), ("mine.py:loss", AGREE)],
)
def test_an_entry_whose_implementation_is_not_there_is_stale(tmp_path, name, code):
    case = str(data.cases_dir() / "regressions" / "one-token.json")
    path = ledger_of(tmp_path / "ledger.toml", {"implementations": [name], "case": case})
    found, reasons = judge_run(Options(ledger=path), [row("c", family="logprobs")], [], "cpu")
    assert found == code
    said = [f"ledger entry one: there is no implementation {name}: {path} line 3"]
    assert reasons == (said if code == STALE else [])
