"""Where the time of a run went is summed over its shards."""

from msgspec import UNSET

from parity.results.header import About, Header, Part
from parity.results.report.timings import by_kind, lines, page, shares
from parity.results.row import Row


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


def row(case, family="logprobs", verdict="agree", **fields):
    return Row(case=case, family=family, implementation="a", dtype="fp32", device="cpu", verdict=verdict, **fields)


def test_comparisons_a_second_of_each_kind_and_the_page_that_tells_them():
    parts = [part("logprobs drawn 0.0", forward=2.0), part("sft-trainer checks 0.4", forward=1.0)]
    rows = [row("x"), row("x", quantity="logps"), row("y"), row("z", verdict="unsupported"), row("z", minimised=True)]
    rows += [row("u", "sft-trainer"), row("pooled of a"), row("w", frozen="w.json")]
    assert list(by_kind([*parts, part("logprobs frozen 0.0", forward=4.0)], rows)) == [
        ("drawn cases of the losses", 2, 2.0),
        ("frozen cases", 1, 4.0),
        ("checks of trainers", 1, 1.0),
    ]
    found = page(Header(header=About(command="parity run", git="abc"), parts=parts), rows).splitlines()
    assert "`parity run`, revision abc" in found[0]
    assert found[4:7] == [
        "| drawn cases of the losses | 2 | 2 | 1 |",
        "| checks of trainers | 1 | 1 | 1 |",
        "| all | 3 | 3 | 1 |",
    ]
    assert found[-1] == "```" and any(line.split() == ["forward", "3.0", "100.0", "%"] for line in found)
