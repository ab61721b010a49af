"""Counting: implementation-cases, findings, coverage."""

import dataclasses
import math
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace

from parity.results.header import About, Header, Part
from parity.results.report import brief, wording
from parity.results.report.coverage import shared
from parity.results.report.outcomes import headroom
from parity.results.report.summary import summarise
from parity.results.row import Row

DIMENSIONS = {"policy": {"B": 2, "T": 3, "V": 7, "H": 4, "beta": 0.0, "softcap": None, "holes": False, "delta": None}}
HEADER = Header(run="r1", header=About(dimensions=DIMENSIONS))


def row(case="c1", quantity="loss", verdict="agree", implementation="lib.loss", **fields):
    fails = verdict in ("disagree", "nondeterministic")
    settings = {"B": 2, "T": 3, "V": 7, "H": 4} | fields.pop("settings", {})
    base = {
        "case": case,
        "family": "policy",
        "implementation": implementation,
        "role": "candidate",
        "quantity": quantity,
        "dtype": "fp32",
        "device": "cpu",
        "verdict": verdict,
        "class": "logic" if fails else None,
        "blame": "candidate" if fails else None,
        "gate": "norm" if quantity else None,
        "headroom": (4.0 if fails else 0.25) if quantity else None,
        "gates": {"norm": 4.0 if fails else 0.25} if quantity else {},
        "known": None,
        "settings": settings,
        "worst": [],
        "message": "",
        "replay": f"parity replay {case}",
    }
    return convert(base | fields, Row)


def summary(*rows):
    return summarise(HEADER, rows)


def test_every_case_counts_once():
    s = summary(
        row("a"),
        row("a", "grad_hidden"),
        row("b", None, "unsupported", message="no bias"),
        row("c", None, "refused"),
        row("d", None, "crashed"),
        row("e", None, "timed-out"),
        row("f", None, "out-of-memory"),
        row("g", "loss", "nondeterministic"),
        row("h", "loss", "disagree", known="K1"),
        row("i"),
        row("i", "grad_hidden", "disagree"),
    )
    c = s.counts
    assert (c.compared, c.refused, c.unsupported, c.crashed, c.timed_out, c.out_of_memory) == (4, 1, 1, 1, 1, 1)
    assert (c.agree, c.known, c.nondeterministic, c.disagree) == (1, 1, 1, 1)
    assert c.total == 9
    assert " · ".join(wording.counts(c)).startswith(
        "4 compared (1 agree, 1 known, 1 nondeterministic, 1 disagree) · 1 refused · 1 unsupported · 1 crashed"
    )


def test_a_case_that_ran_twice_counts_once():
    s = summary(row("a"), row("a", verdict="disagree", minimised=True))
    assert (s.counts.total, s.counts.disagree) == (1, 1)


def test_findings_that_were_not_minimised_are_counted():
    drawn = row("a", verdict="disagree", minimised=False)
    small = row("b", verdict="disagree", implementation="lib.other", minimised=True)
    frozen = row("c", verdict="disagree", implementation="lib.third", frozen="c.json")
    s = summary(drawn, small, frozen)
    assert {f.implementation: f.minimised for f in s.findings} == {
        "lib.loss": False,
        "lib.other": True,
        "lib.third": None,
    }
    assert wording.as_drawn(s).startswith("1 of 3 new findings as drawn")
    assert wording.as_drawn(summary(drawn, row("d", verdict="disagree", minimised=True))) == "", (
        "a smaller case is shown"
    )
    assert wording.as_drawn(summary(small, frozen)) == ""


def test_the_table_says_where_it_is_tightest():
    s = summary(row("a"), row("a", "grad_hidden", headroom=0.9, gate="row"), row("b", dtype="bf16"))
    fp32, bf16 = s.lines
    assert (fp32.dtype, wording.line_headroom(fp32), wording.at(fp32.worst)) == ("fp32", "0.90", "grad_hidden row")
    assert bf16.counts.compared == 1


def test_a_known_finding_does_not_hide_how_tight_the_rest_is():
    s = summary(row("a", verdict="disagree", known="K1"), row("b", headroom=0.5))
    (line,) = s.lines
    assert (line.verdict, wording.line_headroom(line), line.known) == ("known", "0.50", ("K1",))


