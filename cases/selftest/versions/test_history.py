"""Two records of the history, each on one release that had the failure and one that does not."""

import dataclasses
import json

import pytest
from msgspec.structs import replace

from cases.selftest.results import runs
from parity.case.case import Case
from parity.errors import AGREE, NEW, NOTHING, UsageError
from parity.versions import history, look
from parity.versions.bisect import Measurement
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment

BAD, GOOD = ("trl==0.28.0",), ("trl==0.29.0",)
CASE = Case.load(history.folder() / "is-ratio.json")


@pytest.fixture(scope="module")
def findings():
    try:
        for specs in (BAD, GOOD):
            Environment.of(specs)
    except EnvironmentUnusable as error:
        pytest.skip(f"environments cannot be made here: {error}")
    records = [replace(r, bad=("0.28.0",), good=("0.29.0",)) for r in history.load(["is-ratio", "tool-mask"])]
    return history.recheck(records, print)


def test_red_on_the_release_that_had_it_and_green_on_the_next(findings):
    told = {(f.record.id, f.specs): f.answer.verdict for f in findings}
    sides = {BAD: "disagree", GOOD: "agree"}
    assert told == {(id, side): verdict for id in ("is-ratio", "tool-mask") for side, verdict in sides.items()}
    assert history.exit_code(findings) == AGREE
    assert history.table(findings).endswith("2 of 2 records recalled")


def test_the_dropped_ratio_is_told_with_its_size(findings):
    dropped = next(f for f in findings if f.record.id == "is-ratio" and f.bad)
    assert "instead of" in dropped.answer.message and dropped.answer.headroom > 1000
    assert "| >1000 |" in history.table(findings)


def test_a_release_that_answers_otherwise_is_not_recalled(findings):
    turned = [dataclasses.replace(f, as_recorded=not f.as_recorded) for f in findings]
    assert history.exit_code(turned) == NEW
    assert history.table(turned).endswith("0 of 2 records recalled")


def test_an_environment_that_was_not_run_is_not_green(findings):
    missing = [dataclasses.replace(f, as_recorded=None, answer=Measurement("not run")) for f in findings]
    assert history.exit_code(missing) == NOTHING
    assert "(not run)" in history.table(missing)


def write(folder, **changed):
    (folder / "history").mkdir(exist_ok=True)
    (folder / "history" / "x.json").write_text(json.dumps({"case": CASE.to_json()}))
    fields = {"what": "w", "package": "trl", "bad": ["1"], "good": ["2"], "case": "x.json", "implementation": "a.b"}
    lines = [f"{k} = {json.dumps(v)}" for k, v in (fields | changed).items()]
    (folder / "history" / "x.toml").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bad": []}, "Expected `array` of length >= 1"),
        ({"expect": "wrong"}, "Invalid enum value 'wrong'"),
        ({"colour": "red"}, "Object contains unknown field `colour`"),
        ({"case": "y.json"}, "no such case file"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(tmp_path, monkeypatch, changed, message):
    monkeypatch.setattr(history.data, "cases_dir", lambda: tmp_path)
    write(tmp_path, **changed)
    with pytest.raises(UsageError, match=message):
        history.load()


def row(**changed):
    return runs.row(**{"headroom": 0.6, "value": 1.0, "value_oracle": 1.0, "dist": 0.0} | changed)


def test_a_check_reads_only_its_own_rows():
    case = history.load(["is-ratio"])[0].check.case
    check = look.CaseCheck("x", case, "i", ("grad_*",))
    own = {"case": case.id, "implementation": "i"}
    rows = [row(**own, verdict="disagree"), row(**own, quantity="grad_weight", headroom=0.2)]
    assert (check.answer(rows).verdict, check.answer(rows).headroom) == ("agree", 0.2)
    rows.append(row(**own, quantity="grad_hidden", verdict="disagree", headroom=None))
    assert (check.answer(rows).verdict, check.answer(rows).headroom) == ("disagree", None)
    crash = [row(**own, quantity=None, verdict="crashed", message="no")]
    assert check.judged(crash).verdict == "crashed", "no judgement, unless the crash is what is looked for"
    assert dataclasses.replace(check, failure="crashed").judged(crash).verdict == "disagree"
    refused = [row(**own, quantity=None, verdict="refused", message="no")]
    assert (check.answer(refused).verdict, check.answer(refused).message) == ("refused", "no")
    assert check.answer([]).verdict == "unsupported"
