"""Kernels of others: what the judge says of mistakes in every operation, and that each script of a finding shows it."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases.selftest.judge.operations import OPERATIONS
from cases.selftest.mutants.steps import through
from parity.testing import check_parity

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "cases/scripts/kernels"
SCRIPTS = sorted(KERNELS.glob("*-*.py"))
PAGE = (ROOT / "docs/measured/kernels.md").read_text()
CASES, LARGEST = 24, 130
DTYPES = ("fp32", "fp16", "bf16")


def floats(given):
    return [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]


def on_outputs(change):
    def mutate(function):
        def mutant(**given):
            out = function(**given)
            many = out if isinstance(out, tuple) else (out,)
            many = tuple(change(o) if o.is_floating_point() and o.numel() else o for o in many)
            return many if isinstance(out, tuple) else many[0]

        return mutant

    return mutate


def on_input(which, change):
    def mutate(function):
        def mutant(**given):
            names = floats(given) if which is None else [floats(given)[which]]
            return function(**given | {n: change(given[n]) for n in names if given[n].numel()})

        return mutant

    return mutate


def without_last(x):
    return torch.cat([x[..., :-1], 0 * x[..., -1:]], -1) if x.dim() else x * 1.01


def without_tail(x):
    kept = x.shape[-1] // 16 * 16
    return torch.cat([x[..., :kept], 0 * x[..., kept:]], -1)


def as_contiguous(x):
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    read = memory[x.storage_offset() : x.storage_offset() + x.numel()]
    return x if read.numel() < x.numel() else x + (read.view(x.shape) - x).nan_to_num().detach()


def from_the_start(x):
    memory = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)[: x.numel()]
    return x + (memory.view(x.shape) - x).nan_to_num().detach() if x.is_contiguous() else x


def swapped_rows(x):
    return torch.cat([x[:32], x[32:].flip(0)]) if x.dim() > 1 and x.shape[0] > 33 else x.flip(0) if x.dim() > 1 else x


MUTANTS = {
    "outputs 1.002 times": on_outputs(lambda o: o * 1.002),
    "last column of an output lost": on_outputs(without_last),
    "gradient of the first input 1.005 times": on_input(0, lambda x: through(x, lambda g: g * 1.005)),
    "gradient of the first input lost": on_input(0, lambda x: x.detach() + 0 * x),
    "gradient of the last input added twice": on_input(-1, lambda x: through(x, lambda g: 2 * g)),
    "gradient transposed to the wrong row": on_input(0, lambda x: through(x, lambda g: g.roll(1, 0))),
    "columns behind the last multiple of 16 lost": on_input(0, without_tail),
    "strides ignored": on_input(0, as_contiguous),
    "storage offset ignored": on_input(0, from_the_start),
    "rows in the wrong order": on_input(0, swapped_rows),
    "upstream gradient limited to 300": on_outputs(lambda o: through(o, lambda g: g.clamp(-300, 300))),
    "inputs rounded to 8 bits": on_input(None, lambda x: x + (x.bfloat16().to(x.dtype) - x).detach()),
}
NOT_WRONG = {("bf16", mutant) for mutant in ("inputs rounded to 8 bits", "outputs 1.002 times")}
NOT_WRONG |= {(d, "gradient of the first input 1.005 times") for d in ("bf16", "fp16")}
"""Within the rounding of a single entry of that dtype: a biased one shows only over many."""


def drawn(name, dtype):
    whole = OPERATIONS[name].drawn
    sizes = {n: (low, min(high, LARGEST)) for n, (low, high) in whole.sizes.items()}
    return dataclasses.replace(whole, sizes=sizes, dtypes=(dtype,)).cases(CASES)


def agrees(function, name, case):
    return case.check_parity(function, OPERATIONS[name].definition, protocol="none").agrees


def killed(name, mutant, dtype):
    """Whether one of the drawn inputs shows the mistake, where right code agrees."""
    right = OPERATIONS[name].all_styles()["wide"]
    wrong = MUTANTS[mutant](right)
    return any(not agrees(wrong, name, c) and agrees(right, name, c) for c in drawn(name, dtype))


def survivors(name, dtype):
    return [m for m in MUTANTS if (dtype, m) not in NOT_WRONG and not killed(name, m, dtype)]


def alarms(name, dtype):
    """Right calls that are called wrong."""
    right = OPERATIONS[name].all_styles()["wide"]
    return [str(c) for c in drawn(name, dtype) if not agrees(right, name, c)]


def run(*words):
    return subprocess.run([sys.executable, *map(str, words)], cwd=KERNELS, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_mistake_is_caught_and_no_right_call(name, dtype):
    assert survivors(name, dtype) == []
    assert alarms(name, dtype) == []


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
    for mutant in MUTANTS:
        assert killed("moe_combine", mutant, "fp32"), mutant


@pytest.mark.parametrize("offset", [1, 63, 64, 65, 1000])
def test_a_function_sees_an_uneven_offset_as_it_is(offset):
    seen = []
    x = torch.arange(1100.0)[offset : offset + 8]
    check_parity(lambda x: (seen.append(x.storage_offset()), x.exp())[1], lambda x: x.exp(), {"x": x}, protocol="none")
    assert seen[0] % 64 == offset % 64 and seen[0] > 0
