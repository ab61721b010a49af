# Three of Liger 0.8.5's tests (test_rms_norm.py, test_swiglu.py, test_fused_linear_cross_entropy.py), a judgement each in place of
# their tolerances: `python -m pytest liger_tests.py`. bf16 needs a GPU, since Triton's interpreter truncates it.
import pytest
import torch
from setup_kernels import device  # before triton

# isort: split
import torch.nn.functional as F
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from parity.testing import EAGER, PROTOCOL, Recipe, assert_parity, stored

DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else []))
ONCE = [part for part in PROTOCOL if part != "accumulation"]  # these kernels overwrite what a second backward reads
CONFIG = LlamaConfig(hidden_size=42, intermediate_size=123, num_attention_heads=1)


def filled(module, dtype):
    """The same random parameters for every module of these names and shapes."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return module.to(device, dtype)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("definition", "offset", "mode"), [(LlamaRMSNorm, 0.0, "llama"), (GemmaRMSNorm, 1.0, "gemma")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype, definition, offset, mode, in_place):
    kernel = LigerRMSNorm(123, offset=offset, casting_mode=mode, in_place=in_place)
    inputs = {"hidden_states": torch.randn(5, 3, 123, device=device, dtype=dtype)}
    assert_parity(filled(kernel, dtype), filled(definition(123), dtype), inputs, in_place=["grad_output"] * in_place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    x = torch.randn(3, 4, 42, device=device, dtype=dtype)
    pair = filled(LigerSwiGLUMLP(CONFIG), dtype), filled(LlamaMLP(CONFIG), dtype)
    assert_parity(*pair, {"x": x}, recipe=EAGER, protocol=ONCE)


class Head(torch.nn.Module):
    """(loss, z-loss) of float32 logits, with what the two share."""

    def __init__(self, bias):
        super().__init__()
        self.lin = torch.nn.Linear(31, 123, bias)
        self.weights = torch.linspace(0.1, 1.0, 123, device=device)

    def forward(self, x, y):
        z = 30 * torch.tanh(stored(self.lin(x), "logits").float() / 30)
        kept = y != 42
        z_loss = 1e-4 * torch.where(kept, z.logsumexp(-1).square(), 0.0).sum() / kept.sum()
        return F.cross_entropy(z, y, self.weights, ignore_index=42, label_smoothing=0.1) + z_loss, z_loss


class LigerHead(Head):
    def forward(self, x, y):
        options = {"lse_square_scale": 1e-4, "label_smoothing": 0.1, "softcap": 30.0, "accum_dtype": torch.float32}
        loss = LigerFusedLinearCrossEntropyLoss(self.weights, ignore_index=42, return_z_loss=True, **options)
        return loss(self.lin.weight, x, y, self.lin.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_linear_cross_entropy(dtype, bias):
    y = torch.arange(40, 54, device=device)
    inputs = {"x": torch.randn(14, 31, device=device, dtype=dtype), "y": y}
    logged = {"output[1]": torch.zeros((), device=device)}
    recipe = Recipe(logits="input", dlogits="input", output="input")
    pair = filled(LigerHead(bias), dtype), filled(Head(bias), dtype)
    assert_parity(*pair, inputs, cotangent=logged, protocol=ONCE, recipe=recipe)
