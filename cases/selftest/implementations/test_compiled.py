"""A compiled implementation is judged by its case alone, whatever was compiled before in the same process."""

import os
import subprocess
import sys

import pytest
import torch
from packaging.version import Version

from cases.selftest.oracles import oracle_of
from parity.case.case import Case
from parity.process import environment
from parity.protocol.call import execute
from parity.registry import select

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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where compiled kernels lie: g++ takes most of the time, and makes the same ones for both."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.parametrize("wrong", [False, True])
def test_compiled_code_never_gets_the_program_of_another_limit(wrong, compiled):
    """A fault of torch 2.13's cache of programs that have a backward; a worker has none."""
    if wrong and Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 has no such fault")
    settings = environment("cpu") | {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    if wrong:
        settings["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "1"
    done = subprocess.run([sys.executable, "-c", CLAMPS], env=os.environ | settings, capture_output=True, text=True)
    assert ("AssertionError: (0.75" in done.stderr) == wrong, done.stderr
    assert bool(done.returncode) == wrong


AMX = torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not AMX, reason="this CPU has no AMX, with which alone torch's product is wrong")
@pytest.mark.xfail(strict=True, reason="torch 2.13.0: with AMX a bf16 product over an odd K puts a row's NaN before it")
def test_a_nan_stays_in_its_row_of_a_product():
    rows = torch.randn(40, 257).bfloat16()
    rows[5] = torch.nan
    found = (rows @ torch.randn(257, 64).bfloat16()).isnan().any(-1).nonzero().flatten().tolist()
    assert found == [5]
