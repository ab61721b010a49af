"""Kernels of others: what the judge says of mistakes in every operation, and that each script of a finding shows it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases.selftest.judge import kernel_mutants
from parity.testing import check_parity

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "cases/scripts/kernels"
SCRIPTS = sorted(KERNELS.glob("*-*.py"))
PAGE = (ROOT / "docs/measured/kernels.md").read_text()


def run(*words):
    return subprocess.run([sys.executable, *map(str, words)], cwd=KERNELS, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernel_mutants.DTYPES)
@pytest.mark.parametrize("name", kernel_mutants.OPERATIONS)
def test_every_mistake_is_caught_and_no_right_call(name, dtype):
    assert kernel_mutants.survivors(name, dtype) == []
    assert kernel_mutants.alarms(name, dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_shows_its_finding(script):
    done = run(script.relative_to(KERNELS))
    assert done.returncode == 1 and done.stdout.startswith("| "), done.stderr[-2000:]
    assert script.stem in PAGE


def test_modules_of_transformers_are_definitions():
    done = run("transformers_modules.py")
    assert done.returncode == 0 and done.stdout.count("| float") == 10, done.stdout + done.stderr[-2000:]


def test_tests_of_liger_are_judgements_of_a_line():
    options = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", "/dev/null"]
    done = run("-m", "pytest", *options, "liger_tests.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_kernels_of_others_are_judged_by_a_script():
    done = run("judge_kernels.py", "1", "softmax", "group_norm")
    rows = re.findall(r"^\| (\w+ \w+) \| (\w+) \| 1 \| (\d) \|", done.stdout, re.MULTILINE)
    dtypes = 3 + (3 if torch.cuda.is_available() else 2)  # Liger's kernels take bf16 on CUDA alone
    assert len(rows) == 2 * dtypes and ("Liger group_norm", "fp16", "1") in rows, done.stdout + done.stderr[-2000:]


def test_every_mistake_is_caught_in_one_operation():
    for mutant in kernel_mutants.MUTANTS:
        assert kernel_mutants.killed("moe_combine", mutant, "fp32"), mutant


@pytest.mark.parametrize("offset", [1, 63, 64, 65, 1000])
def test_a_function_sees_an_uneven_offset_as_it_is(offset):
    seen = []
    x = torch.arange(1100.0)[offset : offset + 8]
    check_parity(lambda x: (seen.append(x.storage_offset()), x.exp())[1], lambda x: x.exp(), {"x": x}, protocol="none")
    assert seen[0] % 64 == offset % 64 and seen[0] > 0
