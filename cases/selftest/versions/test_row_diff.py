"""What moved between two sets of rows, and the matrix's cells; without an environment."""

import dataclasses

import pytest
from msgspec.structs import replace
from rich.console import Console

from parity.case.case import Case
from parity.decoding import save_json, saved
from parity.families.policy_settings import LOSS_TYPES
from parity.registry import NAMES
from parity.results.row import Row
from parity.running.find import find
from parity.versions.commands import compare, history, matrix, matrix_page, row_diff
from parity.versions.commands.probe import Look
from parity.versions.search.bisect import Measurement
from parity.versions.search.boundaries import Boundary, Search, advance, ends, exit_code

CASE = Case("policy", 1, "fp32", {})
WHERE = {"family": "policy", "device": "cpu"}


def row(**changed):
    base = {"case": CASE.id, "implementation": "i", "quantity": "loss", "verdict": "agree", "headroom": 0.6}
    numbers = {"value": 1.0, "value_oracle": 1.0, "dist": 0.0, "dtype": "fp32", "gate": "scalar", "message": ""}
    return Row(**WHERE | base | numbers | changed)


def differences(before, after, **options):
    names = [("named", CASE)]
    return row_diff.differences(row_diff.side(before, names), row_diff.side(after, names), **options)


WRONG = {"verdict": "disagree", "headroom": 9.0, "value": 2.0, "dist": 1.0}
WHOLE = {"quantity": None, "value": None, "headroom": None, "value_oracle": None, "dist": None, "gate": None}


