"""Log-probs of stored completions by the trainer: eight, three or one at a time, its head in float32 or not.

Two judgements. The gradient of every parameter, against the model's own logits in float64; of a model in bfloat16 the
replicas round as it does. And the head alone: what the trainer made of the hidden states that its own backbone passed on,
against family `logprobs` on those very numbers, which needs no unit for the backbone.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case, normal
from parity.case.inputs import Inputs, Setting, defaults
from parity.errors import Unsupported
from parity.families import logprobs
from parity.judge.oracle import Oracle
from parity.judge.recipe import DTYPES, Recipe
from parity.judging.assess import CaseOracle
from parity.trainers.check import CheckCall, CheckCase, Entry, Quantity, by_profile, check, holds
from parity.trainers.definitions.bf16_model import BackboneRounding
from parity.trainers.definitions.formulas import padded
from parity.trainers.definitions.gradients import gradients
from parity.trainers.definitions.scored import Scored, taken
from parity.trainers.definitions.training_step import exact_step
from parity.trainers.rig import drive, models, stored_window
from parity.trainers.rig.stored_window import Window
from parity.upstream import trl

MODEL, TEMPERATURE = "llama", 0.7
TRAINERS = ("grpo-trainer", "rloo-trainer")
SETTINGS = {
    "dtype": Setting("fp32", "of the model", ("fp32", "bf16")),
    "batch": Setting("all", "sequences scored at once, of eight", ("all", "3", "1")),
    "cast_lm_head_to_fp32": Setting(False, "the head in float32, whatever the hidden states are", (False, True)),
}
PR: tuple[CheckCase, ...] = (("grpo-trainer", {"dtype": "bf16", "batch": "3", "cast_lm_head_to_fp32": True}),)
"""One that has it all."""


@by_profile(pr=PR)
def cases(seed: int) -> Iterator[CheckCase]:
    """Every value by itself in both dtypes."""
    yield from PR
    for trainer in TRAINERS:
        for dtype in ("fp32", "bf16"):
            yield from ((trainer, {"dtype": dtype, "batch": b}) for b in ("all", "3", "1"))
            yield trainer, {"dtype": dtype, "cast_lm_head_to_fp32": True}


@check("scoring", TRAINERS, SETTINGS, cases, moves=True)
def scoring(call: CheckCall) -> Iterator[Quantity]:
    """Log-probs and entropies of stored completions, and their gradients: one by one or all at once, head cast or not."""
    s, batch, trainer = call.settings, Batch(), _built(call)
    backbone: list[Tensor] = []
    handle = trainer.model.base_model.register_forward_hook(functools.partial(_keep, backbone))
    try:
        with trl.quiet(), drive.fixed(call.path, trainer):
            logps, entropies = _asked(trainer, batch, _size(s))
            (logps * batch.cotangent.to(logps)).sum().backward()
    finally:
        handle.remove()
    chunks = -(-len(batch.ids) // _size(s))
    yield holds("calls", len(backbone) == chunks, f"{len(backbone)} forward passes instead of {chunks}", gate="exact")
    yield from _head(trainer.model, batch, s, logps, entropies, backbone)
    yield gradients(_by_definition(s.dtype), {n: p.grad for n, p in trainer.model.named_parameters()})


def _size(s: SimpleNamespace) -> int:
    return len(stored_window.LENGTHS) if s.batch == "all" else int(s.batch)


class Batch:
    """The stored window as a trainer lays it out: prompts padded on the left, completions on the right.

    Attributes:
        window: the sequences without padding.
        ids, mask: (8, P + C).
        scored: the completion's tokens, (8, C), bool.
        cotangent: upstream gradient of the log-probs, (8, C), 0 at padding.
    """

    def __init__(self) -> None:
        self.window = Window("grpo-trainer", stored_window.rows()).sequences
        left = max(start for _, start in self.window)
        rows = [torch.tensor([*[models.PAD] * (left - start), *ids]) for ids, start in self.window]
        self.ids = padded(rows)  # the padding token is 0
        self.mask = (self.ids != models.PAD).long()
        self.scored = self.mask[:, left:].bool()
        self.cotangent = normal(5, "scoring", self.scored.shape).float() * self.scored


def _built(call: CheckCall) -> Any:
    s = call.settings
    cast = {"cast_lm_head_to_fp32": True} if s.cast_lm_head_to_fp32 else {}
    wanted = {"temperature": TEMPERATURE, "beta": 0.0, "gradient_checkpointing": False, **cast}
    trainer = drive.build(call.trainer, models.model(MODEL, DTYPES[s.dtype]), wanted, cast, call.device)
    trainer.model.train()
    return trainer


def _keep(backbone: list[Tensor], module: Any, args: Any, output: Any) -> None:
    output.last_hidden_state.retain_grad()
    backbone.append(output.last_hidden_state)


def _asked(trainer: Any, batch: Batch, size: int) -> tuple[Tensor, Tensor | None]:
    """Log-probs and, where the version hands them out, entropies of the completions: (8, C)."""
    score = getattr(trainer, drive.scorer(trainer))
    known = inspect.signature(score).parameters
    if "batch_size" not in known:
        raise Unsupported("the installed version scores all sequences at once: no batch_size")
    ids, mask = batch.ids.to(trainer.model.device), batch.mask.to(trainer.model.device)
    options = {"compute_entropy": True} if "compute_entropy" in known else {}
    return drive.scores(score(trainer.model, ids, mask, batch.scored.shape[1], batch_size=size, **options))


def _head(
    model: Any, batch: Batch, s: SimpleNamespace, logps: Tensor, entropies: Tensor | None, backbone: list[Tensor]
) -> Iterator[Quantity]:
    """Family `logprobs` on the scored positions, in the recipe of the version's kernel or of a head in float32."""
    before, scored = slice(-batch.scored.shape[1] - 1, -1), batch.scored
    slopes = torch.cat([torch.zeros_like(h) if h.grad is None else h.grad.clone() for h in backbone])
    head = model.get_output_embeddings().weight
    inputs = _inputs(head, batch, s, torch.cat(backbone)[:, before][scored].detach())
    oracle = CaseOracle.at(logprobs.FAMILY, inputs).oracle
    recipe = _recipe(s, calls=len(backbone)).resolve(s.dtype)
    found = {"logps": logps[scored], "grad_hidden": slopes[:, before][scored]}
    found |= {} if entropies is None else {"entropy": entropies[scored]}
    for name, value in (found | {"grad_weight": head.grad}).items():
        shaped = value.detach().cpu().view(oracle.exact[name].shape)
        yield Quantity(f"head: {name}", shaped, Entry(oracle, name, recipe))
    slopes[:, before][scored] = 0.0
    leaked = float(slopes.abs().amax())
    yield holds(
        "gradient elsewhere", leaked == 0.0, f"{leaked:.3g} at a hidden state that no scored token follows", "zero"
    )


