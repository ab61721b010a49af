"""Recall without the frozen cases: which releases are compared, which cases may show a record, what counts as found."""

import io
import subprocess

import pytest

from parity.case.case import Case
from parity.registry import loss_family
from parity.versions import history, recall


@pytest.fixture(scope="module")
def records():
    return {r.id: r for r in history.load()}


def test_the_sides_are_a_bad_release_and_the_good_one_next_to_it(records):
    assert recall.side_by_side(records["is-ratio"]) == (("trl==0.28.0",), ("trl==0.29.0",))
    # never mended: the newest good release before it broke
    assert recall.side_by_side(records["head-hook"]) == (("trl==1.16.0",), ("trl==1.14.2",))


def test_a_case_may_show_a_record_only_if_it_moves_what_the_record_needs(records):
    family, record = loss_family("policy"), records["luspo-kl"]
    assert record.moves == ("loss_type", "beta")
    both = family.case(0, "fp32", {"loss_type": "luspo", "beta": 0.04})
    assert recall.fits(record, both, "pr", "cpu")
    for settings in ({"loss_type": "luspo"}, {"loss_type": "grpo", "beta": 0.5}, {"loss_type": "vespo", "beta": 0.5}):
        assert not recall.fits(record, family.case(0, "fp32", settings), "pr", "cpu")


def test_cases_like_the_frozen_one_are_asked_first(records):
    """Liger's NaN of a banned token needs V > 4,096: a small vocabulary fails for another reason, on the good side too."""
    family, record = loss_family("policy"), records["liger-grpo-minus-inf"]
    small, far, near = (
        family.case(0, "fp32", {"bias": "banned", "H": 2, **more})
        for more in ({"V": 5}, {"V": 4300, "loss_type": "luspo", "beta": 0.04}, {"V": 4100})
    )
    assert recall.nearest(record, [small, far, near]) == [near, small, far]
    half = family.case(0, "fp16", {"bias": "banned", "H": 2, "V": 4100})
    assert recall.nearest(record, [half, near]) == [near, half]


def test_found_is_what_fails_on_the_bad_side_and_answers_as_recorded_on_the_good_one(records, monkeypatch):
    asked = [records["luspo-kl"], records["tool-mask"], records["softcap"], records["delta"]]
    family = loss_family("policy")
    moved = [{"loss_type": "luspo", "beta": 0.04}, {"holes": True}, {"holes": True, "seed": 1}]
    drawn = [family.case(s.pop("seed", 0), "fp32", s) for s in moved]
    monkeypatch.setattr(recall, "of_profile", lambda family, profile: iter([drawn]))
    told = []

    def answering(id, expected, cases):
        """On the bad side the KL fails and both cases of the tool mask; on the good side one of these agrees."""
        told.append((id, expected, len(cases)))
        return cases[1:] if expected == "agree" and len(cases) == 2 else cases

    def ran(made, module, stdin, limit, device):
        _, move, plan = recall.json.loads(stdin)
        lines = []
        for id, _, _, expected, count, moves, cases in plan:
            assert moves == list(records[id].moves) and move == ("pr" if expected == "disagree" else recall.ACCEPTED)
            lines.append([id, [(c, c) for c in answering(id, expected, cases)[:count]]])
        return subprocess.CompletedProcess([], 0, "".join(f"{recall._LINE}{recall.json.dumps(x)}\n" for x in lines))

    monkeypatch.setattr(recall, "ran", ran)
    monkeypatch.setattr(recall.Environment, "of", lambda specs: None)
    seen = {s.record.id: s for s in recall.recall(asked, "pr", lambda line: None)}
    assert set(seen) == {"luspo-kl", "tool-mask", "softcap"}  # delta is a refusal
    assert (seen["luspo-kl"].first, seen["tool-mask"].first, seen["softcap"].first) == (1, 3, None)
    assert seen["softcap"].why == "no case has what it needs"
    # one process for each release of a pair, and no second batch for what is found
    assert told == [
        ("luspo-kl", "disagree", 1),
        ("luspo-kl", "agree", 1),
        ("tool-mask", "disagree", 2),
        ("tool-mask", "agree", 2),
    ]
    table = recall.table(list(seen.values()), "pr")
    assert table.endswith("Profile pr finds 2 of 3 records (66.7 %) without the frozen cases.")


