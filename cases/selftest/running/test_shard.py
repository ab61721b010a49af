"""The shard of a run: a new finding is minimised, frozen and reported once; what the ledger knows is not."""

import dataclasses
import json

import pytest
from msgspec import UNSET

from parity import data
from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import Profile
from parity.registry import NAMES, from_file, loss_family
from parity.results.ledger import Ledger
from parity.running.events import At, Judged, Shrinking
from parity.running.run import Options, plans
from parity.running.shard import HIDDEN, TOKENS, VOCABULARIES, Session, Shard, second_pass

KERNELS = "fixtures/kernels.py"
PROFILE = Profile(shrink_seconds=60.0, findings=2)


def session(name, tmp_path, ledger="") -> tuple[Session, list]:
    path = tmp_path / "ledger.toml"
    path.write_text(ledger)
    events: list = []
    own = Session(
        implementations=[*from_file(f"{KERNELS}:{name}")],
        profile_name="quick",
        profile=PROFILE,
        dtypes=("fp32",),
        device="cpu",
        ledger=Ledger.load(path),
        findings_dir=tmp_path / "findings",
        emit=events.append,
    )
    return own, events


def rows(events):
    return [e.row for e in events if isinstance(e, Judged)]


def numbers(events):
    return [e.number for e in events if isinstance(e, At)]


def test_a_right_kernel_has_no_findings(tmp_path):
    own, events = session("right", tmp_path)
    own.drawn(Shard("logprobs", 0, 40, seed=1))
    assert {r.verdict for r in rows(events)} == {"agree", "unsupported"}
    assert sum(r.verdict == "agree" for r in rows(events)) >= 15


def test_a_scale_error_of_one_in_a_thousand_is_found(tmp_path):
    own, events = session("scaled", tmp_path)
    own.drawn(Shard("logprobs", 0, 40, seed=2))
    assert any(r.verdict == "disagree" and r.cls == "logic" for r in rows(events))


def test_a_finding_is_minimised_and_frozen(tmp_path):
    own, events = session("wrong_beyond_eight", tmp_path)
    own.drawn(Shard("logprobs", 0, 60, seed=3))
    found = [r for r in rows(events) if r.minimised is True and r.quantity == "logps"]
    assert found, "no minimised finding"
    assert found[0].settings["V"] == 9, "the smallest vocabulary that shows it"
    assert found[0].settings["B"] == found[0].settings["T"] == 1
    assert found[0].verdict == "disagree"
    frozen = list((tmp_path / "findings").glob("*.json"))
    assert Case.load(frozen[0]).family == "logprobs"
    assert json.loads(frozen[0].read_text())["implementation"] == "fixtures/kernels.py:wrong_beyond_eight"


def test_what_there_is_no_time_to_minimise_is_reported_as_drawn(tmp_path):
    shard = Shard("logprobs", 0, 60, seed=3)
    for limit in ({"minimise_seconds": 0.0}, {"findings": 0}):
        own, events = session("wrong_beyond_eight", tmp_path)
        own.profile = dataclasses.replace(PROFILE, **limit)
        own.drawn(shard)
        first = [r for r in rows(events) if r.minimised is not UNSET]
        assert first and not any(r.minimised for r in first)
        assert len({(r.implementation, r.quantity, r.cls) for r in first}) == len(first), "each finding once"
        assert not any(isinstance(e, Shrinking) for e in events)
        assert not (tmp_path / "findings").exists()
        assert sum(isinstance(e, At) for e in events) == 60, "every case is run all the same"


def test_the_time_for_minimising_is_one_for_all_findings_of_a_worker(tmp_path):
    own, events = session("wrong_beyond_eight", tmp_path)
    own.implementations = [*own.implementations, *from_file(f"{KERNELS}:scaled")]
    own.profile = dataclasses.replace(PROFILE, findings=9, shrink_seconds=60.0, minimise_seconds=1e-6)
    own.drawn(Shard("logprobs", 0, 60, seed=3))
    assert own.minimised == 1 and own.minimising > 1e-6, "the first uses it up"
    assert any(r.minimised is False for r in rows(events))


def test_the_same_seed_draws_the_same_cases(tmp_path):
    drawn = []
    for _ in range(2):
        own, events = session("right", tmp_path)
        own.drawn(Shard("logprobs", 1, 15, seed=4))
        drawn.append([r.case for r in rows(events)])
    assert drawn[0] == drawn[1]


def test_a_resumed_shard_leaves_out_what_was_done(tmp_path):
    own, events = session("right", tmp_path)
    shard = Shard("logprobs", 0, 12, seed=5)
    own.drawn(shard)
    whole = numbers(events)
    own, events = session("right", tmp_path)
    own.drawn(dataclasses.replace(shard, resume=8))
    assert numbers(events) == [n for n in whole if n >= 8]


def test_one_dtype_leaves_out_frozen_cases_of_others():
    (plan,) = plans(Options(profile="pr", dtypes=("fp32",), workers=1), "cpu", 0, data.ledger_file())
    assert {case["dtype"] for _, case, _ in plan["frozen"]} == {"fp32"} and len(plan["frozen"]) > 10


def test_profile_quick_leaves_frozen_cases_of_whole_trainers_to_the_others():
    families = {
        profile: {
            case["family"] for _, case, _ in plans(Options(profile=profile), "cpu", 0, data.ledger_file())[0]["frozen"]
        }
        for profile in ("quick", "pr")
    }
    assert families["quick"] == set(NAMES)
    assert families["pr"] > families["quick"]


def test_a_share_of_the_float32_cases_runs_with_tf32_products_on_cuda():
    plain = [Case("logprobs", seed, "fp32", {"V": 5}) for seed in range(200)]
    again = [c for case in plain for c in second_pass(case, "cuda")]
    assert 30 < len(again) < 70
    assert all(c.settings == {"V": 5, "context": "tf32"} for c in again)
    others = [Case("logprobs", 1, "bf16", {}), Case("logprobs", 1, "fp32", {"context": "autocast"})]
    assert not [c for case in others for c in second_pass(case, "cuda")]
    assert not [c for case in plain for c in second_pass(case, "cpu", long=True)]


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_the_small_cases_has_a_real_vocabulary_in_long_profiles_on_cuda(name):
    fam = loss_family(name)
    drawn = list(draws(cases(fam, ("bf16",), "nightly"), f"real/{name}", 300))
    real = [c for case in drawn for c in second_pass(case, "cuda", long=True)]
    assert real and {c.settings["V"] for c in real} <= set(VOCABULARIES)
    for case in real:
        s = fam.full_settings(case)
        assert fam.sizes(s)[0] <= TOKENS and s.H <= HIDDEN
    assert not [c for case in drawn for c in second_pass(case, "cuda")]
