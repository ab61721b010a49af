"""A compiled implementation is judged by its case alone, whatever was compiled before in the same process."""

import os
import subprocess
import sys

import pytest
import torch

from cases.selftest.oracles import oracle_of
from parity.case.case import Case
from parity.process import environment
from parity.protocol.call import execute
from parity.registry import run_case, select

CLAMPS = """
import torch

function = torch.compile(lambda x, limit: torch.clamp(x, 1 - limit, 1 + limit).sum())
for limit in (0.25, 0.5, 0.75):
    x = torch.tensor([0.0, 2.0, 3.0], requires_grad=True)
    out = function(x, limit)
    out.backward()
    assert out.item() == torch.clamp(x, 1 - limit, 1 + limit).sum().item(), (limit, out)
"""


def test_a_batch_that_grows_from_case_to_case_is_compiled_anew():
    eager, compiled = select(["liger.FusedLinearGRPOLoss"])[-1], select(["liger.FusedLinearGRPOLoss.compiled"])[-1]
    settings = {"T": 3, "V": 7, "H": 4, "loss_type": "bnpo", "mask_dtype": "fp32"}
    for rows in (2, 3):
        inputs = oracle_of(Case("policy", 1, "fp32", settings | {"B": rows})).inputs
        expected, found = execute(eager, inputs), execute(compiled, inputs)
        assert found.verdict == "ran", found.message
        torch.testing.assert_close(found.quantities["loss"], expected.quantities["loss"])


@pytest.mark.parametrize("name", ["FusedLinearGRPOLoss", "selective_log_probs"])
def test_our_losses_are_judged_within_a_compiled_region(name):
    """`FusedLinearGRPOLoss` was built within it, which torch refuses, so that no such case was compared."""
    (ours,) = (i for i in select([f"fixes.{name}"]) if i.id == f"fixes.{name}")
    case = Case(ours.family, 1, "fp32", {"B": 2, "T": 3, "V": 7, "H": 4, "context": "compile"})
    found = {r.quantity: r.verdict for r in run_case(case, [ours], thorough=False)}
    assert "grad_hidden" in found and {*found.values()} == {"agree"}


def test_compiled_code_never_gets_the_program_of_another_limit(tmp_path):
    """A fault of torch 2.13's cache of programs that have a backward, which a worker has not: `torch.compiled_clip` shows it."""
    settings = environment("cpu") | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CLAMPS], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
