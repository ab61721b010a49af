"""Two ranks, by DDP and FSDP2 over gloo: the same bits with and without a watch, and what ends one rank ends both; of packed rows
one has fewer sequences."""

import functools
import json
import tempfile
from pathlib import Path

import pytest

from parity.trainers.rig import ranks

SHARDINGS = "none", "fsdp2"


@functools.cache
def found(sharding):
    with tempfile.TemporaryDirectory() as folder:
        ranks.started("cases.selftest.watching.rank", [sharding, folder], 2)
        cases = sorted(path.name for path in Path(folder).glob("*-step-*"))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) | {"cases": cases} for rank in range(2)]


@pytest.mark.parametrize("sharding", [*SHARDINGS, "packed"])
def test_a_watched_run_ends_in_the_same_bits(sharding):
    for rank in found(sharding):
        assert rank["watched"].items() >= {"looks": 3, "noisy": 1, "findings": [], "ended": ""}.items()
        assert rank["watched"]["weights"] == rank["bare"]["weights"] == found(sharding)[0]["bare"]["weights"]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_mismatch_on_one_rank_ends_the_run_on_both(sharding):
    other, planted = (rank["raised"] for rank in found(sharding))
    assert planted["step"] == other["step"] == 0 and planted["noisy"] == other["noisy"] == 2
    assert planted["findings"] and planted["ended"].startswith("Mismatch: watch, step 1: the ")
    assert not other["findings"] and other["ended"] == "Mismatch: watch, step 1: a mismatch on another rank"


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_an_error_on_one_rank_ends_the_watch_on_both_and_no_run(sharding):
    for rank in found(sharding):
        assert rank["broken"]["step"] == 3 and not rank["broken"]["ended"] and rank["broken"]["looks"] == 0
        assert rank["broken"]["weights"] == rank["bare"]["weights"]


def test_the_case_of_a_rank_with_a_mismatch_stays():
    names = "raised-step-1-rank-1.json", "raised-step-1-rank-1.safetensors"
    assert found("none")[0]["cases"] == [*names]
