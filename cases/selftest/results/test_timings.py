"""Where the time of a run went is summed over its shards."""

from msgspec import UNSET

from parity.results.header import Part
from parity.results.report.timings import lines, shares


def part(name, **phases):
    return Part(name=name, cases=1, seconds=sum(phases.values()), spent={"phase": phases, "implementation": {"a": 1.0}})


def test_shares_are_of_all_shards_the_largest_first_and_the_rest_is_one_line():
    found = shares([part("policy drawn 1/2", gates=1.0, forward=3.0), part("logprobs frozen", gates=4.0)], most=1)
    assert [(s.name, s.seconds, s.share) for s in found["phase"]] == [("gates", 5.0, 0.625), ("1 others", 3.0, 0.375)]
    assert [(s.name, s.seconds) for s in found["implementation"]] == [("a", 2.0)]
    assert [s.name for s in found["family"]] == ["policy", "1 others"]


def test_a_file_without_them_says_so():
    assert "no timings" in lines(UNSET)[0] and "no timings" in lines([Part(name="policy", cases=1)])[0]
    assert lines([part("policy drawn 1/2", forward=3.0)])[2].split() == ["forward", "3.0", "100.0", "%"]
