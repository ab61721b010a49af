# Liger's kernels and torch's own operations on drawn inputs, one row each: `python judge_kernels.py 60` (inputs of each; names may
# follow). Shows how many calls disagree, and one of them by its id; what they come from is in docs/measured/kernels.md.
import dataclasses
import sys
import warnings
from pathlib import Path

import torch
from setup_kernels import device, functional  # before triton

# isort: split
import torch.nn.functional as F
from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

sys.path.insert(0, str(Path(__file__).parents[3]))
from cases.selftest.judge.operations import LOG_PROBS, OPERATIONS, PROBS, ids_with_ignored
from parity.testing import EAGER, PROTOCOL, Recipe, draw, index, tensor
from parity.testing import definitions as D

warnings.simplefilter("ignore")
ONCE = [part for part in PROTOCOL if part != "accumulation"]
DTYPES = {"dtypes": ("fp32", "fp16") + ("bf16",) * (device == "cuda")}  # Triton's interpreter truncates bf16
ROWS = {"sizes": {"N": (1, 9), "H": (1, 300)}, **DTYPES}
WORDS = {"sizes": {"N": (1, 9), "V": (2, 300)}, **DTYPES}
LOSS = {"label_smoothing": [0.0, 0.1], "z_loss": [0.0, 1e-3], "softcap": [None, 10.0], "reduction": ["mean", "sum"]}
GATED = {"in_place": ("gate", "up"), "protocol": ONCE}
TURNED = tensor("B", "T", 16, then=lambda x: torch.cat([x[..., :8], x[..., :8]], -1).cos())


def norm(mode, offset):
    kernel = lambda x, weight, eps: functional.liger_rms_norm(x, weight, eps, offset, mode, False)  # noqa: E731
    drawn = draw(x=tensor("N", "H"), weight=tensor("H", around=1 - offset), eps=[1e-6, 1e-5], **ROWS)
    return drawn, lambda x, weight, eps: D.rms_norm(x, weight, eps, offset), kernel, {}


def loss(function):
    def call(target, label_smoothing, z_loss, softcap, reduction, **given):
        options = {"lse_square_scale": z_loss, "softcap": softcap, "reduction": reduction}
        return function(*given.values(), target, label_smoothing=label_smoothing, **options)

    return call


def by_groups(x, weight, bias, groups):
    return functional.liger_group_norm(x, weight, bias, 8, groups, 1e-5)


def one_pass(x, weight, bias, groups):
    """Liger's variance, E[x²] - E[x]²."""
    whole = x.unflatten(1, (groups, -1)).flatten(2)
    mean, square = whole.mean(-1, keepdim=True), whole.square().mean(-1, keepdim=True)
    normal = (whole - mean) * torch.rsqrt(square - mean.square() + 1e-5)
    return normal.reshape(x.shape) * weight.view(-1, 1) + bias.view(-1, 1)


