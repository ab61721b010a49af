"""The script behind the action hands on the exit code and the summary; the workflow files say what the commands take."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.cli.commands import main

ROOT = Path(__file__).parents[3]
GATE = ROOT / ".github" / "actions" / "parity" / "gate.sh"


def gate(folder, **settings):
    """The script in a folder, as a job of another repository runs it."""
    given = {"PARITY_PYTHON": sys.executable, "PARITY_PROFILE": "quick"}
    given |= {"PARITY_ARGUMENTS": "--dtype fp32 --workers 1"}
    given |= {"GITHUB_STEP_SUMMARY": str(folder / "summary"), "GITHUB_OUTPUT": str(folder / "output")} | settings
    return subprocess.run(
        ["bash", str(GATE)], cwd=folder, env=os.environ | given, capture_output=True, text=True, timeout=500
    )


PARITY = """#!/bin/sh
case "$*" in
  *" run "*) mkdir -p reports; echo the summary > reports/summary.md; exit 1;;
  *" report reports/results.ndjson --against base") [ ! -f broken ] || exit 2; echo what changed;;
esac
"""
GH = """#!/bin/sh
case "$*" in
  *--paginate*) cat ids 2>/dev/null || true;;
  *) for word; do file=${word#body=@}; done; echo "$*" >> told; cat "$file" >> told; [ ! -f forbidden ];;
esac
"""


@pytest.mark.parametrize(
    ("files", "call", "said"),
    [
        ([], "repos/a/b/issues/7/comments", "the summary"),
        (["base"], "repos/a/b/issues/7/comments", "what changed"),
        (["base", "ids"], "-X PATCH repos/a/b/issues/comments/31", "what changed"),
        (["base", "broken"], "repos/a/b/issues/7/comments", "the summary"),
        (["forbidden"], "repos/a/b/issues/7/comments", "the summary"),
    ],
    ids=["first", "against", "kept", "broken", "forbidden"],
)
def test_a_pull_request_has_one_comment(tmp_path, files, call, said):
    for name, text in {"parity": PARITY, "gh": GH}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in files:
        (tmp_path / name).write_text("31\n32\n")
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PARITY_PYTHON": str(tmp_path / "parity")}
    asked = {"PARITY_PULL_REQUEST": "7", "PARITY_BASE": "base", "GITHUB_REPOSITORY": "a/b"}
    done = gate(tmp_path, PARITY_IMPLEMENTATIONS="kernel.py:loss", **path, **asked)
    told = (tmp_path / "told").read_text()
    assert told == f"api --silent {call} -F body=@reports/comment.md\n<!-- parity -->\n{said}\n"
    assert done.returncode == 1, "that of the run"
    assert ("the comment was not written" in done.stderr) == ("forbidden" in files), done.stderr


@pytest.mark.parametrize("named", ["", "   \n\n"])
def test_nothing_named_is_wrong_usage(tmp_path, named):
    done = gate(tmp_path, PARITY_IMPLEMENTATIONS=named)
    assert done.returncode == 2 and "FILE.py:NAME" in done.stderr


def test_the_workflow_names_options_that_exist():
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    for command, words in re.findall(r"bin/parity ([a-z-]+) ([^\n|]*)", text):
        known = CliRunner().invoke(main, [command, "--help"])
        assert known.exit_code == 0, command
        for option in re.findall(r"--[a-z-]+", words):
            assert option in known.output, f"{command} {option}"
