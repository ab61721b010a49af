"""The judge for any kernel: its public face. It needs torch alone; docs/testing.md has examples.

from parity.testing import assert_parity

def test_rms_norm():
    x, w = torch.randn(64, 1024, dtype=torch.bfloat16), torch.randn(1024, dtype=torch.bfloat16)
    assert_parity(my_kernel, definition=rms_norm, inputs={"x": x, "weight": w})
"""

from parity.judge.assertion import Parity, ParityError, assert_parity, check_parity, tolerance
from parity.judge.calls import DEFAULT as PROTOCOL
from parity.judge.gates import Judgement
from parity.judge.recipe import EAGER, Recipe
from parity.judge.stages import stored
from parity.testing.drawing import Case, Description, draw, index, tensor

__all__ = [
    "EAGER",
    "PROTOCOL",
    "Case",
    "Description",
    "Judgement",
    "Parity",
    "ParityError",
    "Recipe",
    "assert_parity",
    "check_parity",
    "draw",
    "index",
    "stored",
    "tensor",
    "tolerance",
]
