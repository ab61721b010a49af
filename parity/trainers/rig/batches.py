"""The sequences within the micro-batches that a trainer's own batching made, whatever their layout."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parity.errors import Unsupported
from parity.trainers.rig.stored_window import Sequences


def sequences_of(batches: list[dict[str, Any]]) -> Sequences:
    """The sequences of recorded batches without padding, prompt length first found from their loss mask."""
    out: Sequences = []
    for batch in batches:
        out += _of_batch(batch)
    return out


def _of_batch(batch: Mapping[str, Any]) -> Sequences:
    if "prompt_ids" in batch:
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        present = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        loss = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], 1)
        return [_one(*row) for row in zip(tokens, present, loss, strict=True)]
    if "chosen_labels" in batch:  # CPO, ORPO: completions stand behind their prompts
        names = ("input_ids", "attention_mask", "labels")
        sides = [[batch[f"{side}_{name}"] for name in names] for side in ("chosen", "rejected")]
        return [_one(t, m, (n != -100).long()) for side in sides for t, m, n in zip(*side, strict=True)]
    if "chosen_input_ids" in batch:  # DPO up to 0.28
        return [pair for side in ("chosen", "rejected") for pair in _beside_the_prompt(batch, side)]
    if "input_ids" not in batch:
        raise Unsupported(f"a batch of {', '.join(sorted(batch))} is not a layout that can be read")
    tokens = batch["input_ids"]
    loss = batch["completion_mask"] if "completion_mask" in batch else (batch["labels"] != -100).long()
    if "attention_mask" in batch:
        return [_one(*row) for row in zip(tokens, batch["attention_mask"], loss, strict=True)]
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist() + [tokens.shape[1]]  # packed into one row
    pieces = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return [_one(tokens[0, p], torch.ones_like(tokens[0, p]), loss[0, p]) for p in pieces]


def _beside_the_prompt(batch: Mapping[str, Any], side: str) -> Sequences:
    """Sequences of a layout that keeps prompt and completion apart."""
    names = ("prompt", side)
    tokens, present = (torch.cat([batch[f"{n}_{what}"] for n in names], 1) for what in ("input_ids", "attention_mask"))
    loss = torch.cat([torch.zeros_like(batch["prompt_input_ids"]), batch[f"{side}_attention_mask"]], 1)
    return [_one(*row) for row in zip(tokens, present, loss, strict=True)]


def _one(tokens: Tensor, present: Tensor, loss: Tensor) -> tuple[list[int], int]:
    kept = tokens[present.bool()].tolist()
    return kept, len(kept) - int((loss * present).sum())
