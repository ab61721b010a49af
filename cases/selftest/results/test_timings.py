"""Where the time of a run went is summed over its shards."""

from msgspec import UNSET

from parity.results.header import Part
from parity.results.report import timings


def part(name, **phases):
    return Part(name=name, cases=1, seconds=sum(phases.values()), spent={"phase": phases, "implementation": {"a": 1.0}})


def test_shares_are_of_all_shards_the_largest_first_and_the_rest_is_one_line(monkeypatch):
    monkeypatch.setattr(timings, "MOST", 1)
    found = timings.lines([part("policy drawn 1/2", gates=1.0, forward=3.0), part("logprobs frozen", gates=4.0)])
    told = [line.split() for line in found if line]
    assert told[:3] == [
        *(["CPU", "seconds", "by", "phase"], ["gates", "5.0", "62.5", "%"], ["1", "others", "3.0", "37.5", "%"])
    ]
    assert ["a", "2.0", "100.0", "%"] in told and ["logprobs", "4.0", "50.0", "%"] not in told[-1:]


def test_a_file_without_them_says_so():
    assert "no timings" in timings.lines(UNSET)[0] and "no timings" in timings.lines([Part(name="policy", cases=1)])[0]