def _inputs(head: Tensor, batch: Batch, s: SimpleNamespace, hidden: Tensor) -> Inputs:
    settings = defaults(logprobs.FAMILY.settings) | {"temperature": TEMPERATURE, "entropy": "value"}
    settings |= {"B": 1, "T": len(hidden), "H": hidden.shape[-1], "V": head.shape[0]}
    ids = batch.ids[:, -batch.scored.shape[1] :][batch.scored]
    tensors = {
        "hidden": hidden.cpu().unsqueeze(0),
        "weight": head.detach().cpu(),
        "ids": ids.unsqueeze(0),
        "bias": None,
    }
    cotangents = {"logps": batch.cotangent[batch.scored].unsqueeze(0)}
    return Inputs(Case("logprobs", 0, s.dtype), SimpleNamespace(**settings), tensors, ("hidden", "weight"), cotangents)


def _recipe(s: SimpleNamespace, calls: int) -> Recipe:
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


@functools.lru_cache(maxsize=2)
def _by_definition(dtype: str) -> Oracle:
    """Σ cotangent · log-prob by the model's own logits, in float64, at the parameters that it has in `dtype`."""
    batch = Batch()
    slopes = [g[seen].double() for g, seen in zip(batch.cotangent, batch.scored, strict=True)]

    def weighted(model: Any) -> Tensor:
        scored = Scored(model, batch.window)
        pairs = zip(scored.logits, scored.completions, strict=True)
        found = [taken(torch.log_softmax(z.float() / TEMPERATURE, -1), tokens) for z, tokens in pairs]
        return torch.stack([(g * logps).sum() for g, logps in zip(slopes, found, strict=True)]).sum()

    if dtype == "fp32":
        return exact_step(models.model(MODEL, torch.float64).train(), weighted)
    return exact_step(models.model(MODEL, DTYPES[dtype]).double().train(), weighted, BackboneRounding)