L = functional
LIGER = {
    "rms_norm (llama)": norm("llama", 0.0),
    "rms_norm (gemma)": norm("gemma", 1.0),
    "layer_norm": (
        draw(x=tensor("N", "H"), weight=tensor("H", around=1), bias=tensor("H"), **ROWS),
        D.layer_norm,
        lambda x, weight, bias: L.liger_layer_norm(x, weight, bias, 1e-5),
        {},
    ),
    "group_norm": (
        dataclasses.replace(OPERATIONS["group_norm"].drawn, sizes={"N": (1, 4), "H": (2, 65)}, **DTYPES),
        D.group_norm,
        by_groups,
        {"also": (one_pass,)},
    ),
    "rope": (
        draw(
            q=tensor("B", 3, "T", 16),
            k=tensor("B", 1, "T", 16),
            cos=TURNED,
            sin=TURNED,
            sizes={"B": (1, 3), "T": (1, 17)},
            **DTYPES,
        ),
        D.rope,
        lambda q, k, cos, sin: L.liger_rope(q, k, cos, sin),
        {"grad": ("q", "k"), "in_place": ("q", "k"), "recipe": EAGER},
    ),
    "swiglu": (draw(gate=tensor("N", "H"), up=tensor("N", "H"), **ROWS), D.swiglu, L.liger_swiglu, GATED),
    "geglu": (draw(gate=tensor("N", "H"), up=tensor("N", "H"), **ROWS), D.geglu, L.liger_geglu, GATED),
    "softmax": (draw(x=tensor("N", "H"), **ROWS), D.softmax, L.liger_softmax, {}),
    "cross_entropy": (
        draw(logits=tensor("N", "V", scale=3), target=ids_with_ignored, **LOSS, **WORDS),
        D.cross_entropy,
        loss(L.liger_cross_entropy),
        {"in_place": ("logits",), "recipe": Recipe(output="input"), "protocol": ONCE},
    ),
    "fused_linear_cross_entropy": (
        draw(
            hidden=tensor("N", "H"),
            weight=tensor("V", "H", scale=0.3),
            target=ids_with_ignored,
            **LOSS,
            sizes={"N": (1, 9), "H": (1, 65), "V": (2, 130)},
            **DTYPES,
        ),
        D.linear_cross_entropy,
        loss(L.liger_fused_linear_cross_entropy),
        {
            "recipe": Recipe(output="input", logits="input", dlogits="input", accumulate="input"),
            "protocol": ONCE,
        },
    ),
    "kl": (
        draw(log_q=tensor("N", "V", **LOG_PROBS), log_p=tensor("N", "V", **LOG_PROBS), **WORDS),
        D.kl,
        lambda log_q, log_p: L.liger_kl_div(log_q, log_p, reduction="batchmean", log_target=True),
        {"grad": ("log_q",)},
    ),
    "jsd": (
        draw(log_q=tensor("N", "V", **LOG_PROBS), log_p=tensor("N", "V", **LOG_PROBS), beta=[0.5, 0.1], **WORDS),
        D.jsd,
        lambda log_q, log_p, beta: L.liger_jsd(log_q, log_p, beta=beta),
        {"grad": ("log_q",)},
    ),
    "tvd": (
        draw(p=tensor("N", "V", **PROBS), q=tensor("N", "V", **PROBS), **WORDS),
        D.tvd,
        lambda p, q: L.liger_tvd(p, q, reduction="batchmean"),
        {"grad": ("p",)},
    ),
    "embedding": (
        draw(
            ids=index("N", below="V"),
            weight=tensor("V", "H"),
            sizes={"N": (1, 129), "V": (1, 17), "H": (1, 65)},
            **DTYPES,
        ),
        D.embedding,
        lambda ids, weight: LigerEmbeddingFunction.apply(weight, ids),
        {},
    ),
}
OWN = {name: OPERATIONS[name].styles["fp32 torch"] for name in ("rms_norm", "layer_norm", "group_norm")} | {
    "attention": OPERATIONS["attention"].styles["torch"],
    "embedding": lambda ids, weight: F.embedding(ids, weight),
    "softmax": lambda x: F.softmax(x, -1),
    "plain_cross_entropy": lambda logits, target: F.cross_entropy(logits, target),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "kl": lambda log_q, log_p: F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"),
    "linear_cross_entropy": lambda hidden, weight, target, label_smoothing: F.linear_cross_entropy(
        hidden, weight, target, label_smoothing=label_smoothing
    ),
}
TORCH = {name: (OPERATIONS[name].drawn, OPERATIONS[name].definition, f, {}) for name, f in OWN.items()}

count, names = int(sys.argv[1]) if len(sys.argv) > 1 else 16, sys.argv[2:]
print("| kernel | dtype | inputs | disagree | such as |\n|---|---|---:|---:|---|")
for library, kernels in (("Liger", LIGER), ("torch", TORCH)):
    for name, (drawn, definition, function, more) in kernels.items():
        if names and name not in names:
            continue
        few = {n: (low, min(high, 257)) for n, (low, high) in drawn.sizes.items()}
        for dtype in drawn.dtypes:
            failing = []
            for case in dataclasses.replace(drawn, sizes=few, dtypes=(dtype,), seed=11).cases(count):
                asked = {**more, "grad": ()} if case.grad == "none" else more
                parity = case.check_parity(function, definition, **asked)
                failing += [] if parity.agrees else [f"{', '.join(sorted(parity.failing))}: {case}"]
            print(f"| {library} {name} | {dtype} | {count} | {len(failing)} | {''.join(failing[:1])} |", flush=True)
