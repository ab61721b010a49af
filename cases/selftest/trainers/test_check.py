"""The registry of trainer checks: cases, settings, rows, replay, and what an exception in a check becomes."""

import json
import math

import msgspec
import pytest

from parity.case.case import Case
from parity.case.inputs import Setting
from parity.errors import Unsupported, UsageError
from parity.judge.gates import Judgement
from parity.registry import family, run_case, select
from parity.running.plan import Started
from parity.running.supervisor import lost_row
from parity.sampling.find import find
from parity.tools.replay import exit_code
from parity.trainers import catalogue
from parity.trainers.catalogue import judge
from parity.trainers.check import CHECKS, CheckCall, Quantity, check, holds, summed
from parity.trainers.rig import drive
from parity.trainers.specs import TRAINERS

SETTINGS = {"kind": Setting("right", "what it does", ("right", "wrong", "absent", "raises", "moody", "silent"))}
CALLS: list[CheckCall] = []


@pytest.fixture
def toy(monkeypatch):
    """A check of its own on the GRPO trainer, taken out again."""
    CALLS.clear()

    @check("toy", ("grpo-trainer",), SETTINGS, lambda seed: [("grpo-trainer", {})], paths=("released", "fixed"))
    def toy(call):
        CALLS.append(call)
        kind = call.settings.kind
        if kind == "absent":
            raise Unsupported("nothing to judge")
        if kind == "raises":
            raise RuntimeError("broken")
        if kind == "silent":
            return
        value = {"right": 0.0, "wrong": 3.0, "moody": 3.0 if len(CALLS) % 2 else 0.0}[kind]
        yield Quantity("amount", value, 0.0, Judgement({"bound": abs(value)}), "too much")
        yield holds("flag", True)

    yield family("grpo-trainer")
    del CHECKS["toy"]


def rows_of(fam, kind, path="released"):
    case = fam.case(0, "fp32", {"check": "toy", "kind": kind})
    return list(run_case(case, select([f"grpo-trainer.{path}"])))


def test_rows_of_a_check_follow_the_contract(toy):
    amount, flag = rows_of(toy, "wrong")
    assert (amount.family, amount.implementation) == ("grpo-trainer", "grpo-trainer.released")
    assert amount.role == amount.blame == "reference"
    assert (amount.verdict, amount.headroom, amount.cls) == ("disagree", 3.0, "logic")
    assert amount.message == "too much" and amount.settings == {"check": "toy", "kind": "wrong"}
    assert flag.verdict == "agree" and flag.message == ""
    json.dumps([msgspec.to_builtins(row) for row in (amount, flag)], allow_nan=False)
    assert exit_code([amount, flag]) == 1


@pytest.mark.parametrize(
    "kind, verdict, told",
    [
        ("right", "agree", ""),
        ("absent", "unsupported", "nothing to judge"),
        ("silent", "unsupported", "nothing was measured"),
        ("moody", "nondeterministic", "too much"),
        ("raises", "crashed", "broken"),
    ],
)
def test_verdicts(toy, kind, verdict, told):
    row = rows_of(toy, kind)[0]
    assert row.verdict == verdict and told in row.message


@pytest.mark.parametrize(("is_known", "runs"), [(True, 1), (False, 2)])
def test_a_check_is_run_again_unless_all_that_fails_is_known(toy, is_known, runs):
    case, asked = toy.case(0, "fp32", {"check": "toy", "kind": "moody"}), []
    known = lambda row: asked.append(row.quantity) or is_known  # noqa: E731
    verdicts = [r.verdict for r in run_case(case, select(["grpo-trainer.released"]), known=known)]
    assert verdicts == ["disagree" if is_known else "nondeterministic", "agree"]
    assert len(CALLS) == runs and asked == ["amount"]


