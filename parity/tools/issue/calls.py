"""How a stand-alone script calls each implementation: the adapter's call, written out for the settings of one case.

Adding one is writing a function of `(inputs, names)` under `@call(id)` that returns a `Call`: its lines see the case's
leaves (hidden, weight, bias, lora_a, lora_b, where present) as arguments, every other tensor of the case as a global
under the name that the family gives it, and assign each quantity in `names`. An implementation without one gets a
script that goes through the harness. The GRPO trainers are in `trainer_calls`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from parity.case.inputs import Inputs
from parity.families.logprobs import IGNORE_INDEX
from parity.families.policy import CLIPPED


@dataclasses.dataclass(frozen=True)
class Call:
    """Lines that call an implementation.

    Attributes:
        lines: body of a function of the leaves that assigns every quantity asked for.
        imports: import lines, placed after the environment is set.
        setup: lines at module level, after the imports.
    """

    lines: tuple[str, ...]
    imports: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


Writer = Callable[[Inputs, Sequence[str]], Call]
CALLS: dict[str, Writer] = {}


def call(*ids: str) -> Callable[[Writer], Writer]:
    """Register a writer for the implementations with these ids."""

    def register(writer: Writer) -> Writer:
        CALLS.update(dict.fromkeys(ids, writer))
        return writer

    return register


def arguments(**options: Any) -> str:
    """Keyword arguments as source, `, name=value` each; a value of type `Code` is written as it is."""
    return "".join(f", {name}={value if isinstance(value, Code) else repr(value)}" for name, value in options.items())


class Code(str):
    """Source text among argument values."""


def ids(x: Inputs) -> str:
    """The token ids as int64."""
    return "ids" if x.ids.dtype.itemsize == 8 else "ids.long()"


def bias(x: Inputs) -> str:
    """The bias argument."""
    return "None" if x.bias is None else "bias"


def states(x: Inputs) -> str:
    """Hidden states as the LM head receives them."""
    tied = getattr(x.settings, "head", "plain") == "tied"
    return "hidden + torch.nn.functional.embedding(previous_ids, weight)" if tied else "hidden"


def logits(x: Inputs, name: str = "z") -> list[str]:
    """softcap(scale·(h Wᵀ + b)) in the dtype of the head, as transformers' models compute it."""
    s = x.settings
    hidden = states(x)
    if x.weight.dtype != x.hidden.dtype and s.context != "autocast":
        hidden = f"({hidden}).to(weight.dtype)"
    out = [f"{name} = torch.nn.functional.linear({hidden}, weight, {bias(x)})"]
    if s.logit_scale != 1.0:
        out.append(f"{name} = {name} * {s.logit_scale}")
    if s.softcap is not None:
        out.append(f"{name} = torch.tanh({name} / {s.softcap}) * {s.softcap}")
    return out


def tempered(x: Inputs) -> list[str]:
    """The logits divided by the temperature."""
    return [*logits(x), *([f"z = z / {x.settings.temperature}"] if x.settings.temperature != 1.0 else [])]


def _folded(x: Inputs) -> str:
    """Hidden states times scale over temperature, where neither is a parameter."""
    factor = x.settings.logit_scale / x.settings.temperature
    return "hidden" if factor == 1.0 else f"(hidden * {factor!r})"


@call("trl.selective_log_softmax")
def selective_log_softmax(x: Inputs, names: Sequence[str]) -> Call:
    """TRL's plain functions on materialised logits."""
    lines = [*tempered(x), f"logps = selective_log_softmax(z, {ids(x)})"]
    imported = "selective_log_softmax"
    if "entropy" in names:
        imported = "entropy_from_logits, selective_log_softmax"
        lines.append("entropy = entropy_from_logits(z)")
    return Call(tuple(lines), (f"from trl.trainer.utils import {imported}",))


def plain_log_softmax(x: Inputs, names: Sequence[str]) -> Call:
    """The arithmetic of `selective_log_softmax` on the CPU, for the script of a library other than TRL."""
    wide = x.case.dtype == "fp32" or x.settings.head_dtype == "fp32"
    index = f".gather(-1, {ids(x)}[..., None])[..., 0]"
    lines = [*tempered(x), f"logps = z{index} - z.logsumexp(-1)" if wide else f"logps = z.log_softmax(-1){index}"]
    if "entropy" in names:
        lines.append("entropy = -(z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1)")
    return Call(tuple(lines))


def _both(x: Inputs, passed: str, module: str) -> Call:
    ignored = x.settings.ignored != "none"
    index = f"{ids(x)}.clamp(min=0)" if ignored else ids(x)
    mask = "ids != -100" if ignored else "None"
    out = f"logps, entropy = selective_log_softmax_and_entropy({passed.format(index=index, mask=mask)})"
    return Call((*logits(x), out), (f"from {module} import selective_log_softmax_and_entropy",))


