"""Quantised LM heads of tiny models (bitsandbytes, torch.ao), and what their forward computes."""

import importlib.util
from typing import Any

import torch

from parity.errors import Unsupported


def quantise(model: Any, kind: str) -> None:
    """Exchange the head of `model` for a quantised one of the same weights; kinds that are none leave it as it is.

    "quantised": `bitsandbytes.nn.Linear4bit`, nf4, computing in float32, frozen. "fake-quantised":
    `torch.ao.nn.qat.Linear`, whose forward rounds the weight to an int8 grid and whose backward passes the gradient on as
    it is (no weight is clipped). Raises Unsupported where bitsandbytes is not installed, with the command that installs it.
    """
    if kind == "quantised":
        model.set_output_embeddings(_four_bits(model.get_output_embeddings()))
    elif kind == "fake-quantised":
        model.set_output_embeddings(_eight_bits_faked(model.get_output_embeddings()))


def dequantised(model: Any, original: Any) -> None:
    """Give `model` the head that a quantised head of `original` computes with, as a plain and frozen one."""
    head = _four_bits(original.get_output_embeddings())
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(head.weight.data, head.weight.quant_state)
    out = torch.nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    out.weight = torch.nn.Parameter(weight, requires_grad=False)
    out.bias = head.bias
    model.set_output_embeddings(out)


def _four_bits(head: Any) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Unsupported("bitsandbytes is not installed: pip install 'llm-parity[kbit]'")
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = head.weight.detach()
    bias = head.bias is not None
    out = Linear4bit(head.in_features, head.out_features, bias=bias, compute_dtype=torch.float32, quant_type="nf4")
    out.weight = Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
    if bias:
        out.bias = torch.nn.Parameter(head.bias.detach().clone())
    return out.to(weight.device)  # the move is what quantises


def _eight_bits_faked(head: Any) -> Any:
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization import QConfig, default_fake_quant, default_weight_fake_quant

    head.qconfig = QConfig(activation=default_fake_quant, weight=default_weight_fake_quant)
    out = Linear.from_float(head).to(head.weight.device)
    # The grid of these weights, kept: a step must not move it. A little wider than they are, because the largest would sit at
    # 127.5 steps, where rounding decides whether it is clipped and has no gradient.
    out.weight_fake_quant(1.05 * out.weight)
    out.weight_fake_quant.disable_observer()
    return out
