"""What moved between two sets of rows; without an environment."""

import dataclasses
from types import SimpleNamespace

import pytest

from cases.selftest.results import runs
from parity.case.case import Case
from parity.sampling.find import find
from parity.versions import compare, row_diff
from parity.versions.look import Look

CASE = Case("policy", 1, "fp32", {})


def row(**changed):
    same = {"quantity": "loss", "verdict": "agree", "headroom": 0.6, "value": 1.0, "value_oracle": 1.0, "dist": 0.0}
    return runs.row(CASE.id, **same | {"implementation": "i", "gate": "scalar"} | changed)


def differences(before, after):
    names = [("named", CASE)]
    return row_diff.differences(row_diff.side(before, names), row_diff.side(after, names))


WRONG = {"verdict": "disagree", "headroom": 9.0, "value": 2.0, "dist": 1.0}
WHOLE = {"quantity": None, "value": None, "headroom": None, "value_oracle": None, "dist": None, "gate": None}


@pytest.mark.parametrize(
    ("before", "after", "mark", "nearer"),
    [
        ({}, WRONG, "+", "before"),
        (WRONG, {}, "-", "after"),
        (WRONG, WRONG | {"headroom": 90.0, "value": 9.0, "dist": 8.0}, "+", "before"),
        (WRONG, WRONG | {"headroom": 99.0, "value": 1.5, "dist": 0.5}, "-", "after"),  # what is allowed was drawn anew
        (WRONG | {"value": 1.5}, WRONG | {"value": 1.5, "dist": 1.5, "headroom": 2.0}, "+", "before"),
        (WRONG | {"dist": None}, WRONG | {"headroom": 90.0, "value": 9.0, "dist": None}, "+", ""),
        ({}, {"value": 1.01, "dist": 0.01}, "~", "before"),
        ({"headroom": 0.25}, {"value": 1.0 + 1e-9, "dist": 0.01}, "~", "before"),
        ({}, WHOLE | {"verdict": "refused"}, "~", ""),
        ({}, WHOLE | {"verdict": "unsupported"}, "~", ""),
        ({}, WHOLE | {"verdict": "crashed"}, "+", ""),
        (WHOLE | {"verdict": "crashed"}, {}, "-", ""),
        (WHOLE | {"verdict": "refused"}, WRONG, "+", ""),
        (WRONG, WHOLE | {"verdict": "refused"}, "-", ""),
    ],
)
def test_what_moved_is_marked_and_held_against_the_definition(before, after, mark, nearer):
    found = differences([row(**before)], [row(**after)])
    assert [(m.case, m.mark, m.nearer) for m in found] == [("named", mark, nearer)]
    assert "named" in row_diff.table(found)


def test_a_case_that_one_side_does_not_take_is_shown_with_the_reason():
    """The table said "unsupported" alone."""
    lines = row_diff.table(differences([row()], [row(**WHOLE, verdict="unsupported", message="has no\ntop_k")]))
    assert "  agree   unsupported: has no top_k" in lines


def test_a_change_that_many_cases_show_is_told_once():
    """Where a path was removed between two releases 235 of 241 lines said so."""
    moved = differences([row()], [row(**WRONG)])
    moved += differences(
        [row(implementation="o")], [row(**WHOLE, implementation="o", verdict="unsupported", message="no")]
    )
    found = [*moved, *(dataclasses.replace(m, case=f"{m.case}-2") for m in moved)]
    heads, one, two = row_diff.table(found).splitlines()
    assert heads.endswith("nearer  more cases") and one.endswith("before  1") and two.split()[-1] == "1"
    assert len(row_diff.table(found, each=True).splitlines()) == 5
    assert len(row_diff.table([*found, dataclasses.replace(moved[0], implementation="p")]).splitlines()) == 4


