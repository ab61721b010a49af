"""`use_model_logits`: log-probs from the model's own logits, where TRL's fused LM head gets other ones."""

import contextlib
import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parity.fixes.language_models import in_shards, modules_of, probe, undisturbed
from parity.fixes.override import chain, closed_over, overridden, override
from parity.fixes.patch import ALREADY, ORIGINAL, Change, Patch

NAME = "use_model_logits"
_KERNEL = "_ChunkedLogProbFunction"
_TOKEN_BLOCK, _VOCAB_BLOCK = 1024, 8192


def use_model_logits(trainer_or_model: Any) -> Patch:
    """A model whose logits are not `softcap(scale * (hidden @ weight.T + bias))` is trained on its own logits.

    Since trl 1.15 trainers score tokens by `model(..., fused_lm_head=True)`: last hidden states of the backbone times
    the weight of the output embeddings, with a softcap and a scale read from the config. What else the model's forward
    does is left out, for policy and reference alike: a softcap of another name (RecurrentGemma, xLSTM), a prediction
    head or a division before the output embeddings (ModernBERT-decoder, Inkling), a forward hook on the head, a
    quantised or fake-quantised head.

    Where one of a trainer's models needs it, both take it: two paths would differ by rounding where they must not.

    Such a model's forward now answers `fused_lm_head=True` with log-probs, entropies and whatever else the trainer
    asked for of the logits that its own forward gives, divided by the temperature, in float32 (float64 for float64).
    Memory: these logits, (B, T, V) in the model's dtype, at the positions from the first scored one on where the forward
    knows `logits_to_keep`; float32 for one sequence at a time, formed again in the backward. With
    `cast_lm_head_to_fp32` a head that is a plain `nn.Linear` multiplies in float32.

    Need is decided on a probe: 36 tokens through both paths with the same random numbers, without gradient, in the
    model's own mode (in eval mode where that fails); modes, buffers and random state are as before afterwards. Nothing
    is done where the logits agree within rounding,

        ||difference|| <= 2 u ||logits|| + 2^-24 sqrt(H) / 2 ||hidden|| ||weight||

    with u the unit roundoff of the coarsest dtype on the way (five roundings, of product, scale, division, tanh and
    product, are sqrt(5 / 3) u in norm), where the model's own forward fails on token ids alone, or where ZeRO-3
    holds the model in shards. A hook is seen if it is there when this is called. Accepts a trainer (its model and reference
    model) or a model.
    """
    models = fused_models(trainer_or_model)
    if not models:
        return Patch(NAME, reason="no model has a fused LM head: log-probs come from its own logits")
    in_float32 = bool(getattr(getattr(trainer_or_model, "args", None), "cast_lm_head_to_fp32", False))
    changed: list[str] = []
    reasons: list[str] = []
    undo: list[Callable[[], object]] = []
    calls: dict[int, tuple[_Call, str | None]] = {}
    for model in models:
        kind = type(model).__name__
        change = overridden(model, "forward", NAME)
        if change is not None:
            reasons.append(ALREADY)
            undo += change.hold(trainer_or_model)
            continue
        if in_shards(model):
            reasons.append(f"ZeRO-3 holds {kind} in shards, and no token can be tried")
            continue
        try:
            calls[id(model)] = _compare(model)
        except Exception as error:
            reasons.append(f"{kind} could not be tried ({type(error).__name__}: {error})")
    needed = ALREADY in reasons or any(why is not None for _, why in calls.values())
    for model in [m for m in models if id(m) in calls]:
        call, why = calls[id(model)]
        kind = type(model).__name__
        if not needed:
            reasons.append(f"the fused LM head computes the logits of {kind} itself")
            continue
        changed.append(f"{kind} ({why or 'as the trainer scores its other model'})")
        undo += _replace(model, call, in_float32).hold(trainer_or_model)
    return Patch(NAME, tuple(changed), reason=None if changed else "; ".join(dict.fromkeys(reasons)), _undo=undo)


def fused_models(trainer_or_model: Any) -> list[nn.Module]:
    """The models, of a trainer policy and reference, whose forward TRL has given a fused LM head."""
    return [m for m in modules_of(trainer_or_model) if _fused_forward(vars(m).get("forward")) is not None]


def scored_by_its_own_logits(model: Any) -> bool:
    """Whether `use_model_logits` is in force for this model."""
    return overridden(model, "forward", NAME) is not None


