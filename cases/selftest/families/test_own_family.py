"""A family that is one file, fixtures/rms_norm.py, goes through every command: nothing else knows its name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import venv
from pathlib import Path

import pytest

from cases.selftest.nightly.test_action import ROOT, gate
from parity import registry
from parity.case.case import Case
from parity.errors import UsageError
from parity.registry import resolved
from parity.results.report.rows import read
from parity.versions import compare, look
from parity.versions.environment import Environment
from parity.versions.row_diff import differences, side

FILE = ROOT / "fixtures" / "rms_norm.py"
FAMILY, RIGHT, WRONG = f"{FILE}:FAMILY", f"{FILE}:right", f"{FILE}:wrong"

LEDGER = f"""
[[finding]]
id = "eps-ignored"
family = "rms_norm"
implementations = ["{WRONG}"]
quantities = ["y", "grad_x"]
reason = "eps is always 1e-6, whatever the caller asks for"
link = "fixtures/rms_norm.py"
date = "2026-11-22"
case = "case.json"
"""


@pytest.fixture(scope="module")
def name() -> str:
    return resolved(FAMILY)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the action's script: the folder of its job, how it ended, and the rows."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "ledger.toml").write_text(LEDGER)
    frozen = Case("rms_norm", 5, "fp32", {"eps": 0.3})
    (folder / "case.json").write_text(json.dumps(frozen.to_json()))
    asked = f"--dtype fp32 --device cpu --workers 1 --no-minimise --ledger ledger.toml --family {FAMILY}"
    done = gate(folder, PARITY_ARGUMENTS=asked, PARITY_IMPLEMENTATIONS=f"{RIGHT}\n{WRONG}\n")
    return folder, done, read(folder / "reports/results.ndjson")[1]


def test_a_run_judges_it_in_worker_processes_and_knows_its_ledger(run):
    _, done, rows = run
    assert done.returncode == 1, done.stdout + done.stderr
    right, wrong = ([r for r in rows if r.implementation == id and r.judged] for id in (RIGHT, WRONG))
    assert len({r.case for r in right}) > 50, "60 by its record, less those in a context that it does not claim"
    assert {r.verdict for r in right} == {"agree"}
    failing = [r for r in wrong if r.verdict == "disagree"]
    assert {r.quantity for r in failing} == {"y", "grad_x", "grad_weight"}
    assert all((r.known == "eps-ignored") == (r.quantity != "grad_weight") for r in failing)
    assert "no longer reproduces" not in done.stdout


def test_every_report_shows_it(run):
    folder, done, _ = run
    reports = (folder / "reports" / name for name in ("index.html", "summary.md", "junit.xml"))
    for text in (done.stdout, (folder / "summary").read_text(), *(report.read_text() for report in reports)):
        assert WRONG in text
    assert (folder / "output").read_text() == "exit-code=1\n"


def test_two_environments_are_compared_on_it(name, tmp_path):
    """The same environment twice; between the two looks the user's file changes."""
    made = environment(tmp_path / "env")
    file = shutil.copy(FILE, tmp_path / "own.py")
    wanted = [f"{file}:right"]
    frozen = compare.cases([RIGHT])
    assert {case.family for _, case in frozen} == {name} and len(frozen) == 6
    looks = [look.look(made, [case for _, case in frozen], wanted).rows]
    Path(file).write_text(Path(file).read_text().replace("(-1, keepdim=True) + eps) * w", "(-1, keepdim=True)) * w"))
    looks.append(look.look(made, [case for _, case in frozen], wanted).rows)
    different = differences(*(side(rows, frozen) for rows in looks))
    assert {m.quantity for m in different if m.mark == "+"} == {"y", "grad_x", "grad_weight"}
    assert not any(m.mark == "-" for m in different)


def environment(root: Path) -> Environment:
    """This very interpreter with its packages, as an environment."""
    venv.create(root, symlinks=True)
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(os.path.dirname(os.path.dirname(pytest.__file__)))
    return Environment(root, {}, {})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RIGHT, "is a function, expected a parity.case.family.Family"),
        (f"{FILE}:GONE", "no 'GONE'"),
        ("rlhf", "family 'rlhf' is unknown.*logprobs, policy"),
    ],
)
def test_what_is_no_family_is_one_line(spec, words):
    with pytest.raises(UsageError, match=words):
        resolved(spec)


def test_its_name_is_its_own():
    one = registry.loss_family(resolved(FAMILY))
    for taken in ("policy", "grpo-trainer"):
        with pytest.raises(UsageError, match="exists already"):
            registry.add_family(dataclasses.replace(one, name=taken))