@pytest.mark.parametrize(
    ("before", "after", "mark", "nearer"),
    [
        ({}, WRONG, "+", "before"),
        (WRONG, {}, "-", "after"),
        (WRONG, WRONG | {"headroom": 90.0, "value": 9.0, "dist": 8.0}, "+", "before"),
        ({}, {"value": 1.01, "dist": 0.01}, "~", "before"),
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


def test_what_did_not_move_is_left_out():
    assert differences([row()], [row(value=1.0 + 1e-9)]) == []
    assert differences([row(headroom=0.1)], [row(headroom=0.0, value=1.01)]) == [], "rounding in another order"
    assert differences([row(**WHOLE, verdict="refused")], [row(**WHOLE, verdict="refused")]) == []


def test_under_settings_of_their_own_a_value_inside_its_gate_counts():
    found = differences([row(headroom=0.1)], [row(headroom=0.1, value=2.0, value_oracle=2.0)], settings_too=True)
    assert [m.mark for m in found] == ["~"]
    assert "1 -> 2" in row_diff.table(found)


def test_the_clearest_comes_first_and_is_what_a_search_follows(monkeypatch):
    quantities = {"loss": 9.0, "grad_weight": 900.0, "grad_hidden": 2.0}
    before = [row(quantity=q) for q in quantities]
    after = [row(quantity=q, **WRONG | {"headroom": h}) for q, h in quantities.items()]
    monkeypatch.setattr(compare, "Environment", type("E", (), {"of": staticmethod(lambda specs, hold: specs)}))
    monkeypatch.setattr(compare, "cases", lambda: [("named", CASE)])
    monkeypatch.setattr(compare, "both", lambda *_: [Look(before, {}), Look(after, {})])
    check = compare.first_difference("trl", "1.0.0", "1.1.0", (), (), "broken", "cpu")
    assert (check.name, check.quantities, check.failure) == ("named", ("grad_weight",), "disagree")
    with pytest.raises(compare.UsageError, match="nothing became right .* but 3 quantities broke"):
        compare.first_difference("trl", "1.0.0", "1.1.0", (), (), "fixed", "cpu")
    crashed = [row(**WHOLE, verdict="crashed")]
    monkeypatch.setattr(compare, "both", lambda *_: [Look(before, {}), Look(crashed, {})])
    check = compare.first_difference("trl", "1.0.0", "1.1.0", (), (), "broken", "cpu")
    assert (check.quantities, check.failure) == (("*",), "crashed"), (
        "a crash is then the failure, not a release to skip"
    )


def test_the_first_difference_survives_being_killed(tmp_path):
    check = compare.CaseCheck("named", CASE, "i", ("loss",), "crashed")
    save_json(tmp_path / "kept", check)
    assert saved(compare.CaseCheck, tmp_path / "kept") == check
    (tmp_path / "kept").write_text('{"name": "named"')
    assert saved(compare.CaseCheck, tmp_path / "kept") is None
    assert saved(compare.CaseCheck, tmp_path / "never") is None


def test_all_defaults_are_the_releases_own():
    policy = [(name, case) for name, case in compare.cases() if case.family == "policy"]
    one = compare._with_defaults(policy, {"loss_type": "bnpo", "beta": 0.04, "top_k": 50})
    settings = [case.settings for _, case in one]
    assert all((s["loss_type"], s["beta"]) == ("bnpo", 0.04) for s in settings)
    assert not any("delta" in s or "entropy_quantile" in s for s in settings), "what nobody set is at its default"
    assert len({case.id for _, case in one}) == len(one) < len(policy)


def record(bad, good):
    bad, good = ([(f"trl=={v.split()[0]}", *v.split()[1:]) for v in side] for side in (bad, good))
    return history.Record("r", "what", "trl", tuple(bad), tuple(good), compare.CaseCheck("r", CASE, "i"))


@pytest.mark.parametrize(
    ("bad", "good", "expected"),
    [
        (["0.28.0", "0.9.0 liger-kernel==0.6.5", "0.27.2"], ["0.29.1", "0.29.0"], [("fixed", "0.27.2", "0.29.1")]),
        (["1.10.0", "1.9.0"], ["1.2.0", "1.11.0"], [("broken", "1.2.0", "1.10.0"), ("fixed", "1.9.0", "1.11.0")]),
    ],
)
def test_a_record_is_searched_between_its_outermost_releases(bad, good, expected):
    assert [(e.find, e.older, e.newer) for e in ends(record(bad, good))] == expected


@pytest.mark.parametrize(
    ("low", "high", "right"),
    [("0.28.0", "0.29.0", True), ("0.28.1", "0.28.2", True), ("0.27.2", "0.28.0", False), ("0.29.0", "0.29.1", False)],
)
def test_a_boundary_is_as_recorded_when_it_lies_between_the_recorded_sides(low, high, right):
    one = record(["0.27.2", "0.28.0"], ["0.29.0", "0.29.1"])
    found = Boundary(one, ends(one)[0], "found", low, high, 4)
    assert found.as_recorded is right
    assert exit_code([found]) == (0 if right else 1)
    assert exit_code([dataclasses.replace(found, outcome="unjudged")]) == 3
    assert not dataclasses.replace(found, outcome="alike").as_recorded


def test_compare_runs_every_trainer_once_and_a_named_implementation_only_its_own_cases():
    twins = dict(compare.twins())
    assert {case.family for case in twins.values()} >= {"grpo-trainer", "sft-trainer", "dpo-trainer", "kto-trainer"}
    assert all(case.settings["check"] == "twins" for case in twins.values())
    name, case = next(iter(twins.items()))
    assert find(name) == (case, f"{case.family}.released"), "what the table names can be replayed"
    wanted = compare.implementations(())
    assert "grpo-trainer.released" in wanted and not any(one.endswith("-trainer.fixed") for one in wanted)
    assert compare.of(list(twins.items()), ["trl.GRPOTrainer"]) == []
    assert compare.of(list(twins.items()), wanted) == list(twins.items())


def test_a_trainers_loss_is_not_taken_for_its_gradient():
    case = next(iter(dict(compare.twins()).values()))
    check = compare.CaseCheck("r", case, f"{case.family}.released")
    one = history.Record("r", "what", "trl", ((("trl==1"),),), (), check)
    wrong = row(case=case.id, implementation=check.implementation, **WRONG)
    found = history._judged(one, ("trl==1",), True, [wrong])
    assert found.as_recorded and "loss 2 (definition 1)" in found.sentence and found.factor is None
    told = history._judged(one, ("trl==1",), True, [wrong, replace(wrong, quantity="grad_weight")])
    assert told.factor == 2.0


class Index:
    """Releases 1 to 9, each of which answers a record by a table; counts how often it is asked."""

    def __init__(self, right):
        self.right, self.asked = right, []

    def __call__(self, question, records):
        self.asked.append((question.version, question.repeat, tuple(r.id for r in records)))
        ways = [self.right[r.id](int(question.version)) for r in records]
        verdicts = ["unsupported" if way is None else "agree" if way else "disagree" for way in ways]
        return [Measurement(v, 0.1 if v == "agree" else 9.0, {"trl": question.version}) for v in verdicts]


def searches(tmp_path, *claims):
    out = []
    for name, bad, good in claims:
        one = dataclasses.replace(record(bad, good), id=name)
        for asked in ends(one):
            out.append(Search(one, asked, tmp_path / f"{name}-{asked.find}.json"))
            out[-1].candidates = [str(n) for n in range(int(asked.older), int(asked.newer) + 1)]
    return out


def test_records_are_searched_in_step_and_share_the_releases(tmp_path):
    index = Index({"a": lambda v: v >= 4, "b": lambda v: v >= 4, "c": lambda v: v < 3 or v >= 8, "d": lambda v: None})
    claims = [("a", "13", "69"), ("b", "13", "69"), ("c", "37", "289"), ("d", "1", "9")]
    found = advance(searches(tmp_path, *claims), index, lambda line: None)
    told = {(b.record.id, b.ends.find): (b.outcome, b.low, b.high) for b in found}
    assert told["a", "fixed"] == told["b", "fixed"] == ("found", "3", "4")
    assert told["c", "broken"] == ("found", "2", "3") and told["c", "fixed"] == ("found", "7", "8")
    assert told["d", "fixed"][0] == "unjudged"
    assert all(set("ab") <= set(ids) for _, _, ids in index.asked if "a" in ids or "b" in ids), "asked together"
    assert ("3", 1) in {asked[:2] for asked in index.asked} and ("4", 1) in {asked[:2] for asked in index.asked}
    asked = [(version, repeat, name) for version, repeat, ids in index.asked for name in ids if name != "c"]
    assert len(asked) == len(set(asked)), "nobody is asked the same twice"


def test_a_search_that_was_killed_asks_only_what_is_missing(tmp_path):
    claims = [("a", "13", "69"), ("b", "12", "9")]
    whole = Index({"a": lambda v: v >= 4, "b": lambda v: v >= 6})
    first = advance(searches(tmp_path / "whole", *claims), whole, lambda line: None)
    index = Index(whole.right)

    def dies(question, records):
        if len(index.asked) == 3:
            raise KeyboardInterrupt
        return index(question, records)

    with pytest.raises(KeyboardInterrupt):
        advance(searches(tmp_path, *claims), dies, lambda line: None)
    rest = Index(whole.right)
    again = advance(searches(tmp_path, *claims), rest, lambda line: None)
    assert [(b.low, b.high) for b in again] == [(b.low, b.high) for b in first]
    assert index.asked + rest.asked == whole.asked


def test_what_could_not_be_run_is_not_kept(tmp_path):
    (one,) = searches(tmp_path, ("a", "13", "69"))
    question = one.step()
    one.tell(question, Measurement("unsupported", message="no index"), keep=False)
    assert not one.path.exists()
    one.tell(question, Measurement("disagree", 9.0, {"trl": "1"}), keep=True)
    assert Search(one.record, one.ends, one.path).known == one.known


CELLS = [
    ([row(), row(quantity="grad_weight", headroom=0.2)], ("agree", 0.6, "loss")),
    ([row(), row(quantity="grad_weight", **WRONG)], ("disagree", 9.0, "grad_weight")),
    ([row(**WRONG), row(quantity="grad_weight", **WRONG | {"headroom": None})], ("disagree", None, "grad_weight")),
    ([row(**WHOLE | {"verdict": "refused", "message": "no"})], ("refused", None, "no")),
    ([row(), row(**WHOLE | {"verdict": "crashed", "message": "no"})], ("crashed", None, "no")),
    ([], ("unsupported", None, "not among the implementations there")),
]


@pytest.mark.parametrize(("rows", "expected"), CELLS)
def test_a_cell_shows_the_worst_of_its_cases(rows, expected):
    found = matrix.cell([*rows, row(implementation="other", **WRONG)], "i", [CASE])
    assert (found.verdict, found.headroom, found.worst) == expected


KNOWN = WRONG | {"known": "dapo-window"}


@pytest.mark.parametrize(
    ("rows", "printed", "code"),
    [
        ([row(), row(quantity="grad_weight", **KNOWN)], "9.00*", 0),
        ([row(**WHOLE | {"verdict": "crashed", "message": "no", "known": "head-dtype"}), row(**KNOWN)], "crashed*", 0),
        ([row(**KNOWN), row(quantity="grad_weight", **WRONG | {"headroom": 2.0})], "2.00", 1),
        ([row(verdict="nondeterministic")], "flaky", 1),
        ([row()], "0.60", 0),
    ],
)
def test_a_cell_that_the_ledger_knows_is_marked_and_does_not_fail_the_matrix(rows, printed, code):
    agrees = {("i", "grpo"): matrix.cell([row()], "i", [CASE])}
    lines = [
        matrix.Line("1.0.0", "trl 1.0.0", agrees),
        matrix.Line("1.1.0", "trl 1.1.0", agrees | {("i", "dapo"): matrix.cell(rows, "i", [CASE])}),
    ]
    assert matrix_page.shown(lines[1].cells["i", "dapo"]) == printed
    assert matrix.exit_code(lines) == code


def test_the_matrix_has_a_column_for_each_loss_type_and_every_case_can_be_built():
    assert list(matrix.columns("policy")) == list(LOSS_TYPES)
    for name in NAMES:
        for cases in matrix.columns(name).values():
            assert all(matrix.loss_family(name).build(case).leaves for case in cases)


def test_the_matrix_is_printed_and_written_and_lines_survive_being_killed(tmp_path, monkeypatch):
    cells = {("i", column): matrix.cell(rows, "i", [CASE]) for column, (rows, _) in zip("abcdef", CELLS, strict=True)}
    lines = [matrix.Line("1.0.0", "trl 1.0.0", cells), matrix.Line("1.1.0", "", {}, "<does> not import")]
    console = Console(width=120, record=True)
    matrix_page.render("trl", lines, console)
    printed = console.export_text()
    assert "0.60" in printed and "9.00" in printed and "inf" in printed and "refused" in printed
    assert "not judged: trl 1.1.0: <does> not import" in printed
    matrix_page.write("trl", "policy", lines, tmp_path / "page" / "matrix.html")
    page = (tmp_path / "page" / "matrix.html").read_text()
    assert 'class="far" title="grad_weight">inf' in page and "&lt;does&gt;" in page

    monkeypatch.setattr(matrix, "Environment", type("E", (), {"of": staticmethod(lambda specs: Made)}))
    monkeypatch.setattr(matrix, "rows", lambda made, cases, wanted, device: [row(case=cases[0].id)])
    asked = {"grpo": [CASE]}
    first = matrix._line("trl", "1.0.0", asked, ["i"], tmp_path, "cpu")
    monkeypatch.setattr(matrix, "rows", lambda *_: pytest.fail("asked again"))
    assert matrix._line("trl", "1.0.0", asked, ["i"], tmp_path, "cpu") == first
    monkeypatch.setattr(matrix, "rows", lambda made, cases, wanted, device: [row(case=cases[0].id, **KNOWN)])
    known = matrix._line("trl", "1.1.0", asked, ["i"], tmp_path, "cpu")
    monkeypatch.setattr(matrix, "rows", lambda *_: pytest.fail("asked again"))
    assert matrix._line("trl", "1.1.0", asked, ["i"], tmp_path, "cpu") == known
    assert known.cells["i", "grpo"].known == ("dapo-window",)
    assert first.cells["i", "grpo"].verdict == "agree" and matrix.exit_code([first]) == 0


class Made:
    partners = "trl 1.0.0"


def test_a_comparison_under_each_sides_defaults_shows_what_moved_inside_the_gates(monkeypatch):
    looks = [Look([row(headroom=0.1, value=v)], {"beta": 0.0, "top_k": k}) for v, k in ((1.0, None), (2.0, 0))]
    stub = type("E", (), {"partners": "torch", "versions": {"trl": "1"}, "of": classmethod(lambda cls, specs: cls)})
    monkeypatch.setattr(compare, "Environment", stub)
    monkeypatch.setattr(compare, "cases", lambda: [("named", CASE)])
    monkeypatch.setattr(compare, "both", lambda *_, **__: looks)
    plain = compare.compare((["trl==1"], ["trl==2"])).text()
    assert "0 worse (+), 0 better (-), 0 otherwise moved (~)" in plain
    assert "GRPOConfig, defaults changed: top_k None -> 0" in plain
    own = compare.compare((["trl==1"], ["trl==2"]), all_defaults=True)
    assert "1 otherwise moved (~)" in own.text() and own.exit_code == 0
    looks[1] = Look([row(**WRONG)], {})
    worse = compare.compare((["trl==1"], ["trl==2"])).json()
    assert worse.exit_code == 1 and worse.judged == [1, 1]
    assert [(m.case, m.mark, m.before, m.after) for m in worse.moved] == [("named", "+", "agree", "disagree")]
    looks[1] = Look([], {})
    with pytest.raises(compare.EnvironmentUnusable, match="1 and 0 judged quantities"):
        compare.compare((["trl==1"], ["trl==2"]))
