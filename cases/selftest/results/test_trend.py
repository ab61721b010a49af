"""Findings over many runs: since when, mended when, by release; and the page of them."""

import pytest
from click.testing import CliRunner

from cases.selftest.results.runs import BAD, GOOD, changed, in_order, night, row
from parity.cli.commands import main
from parity.results import trend

KNOWN = [row("policy-9", implementation=f"lib.{n}", verdict="disagree", known="severe") for n in "ab"]
OLD, NEW = {"trl": "1.16.0"}, {"trl": "1.17.0"}


@pytest.fixture
def past(tmp_path):
    """Four nights: a known finding; a new one beside it, after a release; that one gone; the known one gone in one of two."""
    history = tmp_path / "history"
    gone = [*changed(KNOWN[:1], verdict="agree", known=None, headroom=0.2), KNOWN[1]]
    nights = [(GOOD + KNOWN, 0, OLD), (BAD + KNOWN, 1, NEW), (GOOD + KNOWN, 0, NEW), (GOOD + gone, 0, NEW)]
    return [night(history, day, rows, code, versions) for day, (rows, code, versions) in enumerate(nights)]


def test_a_story_has_its_first_run_and_the_one_that_mended_it(past):
    known, new = trend.stories(past).values()
    assert (new.known, new.implementations) == (False, ("lib.loss",))
    assert (new.first, new.mended, new.times, new.of) == (past[1], past[2], 1, 4)
    assert (new.brought, new.moved) == ({"trl": ("1.16.0", "1.17.0")}, {})
    assert (known.name, known.implementations, known.times, known.of) == ("severe", ("lib.a", "lib.b"), 4, 4)
    assert known.first == past[0] and known.mended is None, "one of two still has it"


def test_what_was_not_compared_is_not_mended(past, tmp_path):
    """The last night judges nothing of lib.loss."""
    nights = [*past[:2], night(tmp_path / "other", 5, KNOWN, 0, NEW)]
    _, new = trend.stories(nights).values()
    assert new.mended is None and new.of == 2


def test_runs_with_the_same_versions_are_one_release(past):
    assert [(len(runs), moved) for runs, moved in trend.releases(past)] == [(1, {}), (3, {"trl": ("1.16.0", "1.17.0")})]


def test_the_page(past, tmp_path):
    done = CliRunner().invoke(
        main, ["notify", "--reports", str(tmp_path), "--stale", "999999h", "--trend", str(tmp_path / "p/index.html")]
    )
    assert done.exit_code == 0, done.output
    page = (tmp_path / "p/index.html").read_text()
    assert page.count("<rect") == 4 and page.count('class="bad"') == 1
    in_order(page, "By release", "trl 1.17.0", "trl 1.16.0 → 1.17.0", "trl 1.16.0</td>", "Open", "severe", "Mended")
    in_order(page, "Mended", "lib.loss", "2026-11-02", "trl 1.16.0 → 1.17.0", "2026-11-03", "1 of 4")