def _fused_forward(forward: Any) -> Any:
    """TRL's function under whatever has wrapped it since; None where there is none."""
    found = (f for f in chain(forward) if "fused_lm_head" in getattr(getattr(f, "__code__", None), "co_varnames", ()))
    return next(found, None)


def _own_forward(model: Any, bound: Callable[..., Any]) -> Callable[..., Any]:
    """The forward below the fused head. TRL holds the one of the model that it was given: of a copy, not its own."""
    below = closed_over(_fused_forward(bound), "original_forward")
    if getattr(below, "__self__", model) is model:
        return bound
    return types.MethodType(below.__func__, model)


@dataclasses.dataclass
class _Call:
    """What the fused LM head hands to its kernel."""

    given: dict[str, Any]
    dtype: torch.dtype  # of the coarsest rounding on the way


class _Spy:
    """Stands in for the kernel and keeps the last call."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.call: _Call | None = None
        self.signature = inspect.signature(getattr(kernel, ORIGINAL, kernel).forward)

    def apply(self, *args: Any) -> Any:
        bound = self.signature.bind(None, *args)
        bound.apply_defaults()
        hidden = bound.arguments["hidden"]
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        self.call = _Call(dict(bound.arguments), dtype)
        return self.kernel.apply(*args)


def _compare(model: nn.Module) -> tuple[_Call, str | None]:
    """The fused head's call on a probe, and in what its logits are not the model's own; None where they are."""
    utils = importlib.import_module("trl.trainer.utils")
    spy, given = _Spy(getattr(utils, _KERNEL)), probe(model)
    crash = None
    with undisturbed(model), torch.no_grad():
        try:
            logits = _seeded(model, **given, use_cache=False).logits
        except Exception:  # Gemma-3 in training mode wants to know which tokens are images
            model.eval()
            logits = _seeded(model, **given, use_cache=False).logits
        try:
            with mock.patch.object(utils, _KERNEL, spy):
                _seeded(model, **given, labels=given["input_ids"], fused_lm_head=True)
        except Exception as error:
            crash = error
    if spy.call is None:
        raise RuntimeError("the fused LM head did not reach its kernel") from crash
    if crash is not None:
        return spy.call, f"the fused LM head fails: {type(crash).__name__}"
    return spy.call, _difference(logits[:, :-1].flatten(0, 1), spy.call)


def _seeded(model: nn.Module, **given: Any) -> Any:
    """The model's output with the random numbers of every other call: dropout leaves out the same."""
    torch.manual_seed(0)
    return model(**given)


@torch.no_grad()
def _difference(logits: Tensor, call: _Call) -> str | None:
    """In words, how far (N, V) logits are from those of the fused head; None within rounding."""
    given = call.given
    hidden, weight, bias = given["hidden"], given["weight"], given.get("bias")
    cap, scale = given.get("final_logit_softcapping"), given.get("logit_scale", 1.0)
    error = size = weights = 0.0
    for start in range(0, weight.shape[0], _VOCAB_BLOCK):  # in float64, which no setting of the device makes coarse
        block = slice(start, start + _VOCAB_BLOCK)
        w = weight[block].double()
        z = hidden.double() @ w.T
        if bias is not None:
            z += bias[block].double()
        z *= scale
        z = z if cap is None else cap * torch.tanh(z / cap)
        mine = logits[:, block].double().to(z.device)
        if not torch.equal(mine.isfinite(), z.isfinite()):
            return "its own logits are infinite elsewhere"
        error += float((mine - z).nan_to_num(0.0, 0.0, 0.0).square().sum())
        size += float(mine.nan_to_num(0.0, 0.0, 0.0).square().sum())
        weights += float(w.square().sum())
    reduced = hidden.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    u = max(torch.finfo(t).eps / 2 for t in (call.dtype, logits.dtype, weight.dtype))
    u = max(u, 2.0**-11) if reduced else u
    summed = 2.0**-24 * hidden.shape[1] ** 0.5 / 2 * float(hidden.double().norm()) * weights**0.5
    if error**0.5 <= 2 * u * size**0.5 + summed:
        return None
    return f"the fused LM head's logits are {100 * (error / size) ** 0.5 if size else 100:.2g} % off"


