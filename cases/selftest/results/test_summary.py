"""Counting: implementation-cases, findings."""

import math

import pytest
from msgspec.structs import replace

from cases.selftest.results.runs import HEADER, row, summary
from parity.results.report import wording
from parity.results.report.findings import headroom
from parity.results.row import Asked


def test_a_known_crash_is_said_to_be_known():
    rows = [row("a", None, "crashed"), row("b", None, "crashed", known="K1"), row("c", None, "timed-out")]
    assert wording.counts(summary(*rows).counts) == "0 compared · 0 agree · 2 crashed (1 known) · 1 timed-out"


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
    said = "4 compared · 1 agree · 1 known · 1 nondeterministic · 1 disagree · 1 refused · 1 unsupported · 1 crashed"
    assert wording.counts(c) == f"{said} · 1 timed-out · 1 out-of-memory"


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
    assert s.notes[0].startswith("1 of the new findings are shown as drawn")
    alone = "run one --implementation alone"
    for asked, told in [((), True), (("lib.loss", "lib.other"), True), (("lib.loss",), False)]:
        header = replace(HEADER, header=replace(HEADER.header, asked=Asked(implementations=asked)))
        assert (alone in summary(drawn, small, header=header).notes[0]) is told
    assert summary(drawn, row("d", verdict="disagree", minimised=True)).notes == (), "a smaller case is shown"
    assert summary(small, frozen).notes == ()


def test_the_table_says_where_it_is_tightest():
    s = summary(row("a"), row("a", "grad_hidden", headroom=0.9, gate="row"), row("b", dtype="bf16"))
    fp32, bf16 = s.lines
    assert (fp32.dtype, fp32.worst.headroom, wording.at(fp32.worst)) == ("fp32", 0.9, "grad_hidden, gate row")
    assert bf16.counts["compared"] == 1


def test_a_new_finding_beside_a_known_one_is_the_verdict():
    s = summary(row("a", verdict="disagree", known="K1"), row("b", verdict="disagree"))
    assert s.lines[0].verdict == "disagree"
    assert wording.verdict_of(s.lines[0]) == "DISAGREE; known: K1"
    assert (len(s.findings), len(s.known)) == (1, 1)


def test_a_failure_without_a_size_is_infinite():
    s = summary(row("a", "relation: x2", "disagree", headroom=None, gate="relation"))
    assert headroom(s.findings[0].worst) == math.inf
    assert headroom(s.lines[0].worst) == math.inf
    assert wording.at(s.findings[0].lead) == "relation: x2"


BOTH = [("a", "grad_hidden"), ("a", "grad_weight")]


@pytest.mark.parametrize(
    ("wrong", "right", "roots"),
    [
        ([("a", "loss"), ("a", "grad_hidden"), ("a", "relation: x2")], [], {("loss",): 1}),
        ([("a", "loss"), ("a", "protocol")], [], {("loss",): 1, ("protocol",): 1}),
        ([*BOTH, ("b", "grad_weight")], [("a", "loss"), ("b", "loss")], {("grad_hidden", "grad_weight"): 2}),
        (
            [*BOTH, ("b", "grad_weight")],
            [("b", "grad_hidden")],
            {("grad_hidden", "grad_weight"): 1, ("grad_weight",): 1},
        ),
    ],
    ids=["wrong gradients", "a protocol leak", "fewer gradients asked for", "a gradient that agrees elsewhere"],
)
def test_a_finding_is_what_its_failure_starts_in(wrong, right, roots):
    """A wrong value makes wrong gradients; a protocol leak is a finding of its own."""
    rows = [row(*one, "disagree", gate="protocol" if one[1] == "protocol" else "norm") for one in wrong]
    found = summary(*rows, *(row(*one) for one in right)).findings
    assert {f.roots: f.cases for f in found} == roots


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


def test_logic_speaks_before_what_is_farther_off_and_the_worst_case_for_all():
    (finding,) = summary(
        row("a", "loss", "disagree", cls="precision", headroom=50.0),
        row("a", "entropy", "disagree", headroom=3.0),
        row("b", "loss", "disagree", headroom=9.0),
        row("b", "entropy", "disagree", headroom=2.0),
    ).findings
    assert [(p.lead.quantity, p.lead.headroom) for p in finding.parts] == [("entropy", 3.0), ("loss", 9.0)]
    assert (finding.worst.case, finding.worst.headroom) == ("b", 9.0)


def test_logic_in_one_case_is_logic():
    s = summary(row("a", verdict="disagree", cls="precision"), row("b", verdict="disagree"))
    (finding,) = s.findings
    assert (finding.lead.cls, finding.classes) == ("logic", {"precision": 1, "logic": 1})


DIED = "the process ended (killed by signal 11)"
ALONE = "; whose fault is not known: no reference ran this case"


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
    assert wording.spread(finding).endswith("wrong: candidate in 2, not known who in 1")