@call("trl.selective_log_softmax_and_entropy")
def selective_log_softmax_and_entropy(x: Inputs, names: Sequence[str]) -> Call:
    """TRL's combined function."""
    passed = f"z, {{index}}, temperature={x.settings.temperature}, row_mask={{mask}}"
    return _both(x, passed, "trl.trainer.utils")


@call("trl.logprob_entropy_kernel")
def logprob_entropy_kernel(x: Inputs, names: Sequence[str]) -> Call:
    """TRL's fused Triton kernel."""
    return _both(x, f"z, {{index}}, {x.settings.temperature}, {{mask}}", "trl.kernels")


@call("trl.ChunkedLogProbFunction")
def chunked(x: Inputs, names: Sequence[str]) -> Call:
    """TRL's fused LM head."""
    from parity.implementations.trl import DEFAULT_CHUNK

    s = x.settings
    outputs = ("entropy",) if s.entropy != "none" else ()
    numbers = f"{s.temperature}, {s.chunk_size or DEFAULT_CHUNK}, {s.softcap}, {s.logit_scale}, {outputs}"
    shape = f".view({s.B}, {s.T})"
    lines = [f"out = ChunkedLogProbFunction.apply(hidden.flatten(0, 1), weight, {bias(x)}, ids.flatten(), {numbers})"]
    lines += [f"{name} = out[{i}]{shape}" for i, name in enumerate(["logps", *outputs]) if name in names]
    return Call(tuple(lines), ("from trl.kernels.chunked_logprob import ChunkedLogProbFunction",))


@call("trl.chunked_logprob_kernel")
def chunked_kernel(x: Inputs, names: Sequence[str]) -> Call:
    """Its Triton kernels, whatever the device."""
    base = chunked(x, names)
    forced = "trl.kernels.chunked_logprob._use_triton = lambda device: True  # the Triton path, on a CPU too"
    return Call(base.lines, ("import trl.kernels.chunked_logprob", *base.imports), (forced,))


LIBDEVICE = (
    "if not torch.cuda.is_available():  # Triton's interpreter has no libdevice",
    "    from cut_cross_entropy import tl_utils",
    "    tl = tl_utils.tl",
    "    def log1p(x):",
    "        y = 1.0 + x",
    "        return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))",
    "    tl_utils.tl_log1p = log1p",
)
TANH = (
    "    def tanh(x):",
    "        a, e = tl.abs(x), tl.exp(-2.0 * tl.abs(x))",
    "        near = a * (1.0 - a * a * (0.33333333 - a * a * (0.13333333 - a * a * 0.05396825)))",
    "        y = tl.where(a < 0.15, near, (1.0 - e) / (1.0 + e))",
    "        return tl.where(x < 0, -y, y)",
    "    tl_utils.tl_tanh = tanh",
)
"""The stand-ins of `parity.implementations.interpreter`, as plain functions, which the interpreter calls as well."""


def _cce(x: Inputs, options: str, kernel: bool) -> Call:
    setup = (LIBDEVICE + TANH if x.settings.softcap is not None else LIBDEVICE) if kernel else ()
    more = f", softcap={x.settings.softcap}" if x.settings.softcap is not None else ""
    more += ", bias=bias" if x.bias is not None else ""
    out = f'logps = -linear_cross_entropy({_folded(x)}, weight, {ids(x)}, reduction="none"{more}, {options})'
    return Call((out,), ("from cut_cross_entropy import linear_cross_entropy",), setup)


@call("cce.default")
def cce_default(x: Inputs, names: Sequence[str]) -> Call:
    """cut-cross-entropy as it comes."""
    return _cce(x, 'impl="cce"', True)


@call("cce.auto")
def cce_auto(x: Inputs, names: Sequence[str]) -> Call:
    """With the automatic filter threshold."""
    return _cce(x, 'impl="cce", filter_eps="auto"', True)


@call("cce.unfiltered")
def cce_unfiltered(x: Inputs, names: Sequence[str]) -> Call:
    """Without gradient filtering."""
    return _cce(x, 'impl="cce", filter_eps=None', True)


@call("cce.minus_inf")
def cce_minus_inf(x: Inputs, names: Sequence[str]) -> Call:
    """Without gradient filtering, the other spelling."""
    return _cce(x, 'impl="cce", filter_eps=-inf', True)


@call("cce.torch_compile")
def cce_torch_compile(x: Inputs, names: Sequence[str]) -> Call:
    """The compiled torch path."""
    return _cce(x, 'impl="torch_compile"', False)


@call("liger.chunked_selective_logprob")
def chunked_selective_logprob(x: Inputs, names: Sequence[str]) -> Call:
    """The log-probs inside Liger's fused GRPO loss."""
    s = x.settings
    function = "_ChunkedSelectiveLogProbFunction"
    rest = f"{bias(x)}, {s.temperature}, {s.chunk_size or 4096}"
    lines = (
        f"logps = {function}.apply(hidden.flatten(0, 1), weight, {ids(x)}.flatten(), {rest})",
        f"logps = logps.view({s.B}, {s.T})",
    )
    return Call(lines, (f"from liger_kernel.chunked_loss.fused_linear_ppo import {function}",))


