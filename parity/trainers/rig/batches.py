"""The sequences within the micro-batches that a trainer's own batching made, whatever their layout."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.errors import Unsupported

Sequences = list[tuple[list[int], int]]
"""Token ids of prompt and completion, and the length of the prompt."""
SIDES = ("chosen", "rejected")


def sequences_of(batches: Iterable[Mapping[str, Any]]) -> Sequences:
    """The sequences of recorded batches without padding, prompt length first found from their loss mask."""
    out: Sequences = []
    for batch in batches:
        for part in parts(batch):
            for tokens, present, loss in zip(*part, strict=True):
                kept = tokens[present.bool()].tolist()
                out.append((kept, len(kept) - int((loss * present).sum())))
    return out


def parts(batch: Mapping[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Token ids, attention mask, and 1 where a token is in the loss, each (N, T): of a batch, or of each part of it.

    Raises:
        Unsupported: for a layout that is not known.
    """
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
    loss = batch["completion_mask"] if "completion_mask" in batch else (batch["labels"] != -100).long()
    if "attention_mask" in batch:
        return [(tokens, batch["attention_mask"], loss)]
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist() + [tokens.shape[1]]  # packed into one row
    pieces = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return [(tokens[:, p], torch.ones_like(tokens[:, p]), loss[:, p]) for p in pieces]


def _joined(batch: Mapping[str, Any], prompt: str, side: str, ids: str, mask: str) -> tuple[Tensor, Tensor, Tensor]:
    tokens, present = (torch.cat([batch[f"{part}_{name}"] for part in (prompt, side)], 1) for name in (ids, mask))
    prompts, completions = batch[f"{prompt}_{mask}"], batch[f"{side}_{mask}"]
    return tokens, present, torch.cat([torch.zeros_like(prompts), completions], 1)