DTYPES = "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::%s != float"


@pytest.mark.parametrize(
    ("stopped", "cases"),
    [
        (("IndexError: 7 is out of range", "IndexError: 12 is out of range", "KeyError: 'x'"), [1, 2]),
        ((DTYPES % "BFloat16", DTYPES % "Half", "RuntimeError: expected m1 and m2 to have the same shape"), [1, 2]),
        (("needs 3 GiB", "KeyError: 'x'"), [1, 1]),
    ],
)
def test_one_cause_is_one_finding_whatever_its_numbers_and_dtypes(stopped, cases):
    kinds = [(message, "out-of-memory" if "GiB" in message else "crashed") for message in stopped]
    found = summary(*(row(m, None, kind, message=m) for m, kind in kinds)).findings
    assert sorted(f.cases for f in found) == cases and all(f.roots == () for f in found)


def test_a_finding_says_what_it_costs_of_the_gradient():
    def off(case, dist, **fields):
        return row(case, "grad_weight", "disagree", **{"dist": dist, "value_oracle": 2.0} | fields)

    unknown = off("d", None), off("e", 1.0, value_oracle=None), off("f", 1.0, value_oracle=0.0)
    (found,) = summary(off("a", 0.5), off("b", 0.01), off("c", 0.002), *unknown).findings
    assert wording.spread(found).endswith("gradient off by 0.5 % of its norm, at worst 25 %")
    (found,) = summary(off("a", 50.0)).findings
    assert wording.spread(found).endswith("gradient off by 2.5e+03 % of its norm")
    (found,) = summary(off("a", 0.0, gate="structure")).findings  # the distance leaves out what is not finite
    assert "gradient off" not in wording.spread(found)


def test_a_row_about_the_run_is_no_case():
    pooled = row("pooled over 50 cases", "pooled slope: loss", "disagree", gate="pooled slope")
    pooled.settings = {}
    s = summary(row("a"), pooled)
    assert s.counts["compared"] == 1
    assert s.lines[0].verdict == "disagree"
    assert s.findings[0].roots == ("pooled slope: loss",)


def test_reasons_are_counted():
    s = summary(
        row("a", None, "unsupported", message="needs 30 GiB"),
        row("b", None, "unsupported", message="needs 31.5 GiB"),
        row("c", None, "unsupported", message="dtype fp16 is not among fp32", implementation="lib.other"),
        row("d", None, "unsupported", message="dtype bf16 is not among fp32", implementation="lib.other"),
        row("e", None, "refused", message="ValueError"),
    )
    told = [(r.verdict, r.message, r.count) for r in s.reasons]
    assert told[0] == ("unsupported", "needs 30 GiB", 2)
    assert {t[1] for t in told[1:3]} == {"dtype fp16 is not among fp32", "dtype bf16 is not among fp32"}
    assert told[3] == ("refused", "ValueError", 1)


def test_an_adapter_that_fails_by_itself_is_a_note():
    said = "the adapter lib.loss does not fit this version: TypeError: x"
    failed = [row(case, None, "unsupported", message=said, blame="harness") for case in "ab"]
    s = summary(*failed, row("c"), row("d", None, "unsupported", message="no bias"))
    assert s.notes == (f"not compared, 2 times: {said}",)


def test_the_parameters_that_a_function_lacks_are_one_reason_and_a_note_that_counts_them():
    needs = ["bias"] * 5 + ["bias, softcap"] * 4 + ["beta, delta"]
    found = [row(f"c{k}", None, "unsupported", message=f"f has no parameter {names}") for k, names in enumerate(needs)]
    s = summary(*found, row("e", None, "unsupported", message="context autocast is not supported"))
    lacks = "cases that need parameters which it has not"
    assert s.notes == (f"lib.loss: {lacks}: bias (9), softcap (4), beta (1), delta (1)",)
    assert {r.message: r.count for r in s.reasons} == {
        "f has no parameter for what the case moves": 10,
        "context autocast is not supported": 1,
    }


def test_a_trainer_with_a_loss_of_its_own_is_told_so_once():
    """A subclass with another formula had eight findings, none of which said that the formula is another."""

    def of(name, *verdicts):
        more = {"family": "dpo-trainer", "implementation": name}
        rows = [row(f"dpo-trainer-{n}", "loss", verdict, **more) for n, verdict in enumerate(verdicts)]
        return " ".join(summary(*rows).notes)

    assert "my.py:Mine: its loss is not the dpo-trainer's in any of 3 cases" in of("my.py:Mine", *["disagree"] * 3)
    assert of("my.py:Mine", "disagree", "disagree", "agree") == of("my.py:Mine", *["disagree"] * 2) == ""
    assert of("dpo-trainer.released", *["disagree"] * 3) == ""
