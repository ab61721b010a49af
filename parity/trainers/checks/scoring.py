"""Log-probs of stored completions by the trainer: several at once, head in float32 or not, more logits than needed.

Two judgements. The gradient of every parameter, against the model's own logits in float64; of a model in bfloat16 the
replicas round as it does (`narrow`). And the head alone: what the trainer made of the hidden states that its own backbone
passed on, against family `logprobs` on those very numbers, which needs no unit for the backbone.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case, normal
from parity.case.inputs import Inputs, Setting, defaults
from parity.errors import Unsupported
from parity.families import logprobs
from parity.judge.escalation import CERTAIN, settle
from parity.judge.gates import Judgement, judge
from parity.judge.recipe import DTYPES, Recipe
from parity.judging.assess import CaseOracle
from parity.judging.oracle import exact as by_oracle
from parity.trainers.check import CheckCall, CheckCase, CheckResult, by_profile, check, holds, judged
from parity.trainers.definitions import windows
from parity.trainers.definitions.bf16_model import BackboneRounding
from parity.trainers.definitions.gradients import gradients
from parity.trainers.definitions.training_step import ExactStep, logits
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.stored_window import Sequences
from parity.upstream import trl

TEMPERATURE = 0.7
TRAINERS = ("grpo-trainer", "rloo-trainer")
SETTINGS = {
    "model": Setting("llama", "tiny model: plain, tied, with a softcap", ("llama", "qwen2", "gemma2")),
    "dtype": Setting("fp32", "of the model", ("fp32", "bf16")),
    "batch": Setting("all", "sequences scored at once, of eight", ("all", "3", "1")),
    "cast_lm_head_to_fp32": Setting(False, "the head in float32, whatever the hidden states are", (False, True)),
    "kept": Setting(
        "completion", "how many logits are kept: of the completion or the whole row", ("completion", "row")
    ),
}


PR: tuple[CheckCase, ...] = (("grpo-trainer", {"dtype": "bf16", "batch": "3", "cast_lm_head_to_fp32": True}),)
"""One that has it all."""


@by_profile(pr=PR)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every value by itself in both dtypes, and the cast with every model."""
    yield from PR
    for trainer in TRAINERS:
        for dtype in ("fp32", "bf16"):
            yield from ((trainer, {"dtype": dtype, "batch": b}) for b in ("all", "3", "1"))
            yield trainer, {"dtype": dtype, "kept": "row"}
            yield trainer, {"dtype": dtype, "cast_lm_head_to_fp32": True}
    for model in ("qwen2", "gemma2"):
        for cast in (False, True):
            yield "grpo-trainer", {"model": model, "dtype": "bf16", "batch": "3", "cast_lm_head_to_fp32": cast}


