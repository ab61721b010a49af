"""The shards of a run, how many workers it has, and what an option may say."""

import pytest

from parity.errors import UsageError
from parity.running.plan import demanded, slices, workers


def test_shards_are_all_cases_once():
    for total in (0, 1, 49, 50, 51, 350):
        found = list(slices(total, 50, family="policy", kind="drawn", seed=1))
        assert [n for s in found for n in range(s.start, s.start + s.count)] == list(range(total))
        assert all(s.count <= 50 for s in found)


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


def test_a_device_that_is_none():
    with pytest.raises(UsageError, match="device must be cpu or cuda"):
        demanded("trl.f:tpu")
