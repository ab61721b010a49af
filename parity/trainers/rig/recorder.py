"""Record the training steps of a real trainer: what its batching passed to the loss, and the gradients."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.upstream import trl

Sequences = list[tuple[list[int], int]]
"""Token ids of prompt and completion, and the length of the prompt."""
SIDES = ("chosen", "rejected")
LOGGED: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
"""Arguments with which each step is logged all the same."""


def sequences_of(batches: Iterable[Mapping[str, Any]]) -> Sequences:
    """The sequences of recorded batches without padding, prompt length first found from their loss mask."""
    out: Sequences = []
    for batch in batches:
        for part in parts(batch):
            for tokens, present, loss in zip(*part, strict=True):
                kept = tokens[present.bool()].tolist()
                out.append((kept, max(1, len(kept) - int((loss * present).sum()))))  # no model predicts a first token
    return out


def parts(batch: Mapping[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Token ids, attention mask, and 1 where a token is in the loss, each (N, T): of a batch, or of each part of it.
    Raises Unsupported for a layout that is not known."""
    if "prompt_ids" in batch:
        return [_joined(batch, "prompt", "completion", "ids", "mask")]
    if "chosen_labels" in batch:  # CPO, ORPO: completions stand behind their prompts
        names = ("input_ids", "attention_mask", "labels")
        sides = [[batch[f"{side}_{name}"] for name in names] for side in SIDES]
        return [(tokens, present, (labels != -100).long()) for tokens, present, labels in sides]
    if "chosen_input_ids" in batch:  # DPO up to 0.28
        return [_joined(batch, "prompt", side, "input_ids", "attention_mask") for side in SIDES]
    if "input_ids" not in batch:
        raise Unsupported(f"a batch of {', '.join(sorted(batch))} is not a layout that can be read")
    tokens = batch["input_ids"]
    if "tree_kv_index" in batch:
        return _of_tree(batch)
    if "logits_to_keep" in batch:  # A2PO: completions stand at the end
        loss = batch["attention_mask"].clone()
        loss[:, : -batch["logits_to_keep"]] = 0
        return [(tokens, batch["attention_mask"], loss)]
    loss = batch["completion_mask"] if "completion_mask" in batch else (batch["labels"] != -100).long()
    rows = "position_ids" not in batch or len(tokens) > 1
    if "attention_mask" in batch and (rows or not bool(batch["attention_mask"].all())):
        return [(tokens, batch["attention_mask"], loss)]
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist() + [tokens.shape[1]]  # packed into one row
    pieces = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return [(tokens[:, p], torch.ones_like(tokens[:, p]), loss[:, p]) for p in pieces]


def _of_tree(batch: Mapping[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The sequences of a packed tree: its paths from a root to a leaf."""
    ends = batch["tree_cu_seqlens_k"][0].tolist()
    paths = [tuple(batch["tree_kv_index"][0, a:b].tolist()) for a, b in itertools.pairwise(ends) if b > a]
    leaves = [p for p in paths if not any(other[: len(p)] == p for other in paths if other != p)]
    trained = {int(n) for n in batch["token_index"][0] if n >= 0}
    out = []
    for path in leaves:
        loss = torch.tensor([[0, *(int(n in trained) for n in path[:-1])]])
        out.append((batch["input_ids"][0, list(path)].unsqueeze(0), torch.ones_like(loss), loss))
    return out


def _joined(batch: Mapping[str, Any], prompt: str, side: str, ids: str, mask: str) -> tuple[Tensor, Tensor, Tensor]:
    tokens, present = (torch.cat([batch[f"{part}_{name}"] for part in (prompt, side)], 1) for name in (ids, mask))
    prompts, completions = batch[f"{prompt}_{mask}"], batch[f"{side}_{mask}"]
    return tokens, present, torch.cat([torch.zeros_like(prompts), completions], 1)


@dataclasses.dataclass
class Steps:
    """What a training run did, optimizer step by optimizer step."""

    # for each micro-batch in order, what `compute_loss` was given, tensors as they were
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # for each micro-batch `num_items_in_batch` as the training loop handed it over (None: it did not)
    items: list[float | None] = dataclasses.field(default_factory=list)
    # for each micro-batch the loss as it went into the backward pass, divided by the accumulation steps
    losses: list[float] = dataclasses.field(default_factory=list)
    # for each optimizer step, name -> gradient before the optimizer saw it (absent: None)
    gradients: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)
    # for each optimizer step, name -> value of the parameter that the gradient was taken at
    parameters: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    # for each optimizer step, the number of micro-batches up to its end
    windows: list[int] = dataclasses.field(default_factory=list)
    sharded: int = 0  # the number of parameters of which each process holds a part

    def window(self, step: int) -> list[dict[str, Any]]:
        return self.batches[self.windows[step - 1] if step else 0 : self.windows[step]]


def plain(split: str) -> dict[str, Any]:
    """Arguments of a step that changes nothing and clips nothing, its window cut as "batch x accumulation"."""
    batch, accumulation = map(int, split.split("x"))
    nothing = {"learning_rate": 0.0, "max_grad_norm": 0.0, "gradient_checkpointing": False, "logging_strategy": "no"}
    cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    return trl.QUIET | nothing | cut


def train(trainer: Any, **given: Any) -> Steps:
    """Runs `trainer.train(**given)` and records it; the gradients are copies, taken before the optimizer's step."""
    from transformers import TrainerCallback

    steps = Steps()
    compute_loss, training_step = trainer.compute_loss, trainer.training_step
    online = any(base.__name__ == "OnlineDPOTrainer" for base in type(trainer).__mro__)
    scored: Any = getattr(trainer, "_forward", None) if online else None  # its training step calls no `compute_loss`

    def record(batch: Mapping[str, Any], items: Any = None) -> None:
        steps.batches.append({k: v.detach().clone() if torch.is_tensor(v) else v for k, v in batch.items()})
        steps.items.append(None if items is None else float(items))

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            record(dict(zip(names, args, strict=False)))
        return scored(model, *args, **kwargs)

    def recording(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        record(inputs, kwargs.get("num_items_in_batch"))
        return compute_loss(model, inputs, *args, **kwargs)

    def stepping(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = training_step(*args, **kwargs)
        steps.losses.append(float(loss))
        return loss

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
            trained = {n: p for n, p in named.items() if p.requires_grad}
            steps.gradients.append({n: None if p.grad is None else _whole(p.grad) for n, p in trained.items()})
            steps.parameters.append({n: _whole(p) for n, p in named.items()})
            steps.sharded = sum(hasattr(p, "full_tensor") for p in named.values())
            steps.windows.append(len(steps.batches))

    watched = {"compute_loss": recording, "training_step": stepping} | ({"_forward": forward} if scored else {})
    recorder = Recorder()
    trainer.add_callback(recorder)
    try:
        with mock.patch.multiple(trainer, **watched), trl.quiet(), trl.environment_kept(), trl.collecting_little():
            trainer.train(**given)
    finally:
        trainer.remove_callback(recorder)
    return steps


def _whole(tensor: Any) -> Tensor:
    """A copy, put together from all ranks where each holds a shard (a DTensor)."""
    found: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return found