@check("scoring", TRAINERS, SETTINGS, cases, moves=True)
def scoring(call: CheckCall) -> Iterator[CheckResult]:
    """Log-probs and entropies of stored completions, and their gradients: one by one or all at once, head cast or not."""
    s = call.settings
    batch = Batch()
    trainer = _built(call)
    backbone: list[Tensor] = []
    handle = trainer.model.base_model.register_forward_hook(functools.partial(_keep, backbone))
    try:
        with trl.quiet(), drive.fixed(call, trainer):
            logps, entropies = _asked(trainer, batch, s)
            (logps * batch.cotangent.to(logps)).sum().backward()
    finally:
        handle.remove()
    chunks = -(-batch.ids.shape[0] // _size(s.batch))
    yield holds("calls", len(backbone) == chunks, f"{len(backbone)} forward passes instead of {chunks}", gate="exact")
    yield from _head(trainer.model, batch, s, logps, entropies, backbone)
    named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    yield gradients(_by_definition(s.model, s.dtype), {n: p.grad for n, p in named.items()})


def _size(batch: str) -> int:
    return len(stored_window.LENGTHS) if batch == "all" else int(batch)


class Batch:
    """The stored window as a trainer lays it out: prompts padded on the left, completions on the right.

    Attributes:
        ids, mask: (8, P + C).
        scored: the completion's tokens, (8, C), bool.
        cotangent: upstream gradient of the log-probs, (8, C), 0 at padding.
        sequences: the same without padding.
    """

    def __init__(self) -> None:
        self.sequences: Sequences = stored_window.sequences(stored_window.rows(), generated=True)
        left = max(start for _, start in self.sequences)
        right = max(len(ids) - start for ids, start in self.sequences)
        shape = (len(self.sequences), left + right)
        self.ids, self.mask = torch.full(shape, models.PAD), torch.zeros(shape, dtype=torch.long)
        for row, (ids, start) in enumerate(self.sequences):
            place = slice(left - start, left - start + len(ids))
            self.ids[row, place], self.mask[row, place] = torch.tensor(ids), 1
        self.scored = self.mask[:, left:].bool()
        self.cotangent = normal(5, "scoring", (shape[0], right)).float() * self.scored


def _built(call: CheckCall) -> Any:
    s = call.settings
    config = drive.config(call.trainer)
    wanted = {"temperature": TEMPERATURE, "beta": 0.0, "gradient_checkpointing": False}
    cast = {"cast_lm_head_to_fp32": True} if s.cast_lm_head_to_fp32 else {}
    args = drive.arguments(config, call.device, wanted | cast, tuple(cast))
    trainer = drive.build(call.trainer, models.model(s.model, DTYPES[s.dtype]), args)
    trainer.model.train()
    return trainer


def _keep(backbone: list[Tensor], module: Any, args: Any, output: Any) -> None:
    hidden = output.last_hidden_state
    hidden.retain_grad()
    backbone.append(hidden)


def _asked(trainer: Any, batch: Batch, s: Any) -> tuple[Tensor, Tensor | None]:
    """Log-probs and, where the version hands them out, entropies of the completions: (8, C)."""
    score = getattr(trainer, drive.scorer(trainer))
    known = inspect.signature(score).parameters
    if "batch_size" not in known:
        raise Unsupported("the installed version scores all sequences at once: no batch_size")
    ids, mask = batch.ids.to(trainer.model.device), batch.mask.to(trainer.model.device)
    width = batch.scored.shape[1]
    kept = width if s.kept == "completion" else ids.shape[1] - 1
    options = {"compute_entropy": True} if "compute_entropy" in known else {}
    out = score(trainer.model, ids, mask, kept, batch_size=_size(s.batch), **options)
    if isinstance(out, dict):
        out = (out["logps"], out.get("entropies"))
    logps, entropies = out[:2] if isinstance(out, tuple) else (out, None)
    return logps[:, -width:], None if entropies is None else entropies[:, -width:]


def _head(
    model: Any, batch: Batch, s: Any, logps: Tensor, entropies: Tensor | None, backbone: list[Tensor]
) -> Iterator[CheckResult]:
    """Family `logprobs` on the scored positions, in the recipe of the version's kernel or of a head in float32."""
    before, scored = slice(-batch.scored.shape[1] - 1, -1), batch.scored
    states, slopes = (torch.cat(x) for x in (backbone, [_gradient(h) for h in backbone]))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    inputs = _inputs(model, batch, s, states[:, before][scored].detach())
    oracle = CaseOracle(logprobs.FAMILY, inputs, by_oracle(logprobs.FAMILY, inputs))
    recipe = _recipe(s, calls=len(backbone)).resolve(s.dtype)
    found: dict[str, Tensor] = {"logps": logps[scored], "grad_hidden": slopes[:, before][scored]}
    if entropies is not None:
        found["entropy"] = entropies[scored]
    if not tied:
        found["grad_weight"] = model.get_output_embeddings().weight.grad
    for name, value in found.items():
        exact = oracle.exact[name]
        shaped = value.detach().cpu().view(exact.shape)
        yield judged(f"head: {name}", _judged(oracle, name, recipe, shaped), shaped, exact)
    slopes[:, before][scored] = 0.0
    leaked = float(slopes.abs().amax())
    yield holds(
        "gradient elsewhere", leaked == 0.0, f"{leaked:.3g} at a hidden state that no scored token follows", "zero"
    )


def _gradient(hidden: Tensor) -> Tensor:
    return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad.clone()


def _judged(oracle: CaseOracle, name: str, recipe: Recipe, value: Tensor) -> Judgement:
    found = settle(lambda count: {name: judge(value, oracle.unit(name, recipe, count), value.dtype)}, certain=CERTAIN)
    return found[name]


def _inputs(model: Any, batch: Batch, s: Any, hidden: Tensor) -> Inputs:
    fam = logprobs.FAMILY
    head = model.get_output_embeddings()
    settings = defaults(fam.settings) | windows.head_settings(model)
    settings |= {"temperature": TEMPERATURE, "entropy": "value", "B": 1, "T": len(hidden), "H": hidden.shape[-1]}
    settings["V"] = head.weight.shape[0]
    ids = batch.ids[:, -batch.scored.shape[1] :][batch.scored]
    tensors = {"hidden": hidden.cpu().unsqueeze(0), "weight": head.weight.detach().cpu(), "ids": ids.unsqueeze(0)}
    tensors["bias"] = None if head.bias is None else head.bias.detach().cpu()
    space = type(s)(**settings)
    leaves = ("hidden", "weight")
    cotangents = {"logps": batch.cotangent[batch.scored].unsqueeze(0)}
    return Inputs(Case("logprobs", 0, s.dtype), space, tensors, leaves, cotangents)


def _recipe(s: Any, calls: int) -> Recipe:
    """A head in float32 rounds as float32; TRL's kernel keeps tiles of logits and their gradient in the model's dtype.

    Before 1.15 the logits were materialised and their log-softmax stored in the dtype of the head. Each call adds its part to
    the gradient of the head, in the head's dtype.
    """
    if s.cast_lm_head_to_fp32:
        return Recipe()
    out = Recipe(logits="input", dlogits="input", accumulate="input", partials=calls)
    if not trl.since("1.15.0"):
        out = dataclasses.replace(out, elementwise="input", softmax="input", output="input")
    return out


@functools.lru_cache(maxsize=6)
def _by_definition(architecture: str, dtype: str) -> ExactStep:
    """Σ cotangent · log-prob by the model's own logits, in float64, at the parameters that it has in `dtype`."""
    batch = Batch()
    slopes = [g[seen].double() for g, seen in zip(batch.cotangent, batch.scored, strict=True)]

    def weighted(model: Any) -> Tensor:
        found = []
        for z, (tokens, start) in zip(logits(model, [t for t, _ in batch.sequences]), batch.sequences, strict=True):
            logps = torch.log_softmax(z[start - 1 : -1].float() / TEMPERATURE, -1)
            found.append(logps.gather(-1, torch.tensor(tokens[start:]).unsqueeze(-1))[:, 0])
        return torch.stack([(g * logps).sum() for g, logps in zip(slopes, found, strict=True)]).sum()

    if dtype == "fp32":
        return ExactStep(models.model(architecture, torch.float64).train(), weighted)
    return ExactStep(models.model(architecture, DTYPES[dtype]).double().train(), weighted, BackboneRounding)
