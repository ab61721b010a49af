"""The pytest plugin: what it shows, stores and replays, alone and over workers; without its options nothing."""

import importlib.metadata
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from fixtures import warm

KERNELS = """
import torch
from cases.selftest.judge.operations import OPERATIONS, hand_rms
from cases.selftest.judge.test_draw import RMS, ignores_strides
from parity.testing import assert_parity, definitions as D

@RMS.parametrize(6)
def test_right(case):
    case.assert_parity(hand_rms, D.rms_norm)

@RMS.parametrize(5, also=["fp32/N:5/H:7/eps:1e-06/x:plain+sliced/upstream:random/grad:all/seed:3"])
def test_wrong(case):
    case.assert_parity(ignores_strides, D.rms_norm, protocol="none")

def test_plain():
    assert_parity(lambda x: x.exp(), lambda x: x.exp(), {"x": torch.ones(3)})
"""

TOLERANCES = """
import torch
from torch.testing import assert_close

def test_loose():
    assert_close(torch.full((4, 8), 1e-3), torch.full((4, 8), 1e-3), atol=1e-1, rtol=0)
    x = torch.arange(32.0).reshape(4, 8)
    assert torch.allclose(x, x, rtol=0.02)

def test_tight():
    x = torch.arange(1.0, 33.0).reshape(4, 8)
    assert_close(x, x)
"""


INSTALLED = any(e.value == "parity.pytest_parity" for e in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "parity.pytest_parity")
"""An environment made before the plugin was there does not know it by its entry point."""