def test_batches_go_on_behind_the_last_case_that_failed_until_one_agrees_on_the_good_side(records, monkeypatch):
    record, family = records["tool-mask"], loss_family("policy")
    drawn = [family.case(seed, "fp32", {"holes": True}) for seed in range(20)]
    monkeypatch.setattr(recall, "of_profile", lambda family, profile: iter([drawn]))
    asked = []

    def look(specs, plan, moving, device):
        if not plan:
            return {}
        ((one, cases, expected, count),) = plan
        numbers = [drawn.index(c) for c in cases]
        asked.append((expected, numbers))
        # every odd case fails on the bad side; of these only the fifth agrees on the good one
        found = [n for n in numbers if (n % 2 if expected == "disagree" else n == agrees)][:count]
        return {one.id: [(drawn[n], drawn[n]) for n in found]}

    monkeypatch.setattr(recall, "_look", look)
    agrees = 9
    (seen,) = recall.recall([record], "pr", lambda line: None)
    assert (seen.first, seen.why) == (10, "")
    assert asked[2:] == [("disagree", list(range(4, 20))), ("agree", [5, 7, 9, 11])]
    agrees = -1
    (seen,) = recall.recall([record], "pr", lambda line: None)
    assert (seen.first, seen.why) == (None, "10 fail, none is as recorded on the good release")


@pytest.mark.parametrize(("still", "first"), [(True, 2), (False, None)])
def test_what_the_good_side_refuses_counts_where_without_it_both_sides_answer(still, first, records, monkeypatch):
    """Liger's NaN of a banned token was seen only beside a cap that the release before it does not have."""
    record, family = records["liger-grpo-minus-inf"], loss_family("policy")
    other, whole, less = (
        family.case(0, "fp32", {"bias": "banned", **more})
        for more in ({"delta": 4.0}, {"V": 4200, "delta": 4.0}, {"V": 4200})
    )
    monkeypatch.setattr(recall, "of_profile", lambda family, profile: iter([[other, whole]]))
    asked = []

    def look(specs, plan, moving, device):
        if not plan:
            return {}
        ((one, cases, expected, _),) = plan
        asked.append((expected, moving, [c.settings for c in cases]))
        if expected == "agree":
            return {one.id: [(whole, less)]}
        if moving:
            return {one.id: [(c, c) for c in cases]}
        return {one.id: [(c, c) for c in cases if still]}

    monkeypatch.setattr(recall, "_look", look)
    (seen,) = recall.recall([record], "pr", lambda line: None)
    assert seen.first == first
    assert (seen.why == "") == still
    assert ("disagree", None, [less.settings]) in asked


def test_moves_names_settings_of_the_frozen_case(records):
    assert all(set(r.moves) <= set(r.check.case.settings) for r in records.values())
    shared = [r for r in records.values() if r.expect != "refused"]
    moved = [(r, tuple(str(r.check.case.settings[name]) for name in r.moves)) for r in shared]
    told = {(recall.side_by_side(r), r.check.implementation, r.check.quantities, r.moves, v) for r, v in moved}
    assert len(told) == len(shared)  # two records of one change are told apart


def test_a_case_that_the_implementation_refuses_is_asked_as_a_run_moves_it(monkeypatch, capsys):
    """Liger's fused KL takes beta 0 alone: of a case with a softcap the ban and the width stay."""
    settings = {
        "B": 1,
        "T": 2,
        "V": 5,
        "H": 3,
        "softcap": 5.0,
        "layouts": "transposed",
        "beta": 0.0,
    }
    name = "liger.fused_linear_kl_div"
    case = Case("divergence", 3, "fp32", settings)
    for move, moves, expected in (
        ("pr", ["layouts"], 1),
        ("pr", ["softcap"], 0),
        (recall.ACCEPTED, ["layouts"], 1),
        (None, ["layouts"], 0),
    ):
        recall._besides.cache_clear()
        monkeypatch.setattr(recall, "of_profile", lambda family, profile: iter([[case]]))
        plan = [["transposed", name, ["grad_weight"], "disagree", 1, moves, [case.to_json()]]]
        monkeypatch.setattr("sys.stdin", io.StringIO(recall.json.dumps(["cpu", move, plan])))
        assert recall.main() == 0
        ((_, found),) = [
            recall.json.loads(x.removeprefix(recall._LINE))
            for x in capsys.readouterr().out.splitlines()
            if x.startswith(recall._LINE)
        ]
        assert len(found) == expected
        for asked, ran in found:
            assert Case.from_json(asked) == case
            assert ran["settings"] == {k: v for k, v in settings.items() if k != "softcap"}