def test_a_new_finding_beside_a_known_one_is_the_verdict():
    s = summary(row("a", verdict="disagree", known="K1"), row("b", verdict="disagree"))
    assert s.lines[0].verdict == "disagree"
    assert wording.line_verdict(s.lines[0]) == "DISAGREE; known: K1"
    assert (len(s.findings), len(s.known)) == (1, 1)


def test_nothing_compared_is_never_agreement():
    (line,) = summary(row("a", None, "unsupported", message="no bias")).lines
    assert (line.verdict, line.reason) == ("unsupported", "no bias")


def test_a_failure_without_a_size_is_infinite():
    s = summary(row("a", "relation: x2", "disagree", headroom=None, gate="relation", gates={"relation": None}))
    assert headroom(s.findings[0].worst) == math.inf
    assert wording.line_headroom(s.lines[0]) == "∞"
    assert wording.at(s.findings[0].lead) == "relation: x2"


def test_a_wrong_value_is_the_root_of_its_gradients():
    s = summary(row("a", "loss", "disagree"), row("a", "grad_hidden", "disagree"), row("a", "relation: x2", "disagree"))
    (finding,) = s.findings
    assert finding.roots == ("loss",)
    assert ("fp32", "cpu", "grad_hidden") in finding.failing


def test_the_table_names_the_root():
    relation = row("a", "relation: x2", "disagree", headroom=None, gate="relation", gates={"relation": None})
    (line,) = summary(relation, row("a", "loss", "disagree")).lines
    assert wording.at(line.worst) == "loss norm"


def test_a_protocol_leak_is_a_finding_of_its_own():
    s = summary(row("a", "loss", "disagree"), row("a", "protocol", "disagree", gate="protocol"))
    assert {f.roots for f in s.findings} == {("loss",), ("protocol",)}


def test_fewer_gradients_asked_for_is_the_same_finding():
    s = summary(
        row("a"),
        row("a", "grad_hidden", "disagree"),
        row("a", "grad_weight", "disagree"),
        row("b"),
        row("b", "grad_weight", "disagree"),
    )
    (finding,) = s.findings
    assert (finding.roots, finding.cases) == (("grad_hidden", "grad_weight"), 2)


def test_a_gradient_that_agrees_elsewhere_is_another_finding():
    s = summary(
        row("a", "grad_hidden", "disagree"),
        row("a", "grad_weight", "disagree"),
        row("b", "grad_hidden"),
        row("b", "grad_weight", "disagree"),
    )
    assert {f.roots for f in s.findings} == {("grad_hidden", "grad_weight"), ("grad_weight",)}


def test_part_of_a_case_known_and_part_new():
    s = summary(row("a", "loss", "disagree", known="K1"), row("a", "kl", "disagree"))
    assert [f.roots for f in s.findings] == [("kl",)]
    assert [f.known for f in s.known] == ["K1"]
    assert [r.quantity for r in s.findings[0].rows] == ["kl"], "the known failure is not this finding's"


def test_the_smallest_case_speaks():
    s = summary(
        row("large", verdict="disagree", settings={"V": 900}),
        row("small", verdict="disagree", settings={"V": 2}),
        row("middle", verdict="disagree", settings={"V": 20}),
    )
    assert s.findings[0].lead.case == "small"
    assert s.findings[0].cases == 3
    s = summary(row("small", verdict="disagree"), row("big", verdict="disagree", settings={"V": 99}, minimised=True))
    assert s.findings[0].lead.case == "big", "a minimised case comes with its file"


def test_logic_in_one_case_is_logic():
    s = summary(row("a", verdict="disagree", **{"class": "precision"}), row("b", verdict="disagree"))
    (finding,) = s.findings
    assert (finding.lead.cls, finding.classes) == ("logic", {"precision": 1, "logic": 1})


def test_crashes_group_by_message():
    s = summary(
        row("a", None, "crashed", message="IndexError: 7 is out of range"),
        row("b", None, "crashed", message="IndexError: 12 is out of range"),
        row("c", None, "crashed", message="KeyError: 'x'"),
        row("d", None, "out-of-memory", message="needs 3 GiB"),
    )
    assert sorted(f.cases for f in s.findings) == [1, 1, 2]
    assert all(f.roots == () for f in s.findings)


DIED = "the process ended (killed by signal 11)"
ALONE = "; not known whose fault: no reference ran this case"