def run(folder, source, *arguments):
    (folder / "test_kernel.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    return warm.run("pytest", "-q", *PLUGIN, "test_kernel.py", *arguments, env=environment, cwd=folder).stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_every_judgement_is_shown_and_what_fails_is_replayed(tmp_path, workers):
    out = run(tmp_path, KERNELS, "--parity", "--junit-xml=out.xml", *workers)
    section = out.split("parity: error ÷ allowed")[1]
    assert re.search(r"\d  (output|grad_\w+) \(\w+\)  test_kernel.py::test_plain", section)
    assert len(re.findall(r"test_kernel.py::", section.split("short test summary")[0])) == 12  # one crashes
    (replay,) = set(re.findall(r"--parity-replay (\S+)", section))
    notes = [
        p.get("value") for p in ElementTree.parse(tmp_path / "out.xml").iter("property") if p.get("name") == "parity"
    ]
    assert len(notes) == 12 and any(replay in note for note in notes)
    for asked in (replay, "last")[: 1 if workers else 2]:
        out = run(tmp_path, KERNELS, f"--parity-replay={asked}", *workers)
        assert "1 failed, 1 passed" in out, out
        assert replay in out.split("short test summary")[1]
    if not workers:
        unknown = run(tmp_path, KERNELS, "--parity-replay=nonsense")
        assert "--parity-replay: no test has the case nonsense" in unknown and " passed" not in unknown, unknown
        last = run(tmp_path, KERNELS, "--lf")
        assert re.search(r"\d failed(?!, \d+ passed)", last.splitlines()[-1]), last


def test_without_its_options_it_shows_nothing(tmp_path):
    out = run(tmp_path, TOLERANCES)
    assert "2 passed" in out and "parity" not in out
    program = "import sys, parity.pytest_parity; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_the_audit_says_what_tolerances_let_pass(tmp_path, workers):
    section = run(tmp_path, TOLERANCES, "--parity-audit", *workers).split("in so many of the calls")[1]
    rows = {line.split()[-1]: line.split()[1:-1] for line in section.splitlines() if "test_kernel.py:" in line}
    assert rows == {
        "test_kernel.py:6": ["1", "1", "1"],  # zeros, a factor, the last entry; equal rows cannot be told apart
        "test_kernel.py:8": ["1"],  # the factor alone
        "test_kernel.py:12": [],
    }


REFERENCE = """
import torch
from torch.testing import assert_close

def rms_norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w

def kernel(x, w):
    return rms_norm(x.float(), w.float()).to(x.dtype)

def test_rms_norm():
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    assert_close(kernel(x, w), x * w, atol=9, rtol=0)
    assert_close(kernel(x, w), rms_norm(x.double(), w.double()).bfloat16(), atol=1e-1, rtol=1e-1)
    given, wide = [t.requires_grad_() for t in (x, w)], [t.detach().double().requires_grad_() for t in (x, w)]
    upstream = torch.randn(4, 64).bfloat16()
    kernel(*given).backward(upstream)
    rms_norm(*wide).backward(upstream.double())
    assert_close(w.grad.double(), wide[1].grad, atol=1, rtol=0)
"""


def test_the_audit_says_the_tolerance_that_a_definition_gives(tmp_path):
    section = run(tmp_path, REFERENCE, "--parity-audit", "--parity-definition=rms_norm").split("of the calls")[1]
    found = dict(re.findall(r"test_kernel.py:(\d+)(?:  derived: atol=(.*))?$", section, re.MULTILINE))
    assert set(found) == {"13", "14", "19"} and not found["13"], section
    for line in ("14", "19"):
        atol, rtol = map(float, found[line].split(", rtol="))
        assert atol < 1e-2 and rtol == 0.023, section  # 6 units of bf16


MODULES = """
import pytest
import torch
from torch.testing import assert_close

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

def double(x):
    return 2 * x

def check(reference, kernel):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    theirs, ours = reference(leaf), kernel(other)
    theirs.sum().backward()
    ours.sum().backward()
    assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    assert_close(other.grad, leaf.grad, atol=1e-2, rtol=1e-2)
    return reference, kernel

@pytest.mark.parametrize("make", [Norm])
def test_module(make):
    a, b = check(make(), Norm())
    assert_close(b.weight.grad, a.weight.grad, atol=1e-2, rtol=1e-2)

@pytest.mark.parametrize("reference", [double])
def test_function(reference):
    x = torch.randn(8)
    assert_close(x + x, reference(x), atol=1e-2, rtol=1e-2)

SHARED = Norm()

def test_instance():
    a, b = check(SHARED, Norm())
    assert_close(b.weight.grad, a.weight.grad, atol=1e-2, rtol=1e-2)
"""
AUDITED = {"make": {"23", "24", "30"}, "Norm": {"23", "24", "30", "41"}, "SHARED": {"23", "24", "41"}}


@pytest.mark.parametrize("name", [*AUDITED, "reference", "double"])
def test_the_audit_takes_modules_and_parameters_of_tests_for_definitions(tmp_path, name):
    section = run(tmp_path, MODULES, "--parity-audit", f"--parity-definition={name}").split("of the calls")[1]
    derived = dict(re.findall(r"test_kernel.py:(\d+)  derived: (.*)$", section, re.MULTILINE))
    assert set(derived) == AUDITED.get(name, {"35"}), section
    assert all(1e-9 < float(atol) < 1e-4 or name not in AUDITED for atol in re.findall("atol=(.*),", section)), section


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_definition_that_no_test_has_is_named(tmp_path, workers):
    """A typo left the derived tolerances away without a word, and so did the option without the audit."""
    asked = ("--parity-definition=Norm", "--parity-definition=Nrom")
    section = run(tmp_path, MODULES, "--parity-audit", *asked, *workers).split("of the calls")[1]
    assert re.findall("--parity-definition: no test .* has a function or module (.*)", section) == ["Nrom"], section
    assert " passed" not in run(tmp_path, MODULES, *asked, *workers)


UNKNOWN_ONCE = """
import torch
from torch.testing import assert_close

def spectrum(x):
    return torch.linalg.svdvals(x) if len(x) > 4 else 2 * x

def test_spectrum():
    for rows in (4, 8):
        x = torch.randn(rows, 8)
        assert_close(spectrum(x).clone(), spectrum(x))
"""


def test_the_audit_says_why_a_definition_gives_no_tolerance_in_some_calls_of_a_place(tmp_path):
    section = run(tmp_path, UNKNOWN_ONCE, "--parity-audit", "--parity-definition=spectrum").split("of the calls")[1]
    assert re.search(r"test_kernel.py:11  none derived: .*svd", section), section
