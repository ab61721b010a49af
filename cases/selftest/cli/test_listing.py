"""`parity list` and `doctor`: tables that fit a terminal."""

import re

import pytest
from click.testing import CliRunner

from cases.selftest.results.runs import HEADER, row
from parity import registry
from parity.cli import commands
from parity.results.report.rows import Writer


def printed(*words, width="80"):
    return CliRunner(env={"COLUMNS": width}).invoke(commands.main, words)


def test_ids_are_whole_and_lines_fit():
    done = printed("list")
    lines = done.output.splitlines()
    assert done.exit_code == 0 and max(map(len, lines)) <= 80
    ids = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert set(ids) == set(registry.load()) and len(ids) > 50
    assert re.search(r"^  trl.GRPOTrainer +reference +trl \d", done.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--family", "policy,logprobs"], "liger.cross_entropy"),
        (["--settings", "policy"], "grpo, bnpo"),
        (["--settings", "policy"], "tool_mask (B, T)"),
        (["--settings", "divergence"], "support_logps (B, T, …)"),
        (["--settings", "logprobs"], "returns logps, or (logps, {name: value}) with any of: entropy"),
        (["--settings", "divergence"], "beta = 0: KL(q‖p) beta = 1: KL(p‖q)"),
        (["--settings", "dpo-trainer"], "alpha_divergence"),
        (["--checks", "gkd-trainer"], "run as: released"),
    ],
)
def test_each_section_is_a_table(words, says):
    table = printed("list", *words)
    assert says in " ".join(table.output.split()) and max(map(len, table.output.splitlines())) <= 80


def test_a_results_file_answers_which_implementation_agrees_with_which_setting(tmp_path):
    """`delta` is ignored by one, beside `epsilon` too; the other has no parameter for it."""
    wrong = {"verdict": "disagree", "settings": {"V": 7, "delta": 1.8}}
    both = wrong | {"settings": {"V": 7, "delta": 1.8, "epsilon": 0.1}, "known": "entry"}
    declined = {"verdict": "unsupported", "quantity": None, "implementation": "other.loss"}
    with Writer(tmp_path / "run.ndjson") as write:
        write(HEADER)
        for one in (
            row("a", **wrong),
            row("a", quantity="grad_hidden", **wrong | {"verdict": "agree"}),
            row("b", **both),
            row("c", settings={"V": 7, "epsilon": 0.1}),
            row("c", implementation="other.loss", settings={"V": 7, "epsilon": 0.1}),
            row("a", **wrong | declined),
        ):
            write(one)
    assert printed("list", "--settings", str(tmp_path / "run.ndjson")).output.splitlines() == [
        *("policy: lib.loss", "  disagree: delta 2 of 2 (1 new), epsilon 1 of 2"),
        *("policy: other.loss", "  agree: epsilon 1", "  not taken: delta"),
    ]
