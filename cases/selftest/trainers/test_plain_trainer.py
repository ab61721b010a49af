"""The check of transformers' own Trainer: what Liger exchanges is put back, and what a patch gets wrong is red."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from parity.registry import run_case, select
from parity.trainers import catalogue
from parity.trainers.checks import plain_trainer

LIGER = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="no liger-kernel")
FUSED, RELEASED = (f"{plain_trainer.FAMILY}.{path}" for path in ("fused", "released"))


def verdicts(implementation, **settings):
    case = catalogue.family(plain_trainer.FAMILY).case(0, "fp32", {"check": "step", **settings})
    return {row.quantity: row.verdict for row in run_case(case, select([implementation]))}


RIGHT = dict.fromkeys(("loss", "gradient", "evaluation loss", "evaluation logits"), "agree")


@LIGER
def test_what_liger_exchanges_is_put_back():
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama)), torch.nn.functional.cross_entropy
    assert verdicts(FUSED, split="1x4") == RIGHT
    with plain_trainer.exchanged():
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)
        assert modeling_llama.LlamaRMSNorm.__name__ == "LigerRMSNorm"
        assert torch.nn.functional.cross_entropy is not before[1]
    assert (dict(vars(modeling_llama)), torch.nn.functional.cross_entropy) == before


@LIGER
@pytest.mark.parametrize("entry", ["liger-hidden-act", "liger-lora-head"])
def test_a_fresh_process_shows_what_liger_gets_wrong(entry):
    """Its kernels need the interpreter before anybody imports Triton, and the model's module is to be put back."""
    words = ["-m", "parity", "replay", entry, "--implementation", FUSED]
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "unsupported" not in done.stdout, done.stdout + done.stderr[-2000:]


@LIGER
def test_a_patch_whose_backward_alone_is_wrong_is_red(monkeypatch):
    """As GLM-4V's: the loss is right."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    backward = LigerSiLUMulFunction.backward
    monkeypatch.setattr(LigerSiLUMulFunction, "backward", staticmethod(lambda ctx, g: backward(ctx, g * 1.001)))
    assert verdicts(FUSED) == RIGHT | {"gradient": "disagree"}


@LIGER
def test_a_factor_that_is_left_out_of_the_gate_s_gradient_is_red(monkeypatch):
    """Falcon-H1's, of 0.5."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def backward(ctx, g, whole=LigerSiLUMulFunction.backward):
        gate, *others = whole(ctx, g)
        return 2 * gate, *others

    monkeypatch.setattr(LigerSiLUMulFunction, "backward", staticmethod(backward))
    assert verdicts(FUSED, model="falcon_h1") == RIGHT | {"gradient": "disagree"}


@pytest.mark.parametrize("settings", [{"split": "1x4", "smoothing": 0.1}, {"model": "classifier"}, {"adapter": "head"}])
def test_the_released_trainer_agrees(settings):
    assert verdicts(RELEASED, **settings) == RIGHT


def test_labels_that_are_not_shifted_are_red(monkeypatch):
    trainer = sys.modules["transformers.trainer"]
    monkeypatch.setattr(trainer, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    wrong = dict.fromkeys(("loss", "gradient", "evaluation loss"), "disagree")
    assert verdicts(RELEASED, smoothing=0.1) == RIGHT | wrong
