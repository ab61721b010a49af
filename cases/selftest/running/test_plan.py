"""The shards of a run, how many workers it has, and what an option may say."""

import pytest

from parity.case.case import Frozen
from parity.errors import UsageError
from parity.registry import NAMES
from parity.results.ledger import Ledger
from parity.running.plan import Options, demanded, frozen_files, planned, slices, workers
from parity.trainers import catalogue


def test_shards_are_all_cases_once():
    for total in (0, 1, 49, 50, 51, 350):
        for begin in (0, 8):
            found = list(slices(total, 50, begin))
            assert [n for start, count in found for n in range(start, start + count)] == [*range(begin, begin + total)]
            assert all(count <= 50 for _, count in found)


def test_the_first_draws_of_a_stream_are_a_shard_of_their_own_and_none_is_lost():
    shards = planned(Options(profile="quick", families=("logprobs",)), "cpu", 3).shards
    drawn = [s for s in shards if s.kind == "drawn"]
    assert [s.count for s in drawn if not s.start] == [8, 8]
    for index in (0, 1):
        of = [n for s in drawn if s.index == index for n in range(s.start, s.start + s.count)]
        assert sorted(of) == [*range(drawn[0].of)]


def test_workers(monkeypatch):
    monkeypatch.setattr("parity.running.plan.CORES", 8)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 13 << 30})())
    assert workers(None, 100) == (3, "3 workers (8 cores, 13 GiB free)")
    assert workers(None, 2)[0] == 2
    assert workers(5, 100) == (5, "5 workers (as asked)")


@pytest.mark.parametrize(
    ("item", "id", "device"),
    [
        ("trl.f", "trl.f", ""),
        ("trl.f:cuda", "trl.f", "cuda"),
        ("x/own.py:f", "x/own.py:f", ""),
        ("x/own.py:f:cpu", "x/own.py:f", "cpu"),
    ],
)
def test_what_is_required(item, id, device):
    assert demanded(item) == (id, device)
    with pytest.raises(UsageError, match="device must be cpu or cuda"):
        demanded("trl.f:tpu")


def frozen(**options):
    """The frozen cases of a run with these options."""
    files = frozen_files(Ledger.known())
    return [Frozen.load(files[name]).case for name in planned(Options(**options), "cpu", 0).settings["frozen"]]


def test_one_dtype_leaves_out_frozen_cases_of_others():
    of_one = frozen(profile="pr", dtypes=("fp32",))
    assert {case.dtype for case in of_one} == {"fp32"} and len(of_one) > 10


def test_profile_quick_leaves_frozen_cases_of_whole_trainers_to_the_others():
    families = {profile: {case.family for case in frozen(profile=profile)} for profile in ("quick", "pr")}
    assert families["quick"] == set(NAMES)
    assert families["pr"] > families["quick"]


def test_a_trainer_that_is_asked_for_has_cases_in_profile_quick():
    """Those of pr, where quick has none of it."""

    def checks(**options):
        return {s.family for s in planned(Options(profile="quick", **options), "cpu", 1).shards if s.kind == "checks"}

    assert "orpo-trainer" not in checks()
    assert checks(families=("orpo-trainer",)) == checks(implementations=("orpo-trainer.released",)) == {"orpo-trainer"}
    quick, pr = (catalogue.cases("orpo-trainer", profile, 1, asked=True) for profile in ("quick", "pr"))
    assert quick == pr


def test_a_users_function_gets_more_draws_than_what_a_library_ships():
    """And these are the first of the same streams, so that a row is in both."""

    def drawn(*ids):
        plan = planned(Options(profile="pr", families=("logprobs",), implementations=ids), "cpu", 1)
        return {(s.index, s.of): s.start + s.count for s in plan.shards if s.kind == "drawn"}

    shipped, own = drawn("trl.*"), drawn("trl.*", "fixtures/kernels.py:right")
    assert shipped.keys() == own.keys()
    assert sum(shipped.values()) == 400 and sum(own.values()) == 700