def test_the_released_way_comes_first_and_the_fixed_one_names_it(toy):
    case = toy.case(0, "fp32", {"check": "toy"})
    rows = list(run_case(case, select(["grpo-trainer"])))
    assert [r.implementation for r in rows] == ["grpo-trainer.released"] * 2 + ["grpo-trainer.fixed"] * 2
    assert rows[2].against == "grpo-trainer.released" and rows[2].role == "candidate"


def test_a_case_freezes_and_is_found_again(toy, tmp_path):
    case = toy.case(0, "fp32", {"check": "toy", "kind": "wrong"})
    path = tmp_path / "finding.json"
    path.write_text(json.dumps({"case": case.to_json(), "implementation": "grpo-trainer.fixed"}))
    assert find(str(path)) == (case, "grpo-trainer.fixed")
    assert Case.load(path).id == case.id


def test_a_check_that_takes_the_process_with_it_still_has_a_row(toy):
    case = toy.case(0, "fp32", {"check": "toy"})
    row = lost_row(Started(case.id, "grpo-trainer.released", case.to_json()), "timed-out", "no answer for 180 s", "cpu")
    assert (row.verdict, row.family, row.case) == ("timed-out", "grpo-trainer", case.id)


def test_defaults_are_left_out_of_a_case(toy):
    assert toy.case(0, "fp32", {"check": "toy", "kind": "right"}).settings == {"check": "toy"}


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"check": "tow"}, "check='tow' is unknown to grpo-trainer"),
        ({}, "check=None is unknown"),
        ({"check": "toy", "kin": 1}, "setting 'kin' is unknown to check toy"),
        ({"check": "toy", "kind": "odd"}, "kind='odd' is not among"),
    ],
)
def test_malformed_cases_name_the_value_and_the_choices(toy, settings, told):
    with pytest.raises(UsageError, match=told):
        toy.full_settings(Case("grpo-trainer", 0, "fp32", settings))


def test_an_unknown_trainer_is_a_usage_error():
    with pytest.raises(UsageError, match="unknown"):
        family("gpro-trainer")
    with pytest.raises(UsageError, match="'odd'"):
        check("x", ("grpo-trainer",), {}, lambda seed: [], paths=("odd",))


def test_nan_never_agrees():
    for value, agrees in ((0.2, True), (0.2 * (1 + 1e-5), False), (math.nan, False), (math.inf, False)):
        assert judge(summed("coefficient", value, (0.1, 0.05, 0.05))).agrees is agrees


def test_profiles_grow_and_each_of_their_cases_can_be_frozen():
    found = [[c for n in TRAINERS for c in catalogue.cases(n, profile, 5)] for profile in ("quick", "pr", "nightly")]
    assert 0 < len(found[0]) < len(found[1]) < len(found[2])
    assert all(Case.from_json(case.to_json()) == case for cases in found for case in cases)


def test_checks_come_in_one_order_whichever_module_was_imported_first(monkeypatch):
    """The cases of a run, and so its shards, must not depend on what else is loaded."""

    def modules():
        return [c.run.__module__.rpartition(".")[2] for c in catalogue.load().values()]

    before = modules()
    monkeypatch.setattr(catalogue, "CHECKS", dict(reversed(CHECKS.items())))
    assert modules() == before == sorted(before, key=catalogue.MODULES.index)


class PolicyTrainer:
    """As RLOOTrainer was before TRL 0.21: another trainer under the same name."""

    def __init__(self, config, processing_class, policy, ref_policy, reward_model):
        raise AssertionError("nobody builds it")


def test_another_trainer_under_the_name_is_refused_by_name(monkeypatch):
    released = drive.trl_class
    monkeypatch.setattr(drive, "trl_class", lambda name: PolicyTrainer if name == "RLOOTrainer" else released(name))
    case = family("rloo-trainer").case(0, "fp32", {"check": "advantages"})
    found = list(run_case(case, select(["rloo-trainer.released"])))
    assert {row.verdict for row in found} == {"unsupported"}
    assert all("RLOOTrainer is another one: it takes no `model`" in row.message for row in found)