def test_what_did_not_move_is_left_out():
    assert differences([row()], [row(value=1.0 + 1e-9)]) == []
    assert differences([row(headroom=0.1)], [row(headroom=0.0, value=1.01)]) == [], "rounding in another order"
    assert differences([row(headroom=0.4)], [row(headroom=0.7)]) == [], "less than twice as large"
    last_bit = {"headroom": 30.0, "value": 2.0 + 1e-7, "dist": 1.0 + 1e-8}
    assert differences([row(**WRONG)], [row(**WRONG | last_bit)]) == [], "the same but for rounding, less allowed"
    assert differences([row(**WHOLE, verdict="refused")], [row(**WHOLE, verdict="refused")]) == []


def test_compare_runs_every_trainer_once_and_a_named_implementation_only_its_own_cases():
    wanted = compare.implementations(())
    assert "grpo-trainer.released" in wanted and not any(one.endswith("-trainer.fixed") for one in wanted)
    twins = {name: case for name, case in compare.cases(wanted) if case.settings.get("check") == "twins"}
    assert {case.family for case in twins.values()} >= {"grpo-trainer", "sft-trainer", "dpo-trainer", "kto-trainer"}
    name, case = next(iter(twins.items()))
    assert find(name) == (case, f"{case.family}.released"), "what the table names can be replayed"
    assert {case.family for _, case in compare.cases(["trl.GRPOTrainer"])} == {"policy"}
    assert {case.family for _, case in compare.cases(compare.implementations(()), ["divergence"])} == {"divergence"}


def test_a_comparison_shows_what_moved_and_which_defaults_did(monkeypatch):
    looks = [
        Look([row(headroom=0.1, value=v)], {name: {"beta": 0.0, "top_k": k} for name in ("GRPOConfig", other)})
        for v, k, other in ((1.0, None, "GMPOConfig"), (2.0, 0, "RLOOConfig"))
    ]
    sides = [SimpleNamespace(partners="torch", versions={"trl": version}) for version in "12"]
    monkeypatch.setattr(compare, "Environment", SimpleNamespace(of=lambda specs: sides[specs == ["trl==2"]]))
    monkeypatch.setattr(compare, "cases", lambda *_: [("named", CASE)])
    monkeypatch.setattr(compare, "look", lambda made, **_: looks[made is not sides[0]])
    plain = compare.compare((["trl==1"], ["trl==2"])).text()
    assert "0 worse (+), 0 better (-), 0 otherwise moved (~)" in plain
    assert "GRPOConfig, defaults changed: top_k None -> 0" in plain
    assert "config classes gone: GMPOConfig\nconfig classes new: RLOOConfig" in plain
    assert "which release" not in plain
    looks[1] = Look([row(**WRONG)], {})
    own = compare.compare((["trl==1"], ["trl==2"]), asked=[("your settings", CASE)])
    assert own.moved and "which release" not in own.text(), "no command finds a case by that name"
    found = compare.compare((["trl==1"], ["trl==2"]))
    line = "which release: parity bisect trl --good 1 --bad 2 --case named --implementation i --quantity loss"
    assert found.text().splitlines()[-1] == line
    assert found.exit_code == 1 and found.judged == (1, 1)
    (moved,) = found.moved
    assert (moved.case, moved.mark, moved.before.verdict, moved.after.verdict) == ("named", "+", "agree", "disagree")
    looks[1] = Look([], {})
    with pytest.raises(compare.EnvironmentUnusable, match="1 and 0 judged quantities"):
        compare.compare((["trl==1"], ["trl==2"]))


def test_two_values_that_read_alike_have_their_errors_beside_them():
    """A gradient may be another one of the same norm."""
    found = differences([row(dist=1e-9, headroom=0.6)], [row(dist=3e-6, headroom=60.0, verdict="disagree")])
    assert "1!" in row_diff.table(found) and "off" not in row_diff.table(found)
    found = differences([row(dist=1e-9, headroom=0.01)], [row(dist=3e-6, headroom=0.9)])
    assert "1, 1e-09 off  1, 3e-06 off" in row_diff.table(found)