def test_one_cause_is_one_finding_whatever_pass_it_ended_and_whoever_ran_beside_it():
    """Three findings were made of it, and the smallest case said that nobody is to blame."""
    s = summary(
        row("a", None, "crashed", message=f"{DIED}, in its forward pass{ALONE}", settings={"V": 2}),
        row("b", None, "crashed", message=f"{DIED}, in its backward pass", settings={"V": 9}, blame="candidate"),
        row("c", None, "crashed", message=f"{DIED}, in its forward pass", settings={"V": 8}, blame="candidate"),
        row("d", None, "crashed", message="the process ended (exit code 7), in its forward pass", blame="candidate"),
    )
    finding = next(f for f in s.findings if f.cases == 3)
    assert len(s.findings) == 2 and (finding.lead.case, finding.lead.blame) == ("c", "candidate")
    assert wording.spread(finding).endswith(
        "wrong: candidate in 2, not known who in 1 · 2 in its forward pass, 1 in its backward pass"
    )
    assert wording.ended(finding.lead) == f"{DIED}, in its forward pass"


def test_one_cause_in_two_dtypes_is_one_finding():
    said = "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::%s != float"
    found = summary(
        row("a", None, "crashed", message=said % "BFloat16", dtype="bf16"),
        row("b", None, "crashed", message=said % "Half", dtype="fp16"),
        row("c", None, "crashed", message="RuntimeError: expected m1 and m2 to have the same shape"),
    ).findings
    assert sorted((f.cases, f.dtypes) for f in found)[1] == (2, ("bf16", "fp16")) and len(found) == 2


def test_who_is_wrong_is_counted_over_all_cases():
    s = summary(
        row("small", verdict="disagree", blame="reference", settings={"V": 2}),
        row("b", verdict="disagree", blame="candidate", settings={"V": 9}),
        row("c", verdict="disagree", blame="candidate", settings={"V": 9}),
    )
    assert "wrong: reference in 1, candidate in 2" in wording.spread(s.findings[0])
    (finding,) = summary(row("a", verdict="disagree", blame="candidate")).findings
    assert "wrong:" not in wording.spread(finding)


def test_a_finding_says_what_it_costs_of_the_gradient():
    def off(case, dist, **fields):
        return row(case, "grad_weight", "disagree", dist=dist, value_oracle=2.0, **fields)

    (found,) = summary(off("a", 0.5), off("b", 0.01), off("c", 0.002)).findings
    assert wording.spread(found).endswith("gradient off by 0.5 % of its norm, at worst 25 %")
    (found,) = summary(off("a", 50.0)).findings
    assert wording.spread(found).endswith("gradient off by 2.5e+03 % of its norm")
    (found,) = summary(off("a", 0.0, gate="structure")).findings  # the distance leaves out what is not finite
    assert "gradient off" not in wording.spread(found)


def test_a_row_about_the_run_is_no_case():
    pooled = row("pooled over 50 cases", "pooled slope: loss", "disagree", gate="pooled slope")
    pooled.settings = {}
    s = summary(row("a"), pooled)
    assert s.counts.total == 1
    assert s.lines[0].verdict == "disagree"
    assert s.findings[0].roots == ("pooled slope: loss",)


def test_coverage_counts_what_was_compared():
    s = summary(
        row("a", settings={"beta": 0.1}),
        row("a", "grad_hidden", settings={"beta": 0.1}),
        row("b", settings={"delta": 2.0, "V": 9}),
        row("c", settings={"beta": 0.5, "holes": True}),
        row("d", None, "unsupported", settings={"softcap": 5.0, "holes": True}),
    )
    (found,) = s.coverage
    by_name = {d.name: d for d in found.dimensions}
    assert found.compared == 3
    assert by_name["beta"].share == pytest.approx(2 / 3)
    assert (by_name["beta"].exercised, by_name["beta"].values) == (2, 3)
    assert (by_name["holes"].drawn, by_name["holes"].exercised) == (2, 1)
    assert (by_name["softcap"].drawn, by_name["softcap"].exercised) == (1, 0)
    assert [d.name for d in found.unexercised] == ["B", "H", "T", "softcap"]
    assert found.pairs == 6
    assert found.never == (("V", "beta"), ("V", "holes"), ("beta", "delta"), ("delta", "holes"))


def test_pairs_are_counted_for_each_implementation_within_what_it_takes():
    rows = [
        row("a", settings={"beta": 0.1}),
        row("b", settings={"delta": 2.0}),
        row("a", settings={"beta": 0.1, "delta": 2.0}),
        row("c", None, "unsupported", settings={"softcap": 5.0, "beta": 0.1}),
    ]
    for one, name in zip(rows, ("x.wide", "x.wide", "y.narrow", "y.narrow"), strict=True):
        one.implementation = name
    s = summary(*rows)
    assert {name: (own.pairs, own.never) for name, own in s.takers.items()} == {
        "x.wide": (1, (("beta", "delta"),)),
        "y.narrow": (1, ()),
    }
    (family,) = s.coverage
    assert family.never == ()