@call("liger.fused_linear_cross_entropy")
def fused_linear_cross_entropy(x: Inputs, names: Sequence[str]) -> Call:
    """Liger's fused linear cross entropy, unreduced."""
    s = x.settings
    cap = f", softcap={s.softcap}" if s.softcap is not None else ""
    return Call(
        (
            f'loss = LigerFusedLinearCrossEntropyLoss(reduction="none", ignore_index={IGNORE_INDEX}{cap})',
            f"logps = -loss(weight, {_folded(x)}.flatten(0, 1), {ids(x)}.flatten(), {bias(x)}).view({s.B}, {s.T})",
        ),
        ("from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss",),
    )


@call("liger.cross_entropy")
def cross_entropy(x: Inputs, names: Sequence[str]) -> Call:
    """Liger's cross entropy on materialised logits, unreduced."""
    s = x.settings
    return Call(
        (
            *tempered(x),
            f'loss = LigerCrossEntropyLoss(reduction="none", ignore_index={IGNORE_INDEX})',
            f"logps = -loss(z.flatten(0, 1), {ids(x)}.flatten()).view({s.B}, {s.T})",
        ),
        ("from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss",),
    )


def _liger_options(x: Inputs, function: Any) -> str:
    """The numeric settings, without those that the function has as defaults."""
    from parity.implementations import liger_grpo

    known = inspect.signature(function).parameters
    options = liger_grpo._options(x, function)
    kept = {n: v for n, v in options.items() if n == "loss_type" or v != known[n].default}
    if x.settings.loss_type != "dr_grpo":
        kept.pop("max_completion_length", None)
    return arguments(temperature=x.settings.temperature, **kept)


def _liger_tensors(x: Inputs, function: Any) -> dict[str, Code]:
    from parity.implementations import liger_grpo

    options = liger_grpo._tensor_options(x, function)
    count = Code(f"torch.tensor({int(x.num_items_in_batch)})")
    values = {"vllm_is_ratio": Code("importance_sampling_ratio"), "num_items_in_batch": count}
    return {name: values[name] for name in options}


def _liger_metrics(x: Inputs, names: Sequence[str]) -> list[str]:
    found = ["kl"] if x.settings.beta != 0.0 else []
    found += ["clip_ratio"] if x.settings.loss_type in (*CLIPPED, "cispo") else []
    return [f"{name} = metrics[{i}]" for i, name in enumerate(found) if name in names]


def _fused_linear_grpo(x: Inputs, names: Sequence[str], compiled: bool) -> Call:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    s = x.settings
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    options = _liger_options(x, LigerFusedLinearGRPOLoss.__init__)
    given = [n for n in ("ref", "old") if x.tensors.get(f"{n}_logps") is not None]
    more = {f"{n}_per_token_logps": Code(f"{n}_logps") for n in given}
    more |= _liger_tensors(x, LigerFusedLinearGRPOLoss.forward)
    build = f"compiled={compiled}, use_ref_model={s.beta != 0.0}, chunk_size={s.chunk_size}"
    build += f", epsilon_low={s.epsilon}, epsilon_high={high}"
    lines = (
        f"function = LigerFusedLinearGRPOLoss({build}{options})",
        f"loss, metrics = function({states(x)}, weight, {ids(x)}, mask, advantages, {bias(x)}{arguments(**more)})",
        *_liger_metrics(x, names),
    )
    return Call(lines, ("from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss",))


@call("liger.FusedLinearGRPOLoss")
def fused_linear_grpo(x: Inputs, names: Sequence[str]) -> Call:
    """Liger's chunked GRPO loss, eager."""
    return _fused_linear_grpo(x, names, False)


@call("liger.FusedLinearGRPOLoss.compiled")
def fused_linear_grpo_compiled(x: Inputs, names: Sequence[str]) -> Call:
    """The same, compiled."""
    return _fused_linear_grpo(x, names, True)


@call("liger.triton_grpo_loss")
def triton_grpo_loss(x: Inputs, names: Sequence[str]) -> Call:
    """Liger's Triton GRPO loss on materialised logits, which have one position more."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss as function

    s = x.settings
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    old, ref = ("None" if x.tensors.get(n) is None else n for n in ("old_logps", "ref_logps"))
    more = f"eps_low={s.epsilon}, eps_high={high}, inplace=False, reduce=True"
    more += _liger_options(x, function) + arguments(**_liger_tensors(x, function))
    lines = (
        *logits(x),
        "z = torch.cat([z, torch.zeros_like(z[:, :1])], 1)",
        f"loss, metrics = triton_grpo_loss(z, {old}, {ref}, {ids(x)}, advantages, mask, {more})",
        *_liger_metrics(x, names),
    )
    return Call(lines, ("from liger_kernel.transformers.grpo_loss import triton_grpo_loss",))