def _replace(model: Any, call: _Call, in_float32: bool) -> Change:
    """Gives `model` a forward that scores its own logits."""
    utils = importlib.import_module("trl.trainer.utils")
    output = utils.FusedCausalLMOutput
    known = {f.name for f in dataclasses.fields(output)}
    takes_part = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    wanted, temperature = call.given.get("outputs", ()), call.given["temperature"]

    def forward(self: Any, fused: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = _own_forward(self, fused)
        if not kwargs.pop("fused_lm_head", False):
            return bound(*args, **kwargs)
        items, labels, shifted = (kwargs.pop(k, None) for k in ("num_items_in_batch", "labels", "shift_labels"))
        targets = labels[:, 1:] if shifted is None else shifted
        scored = targets != -100
        skipped = int(scored.any(0).int().argmax()) if takes_part else 0
        if skipped:
            kwargs["logits_to_keep"] = scored.shape[1] + (shifted is None) - skipped
        with head_in_float32(self) if in_float32 else contextlib.nullcontext():
            found = bound(*args, **kwargs | {"use_cache": False})
        logits = found.logits if shifted is not None else found.logits[:, :-1]
        fields = _scores(logits, targets.to(logits.device), skipped, temperature, wanted)
        mask = scored.to(logits.device)
        loss = -fields["log_probs"].sum() / (mask.sum().clamp(min=1) if items is None else items)
        aux = getattr(found, "aux_loss", None) if kwargs.get("output_router_logits") else None
        if aux is not None:
            loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux
        fields |= {"loss": loss, "label_mask": mask, "aux_loss": aux}
        return output(**{k: v for k, v in fields.items() if k in known})

    return override(model, "forward", NAME, forward)


@contextlib.contextmanager
def head_in_float32(model: Any) -> Iterator[None]:
    """The head multiplies in float32 outside autocast, hooks on it in place; heads of other kinds compute as they do."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or "forward" in vars(head):
        yield
        return

    def wide(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(
                x.float(), head.weight.float(), None if head.bias is None else head.bias.float()
            )

    head.forward = wide
    try:
        yield
    finally:
        del head.forward


def _scores(
    logits: Tensor, targets: Tensor, skipped: int, temperature: float, wanted: tuple[str, ...]
) -> dict[str, Tensor]:
    """Per-token fields (B, T) of logits (B, T - skipped, V) and targets (B, T), 0 where a target is -100."""
    mask = targets != -100
    parts = []
    for row, ids in zip(logits, targets[:, skipped:], strict=True):
        for block in range(0, max(len(ids), 1), _TOKEN_BLOCK):
            piece, here = row[block : block + _TOKEN_BLOCK], ids[block : block + _TOKEN_BLOCK]
            kept = here != -100
            arguments = (piece, kept, here[kept], temperature, wanted)
            parts.append(checkpoint(_score, *arguments, use_reentrant=False, preserve_rng_state=False))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    # masked_scatter keeps the graph even where no token is scored: an empty micro-batch has a gradient of zeros.
    spread = [c.new_zeros(mask.shape).masked_scatter(mask, c) for c in columns]
    return dict(zip(("log_probs", *(name for name in _FIELDS if name in wanted)), spread, strict=True))


_FIELDS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _score(
    logits: Tensor, kept: Tensor, ids: Tensor, temperature: float, wanted: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """The log-probs of `ids` (N,) by the kept rows of `logits` (T, V), and the fields wanted, in their order.

    `-softplus(logsumexp of the others - z[id])` keeps value and gradient of a confident token.
    """
    z = logits[kept].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    column = ids.unsqueeze(1)
    logits = z.gather(1, column).squeeze(1)
    others = z.scatter(1, column, -torch.inf)
    alone = (others == -torch.inf).all(1)  # no other token at all: any finite stand-in will do
    delta = torch.logsumexp(others.masked_fill(alone.unsqueeze(1), 0.0), 1) - logits
    delta = delta.masked_fill(alone, -torch.inf)
    out = [-torch.logaddexp(delta.new_zeros(()), delta)]
    table = torch.log_softmax(z, 1) if {"entropy", "log_sum_sq_probs"} & set(wanted) else z
    if "entropy" in wanted:
        p = table.exp()
        out.append(-(p * table.masked_fill(p == 0, 0.0)).sum(1))
    with torch.no_grad():
        if "log_sum_sq_probs" in wanted:
            out.append(torch.logsumexp(2 * table.detach(), 1))
        if "mean_logits" in wanted:
            out.append(z.detach().mean(1))
        if "is_top1" in wanted:
            before = torch.arange(z.shape[1], device=z.device) < column
            earlier = z.detach().masked_fill(~before, -torch.inf).amax(1)
            out.append((logits >= z.amax(1)) & (logits > earlier))
    return tuple(out)
