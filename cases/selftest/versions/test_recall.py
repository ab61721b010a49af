"""Recall without the frozen cases: which releases are compared, which cases may show a record, what counts as found."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity.registry import loss_family
from parity.results.report.rows import Writer
from parity.results.row import About, Header, Row
from parity.versions import history
from parity.versions.client import EnvironmentUnusable


@pytest.fixture(scope="module")
def records():
    return {r.id: r for r in history.load()}


def test_the_sides_are_a_bad_release_and_the_good_one_next_to_it(records):
    assert history.side_by_side(records["is-ratio"]) == (("trl==0.28.0",), ("trl==0.29.0",))
    # never mended: the newest good release before it broke
    assert history.side_by_side(records["head-hook"]) == (("trl==1.16.0",), ("trl==1.14.2",))


def test_a_case_may_show_a_record_only_if_it_moves_what_the_record_needs(records):
    family, record = loss_family("policy"), records["luspo-kl"]
    assert record.moves == ("loss_type", "beta")
    assert history.fits(record, family.case(0, "fp32", {"loss_type": "luspo", "beta": 0.04}))
    for settings in ({"loss_type": "luspo"}, {"loss_type": "grpo", "beta": 0.5}, {"loss_type": "vespo", "beta": 0.5}):
        assert not history.fits(record, family.case(0, "fp32", settings))


def answers(record, case, verdict, **more):
    given = {"case": case.id, "family": case.family, "implementation": record.check.implementation, "dtype": case.dtype}
    given |= {"quantity": "loss", "seed": case.seed, "settings": dict(case.settings), "device": "cpu"}
    return Row(**given | {"verdict": verdict} | more)


@pytest.mark.parametrize("still", [True, False])
def test_found_is_what_fails_on_the_bad_side_and_answers_as_recorded_on_the_good_one(records, monkeypatch, still):
    """luspo-kl agrees on the good side; of the tool mask's two the second does; softcap has no case, is-ratio a frozen one."""
    asked = [records[name] for name in ("luspo-kl", "tool-mask", "softcap", "kl-bias", "is-ratio", "delta")]
    make = loss_family("policy").case
    luspo = make(0, "fp32", {"loss_type": "luspo", "beta": 0.04})
    masks = [make(seed, "fp32", {"holes": True}) for seed in (0, 1)]
    given = {name: records["kl-bias"].check.case.settings[name] for name in records["kl-bias"].moves}
    bias, nearer = make(0, "fp32", given | {"delta": 4.0}), make(0, "fp32", given)
    ratio = make(0, "fp32", {name: records["is-ratio"].check.case.settings[name] for name in records["is-ratio"].moves})
    failing = [(records["luspo-kl"], luspo), *((records["tool-mask"], case) for case in masks)]
    bad = [answers(record, case, "disagree") for record, case in failing]
    bad += [answers(records["kl-bias"], bias, "disagree"), answers(records["is-ratio"], ratio, "disagree", frozen="x")]

    class Made:
        name = "made"

        def run(self, command, capture, cpu_limit):
            assert command[3:8] == ["run", "--profile", "pr", "--seed", "20261120"]
            with Writer(Path(command[-1]) / "results.ndjson") as write:
                write(Header(run="x", header=About(profile="pr")))
                for row in bad:
                    write(row)
            return subprocess.CompletedProcess(command, 1, "", "")

    looked = []

    def rows(made, cases, implementations, device, near=False):
        """The good release refuses kl-bias's case and takes a nearer one, which `still` fails on the bad one or not."""
        looked.append([case.id for case in cases])
        if not near:
            return [answers(records["kl-bias"], c, "disagree" if still else "agree") for c in cases]
        found = [(records["luspo-kl"], luspo, "agree"), (records["tool-mask"], masks[0], "disagree")]
        found += [(records["tool-mask"], masks[1], "agree"), (records["kl-bias"], nearer, "agree")]
        return [answers(*one) for one in found]

    monkeypatch.setattr(history.Environment, "of", lambda specs: Made())
    monkeypatch.setattr(history, "look", lambda *given, **more: SimpleNamespace(rows=rows(*given, **more)))
    seen = {s.record.id: s for s in history.recall(asked, "pr", lambda line: None)}
    assert set(seen) == {"luspo-kl", "tool-mask", "softcap", "kl-bias", "is-ratio"}  # delta is a refusal
    assert (seen["luspo-kl"].first, seen["tool-mask"].first) == (luspo, masks[1])
    assert (seen["tool-mask"].failed, seen["tool-mask"].cases) == (2, 2)
    assert seen["softcap"].why == "no case has what it needs"
    assert seen["is-ratio"].why == "no case has what it needs", "the frozen cases are forgotten"
    assert seen["kl-bias"].first == (nearer if still else None)
    assert still or seen["kl-bias"].why == "none that fails is as recorded on the good release"
    assert looked.count([nearer.id]) == 1
    assert {id for ids in looked for id in ids} == {case.id for case in (luspo, *masks, bias, nearer)}
    table = history.recall_table(list(seen.values()), "pr")
    found = "3 of 5 records (60.0 %)" if still else "2 of 5 records (40.0 %)"
    assert table.endswith(f"Profile pr finds {found} without the frozen cases.")


def test_a_run_that_wrote_nothing_says_why(records, monkeypatch):
    ended = subprocess.CompletedProcess([], 1, "", "ImportError: no torch\n")
    made = SimpleNamespace(name="made", run=lambda *given, **more: ended)
    with pytest.raises(EnvironmentUnusable, match="environment made: ImportError: no torch"):
        history.drawn(made, [records["luspo-kl"]], "pr", "cpu")


def test_moves_names_settings_of_the_frozen_case(records):
    assert all(set(r.moves) <= set(r.check.case.settings) for r in records.values())
    shared = [r for r in records.values() if r.expect != "refused"]
    moved = [(r, tuple(str(r.check.case.settings[name]) for name in r.moves)) for r in shared]
    told = {(history.side_by_side(r), r.check.implementation, r.check.quantities, r.moves, v) for r, v in moved}
    assert len(told) == len(shared)  # two records of one change are told apart
