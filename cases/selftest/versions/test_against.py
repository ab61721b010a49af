"""A run beside one of another revision: `parity report --against`."""

import pytest
from click.testing import CliRunner

from cases.selftest.results.runs import about, changed, in_order, row
from parity.cli.commands import main
from parity.results.report.rows import Writer, rewrite
from parity.results.row import Part, Parted

OTHER = {"implementation": "lib.other"}


def report(folder, base, now, **other):
    for day, (name, rows) in enumerate({"base": base, "now": now}.items()):
        rewrite(folder / name, about(1 - day, **(other if day else {})), rows)  # the base ran later
        with Writer(folder / name, append=True) as write:
            part = Part(name="policy drawn 0.0", cases=1, seconds=10.0 + 30 * day)
            write(Parted(part=part, run=f"run{1 - day}"))
    return CliRunner().invoke(main, ["report", str(folder / "now"), "--against", str(folder / "base")])


def test_new_mended_and_moved(tmp_path):
    wrong = {"verdict": "disagree", "headroom": 9.0}
    base = [row(), row("policy-2", **wrong, **OTHER), row("policy-3", quantity="kl", headroom=0.3, value=1.0)]
    now = [row(**wrong), row("policy-2", **OTHER), row("policy-3", quantity="kl", headroom=0.9, value=1.0)]
    done = report(tmp_path, base, now, versions={"trl": "1.17.0"})
    assert done.exit_code == 0, done.output
    head = "1 new, 1 mended", "CPU time 10 s before, 40 s after"
    new = "trl 1.16.0 → 1.17.0", "### New", "logic in loss", "`lib.loss`", "`parity replay policy-1`"
    in_order(done.stdout, *head, *new, "### Mended", "`lib.other`")
    assert "| worse | `lib.loss` | fp32 | loss | 0.25 | 9.00 | 1 | `policy-1` |" in done.stdout
    assert "| better | `lib.other` | fp32 | loss | 9.00 | 0.25 | 1 | `policy-2` |" in done.stdout
    assert "|  | `lib.loss` | fp32 | kl | 0.30 | 0.90 | 1 | `policy-3` |" in done.stdout


def test_a_trainer_that_is_wrong_on_two_paths_is_told_once_and_each_that_is_new(tmp_path):
    two = [row("dpo-trainer-1", family="dpo-trainer", implementation=f"dpo-trainer.{p}") for p in ("fixed", "released")]
    wrong = changed(two, verdict="disagree", headroom=9.0)
    assert "1 new, 0 mended\n" in report(tmp_path, two, wrong).stdout
    assert "0 new, 1 mended\n" in report(tmp_path, wrong, two).stdout
    assert "1 new, 0 mended, 1 new before too\n" in report(tmp_path, [two[0], wrong[1]], wrong).stdout


def test_what_is_the_same_is_not_said_and_a_case_of_one_run_is_not_compared(tmp_path):
    still = row(verdict="disagree")
    done = report(tmp_path, [still, row("policy-8", **OTHER)], [still, row("policy-9", **OTHER)])
    assert "0 new, 0 mended, 1 new before too" in done.stdout and "Nothing moved." in done.stdout, done.output


def test_a_mended_finding_of_what_still_fails_says_so(tmp_path):
    base = [row(verdict="disagree"), row("policy-2", quantity="kl", verdict="disagree")]
    done = report(tmp_path, base, [base[0], row("policy-2", quantity="kl")])
    assert "logic in kl · `lib.loss` · not seen; its implementation still fails" in done.stdout


def test_a_run_beside_itself_has_nothing_new(tmp_path):
    report(tmp_path, [row(verdict="disagree")], [row(verdict="disagree")])
    done = CliRunner().invoke(main, ["report", str(tmp_path / "now"), "--against", str(tmp_path / "now")])
    assert "0 new, 0 mended, 1 new before too" in done.stdout


@pytest.mark.parametrize("other", [{"profile": "pr"}, {"device": "cuda"}])
def test_runs_without_common_cases_are_refused(tmp_path, other):
    done = report(tmp_path, [row()], [row()], **other)
    assert done.exit_code == 2 and "cannot be compared" in done.output