def test_pairs_that_an_implementation_does_not_run_with_are_not_owed():
    rows = [row("a", settings={"beta": 0.1}), row("b", settings={"delta": 2.0}), row("c", settings={"holes": True})]
    pairs = [("beta", "delta", "one at a time"), ("B", "beta", "said of what is never away")]
    part = Part(name="policy pairs", cases=1, apart={rows[0].implementation: pairs})
    s = summarise(replace(HEADER, parts=[part]), rows)
    (own,), (family,) = s.takers.values(), s.coverage
    for found in (own, family):
        assert (found.pairs, found.never) == (2, (("beta", "holes"), ("delta", "holes")))
        assert found.apart == (("beta", "delta", "one at a time"),)
    part = Part(name="policy pairs", cases=1, apart={rows[0].implementation: [("holes", "", "refused alone")]})
    s = summarise(replace(HEADER, parts=[part]), rows)
    assert s.takers[rows[0].implementation].never == (("beta", "delta"),)
    wide = dataclasses.replace(own, apart=())
    assert shared([own, wide]) == [] and shared([own]) == list(own.apart)
    assert shared([own, dataclasses.replace(wide, dimensions=())]) == list(own.apart)


def test_shapes_at_their_default_are_not_away():
    (found,) = summary(row("a")).coverage
    assert len(found.unexercised) == len(DIMENSIONS["policy"])


def test_reasons_have_shares():
    s = summary(
        row("a", None, "unsupported", message="needs 30 GiB"),
        row("b", None, "unsupported", message="needs 31.5 GiB"),
        row("c", None, "unsupported", message="dtype fp16 is not among fp32", implementation="lib.other"),
        row("d", None, "unsupported", message="dtype bf16 is not among fp32", implementation="lib.other"),
        row("e", None, "refused", message="ValueError"),
    )
    told = [(r.verdict, r.message, r.count, r.share) for r in s.reasons]
    assert told[0] == ("unsupported", "needs 30 GiB", 2, 0.5)
    assert {t[1] for t in told[1:3]} == {"dtype fp16 is not among fp32", "dtype bf16 is not among fp32"}
    assert told[3] == ("refused", "ValueError", 1, 1.0)


def test_nothing_at_all():
    s = summarise(Header(run="r", header=About()), [])
    assert s.counts.total == 0
    assert wording.outcome(s) == "no new findings, 0 known"


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.0001, "<1 %"), (0.5, "50 %"), (0.9999, ">99 %"), (1, "100 %")]
)
def test_shares_never_round_to_all_or_nothing(share, text):
    assert wording.percent(share) == text


def test_what_a_function_should_take_first():
    """Greedily: what opens most by itself, then what opens most beside it; nothing is counted twice."""
    needs = ["bias"] * 5 + ["bias, softcap"] * 4 + ["softcap"] * 2 + ["beta, delta"] * 3 + ["delta, softcap"]
    found = [
        row(f"c{k}", None, "unsupported", implementation="my.py:f", message=f"f has no parameter {names}")
        for k, names in enumerate(needs)
    ]
    found += [row(f"d{k}", "loss", "agree", implementation="my.py:f") for k in range(5)]
    found.append(row("e", None, "unsupported", implementation="my.py:f", message="context autocast is not supported"))
    (told,) = summarise(HEADER, found).openings
    assert (told.cases, told.unsupported) == (21, 15)
    assert told.steps == (("bias", 5), ("softcap", 6), ("delta", 1), ("beta", 3))
    assert wording.openings(told, most=2) == (
        "my.py:f: 71 % of its cases need other parameters; add first bias (+24 %), softcap (+29 %), and 2 more"
    )
    printed = " ".join(text for text, _ in brief.closing(summarise(HEADER, found), 100, 0, [], Path()))
    assert "add first bias (+24 %), softcap (+29 %), delta (+5 %), beta (+14 %)" in " ".join(printed.split())
    reasons = {r.message: r.count for r in summarise(HEADER, found).reasons}
    assert reasons == {"f has no parameter for what the case moves": 15, "context autocast is not supported": 1}
