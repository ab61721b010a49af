"""Stored tensors of family `policy`: a batch of a real training step, with its decisions kept apart from rounding."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.errors import UsageError
from parity.families import head, stored_tensors
from parity.families.policy_inputs import check, error_bound, exactly, thresholds
from parity.families.policy_losses import mean
from parity.families.policy_settings import MASKS

REQUIRED = (*head.REQUIRED, "mask", "advantages")
BY_TOKEN = "mask completion_mask tool_mask old_logps ref_logps sampling_logps previous_ids".split()
TENSORS = stored_tensors.HEAD | dict.fromkeys(BY_TOKEN, "BT")
TENSORS |= {"advantages": "B|BT", "importance_sampling_ratio": "BT|B1", "lora_a": "RH", "lora_b": "VR"}
TENSORS |= {"num_items_in_batch": "", "top_entropy_quantile": ""}
_MASKS = {dtype: name for name, dtype in MASKS.items()}


def completed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with both masks: a completion ends at the last token of its mask, what is missing before is a tool's."""
    out = dict(tensors)
    mask = out["mask"].bool()
    if "completion_mask" not in out:
        out["completion_mask"] = mask.flip(-1).long().cumsum(-1).flip(-1).clamp(max=1)
        if bool((out["completion_mask"].bool() != mask).any()):
            out["tool_mask"] = mask.long()
    out.setdefault("num_items_in_batch", mask.sum())
    return out


def derived(family: Family, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """The settings that the tensors decide. Raises UsageError for masks that contradict one another."""
    out = stored_tensors.of_head(family, tensors, where, REQUIRED)
    mask, completion, tool = (tensors.get(n) for n in ("mask", "completion_mask", "tool_mask"))
    if mask is None or completion is None or "num_items_in_batch" not in tensors:
        raise UsageError(f"{where}: mask, completion_mask or num_items_in_batch is missing")
    product = completion.bool() if tool is None else completion.bool() & tool.bool()
    lengths = completion.long().sum(-1)
    ends = torch.arange(completion.shape[1]) < lengths[:, None]
    if bool((product != mask.bool()).any()) or bool((ends != completion.bool()).any()) or mask.dtype not in _MASKS:
        raise UsageError(f"{where}: mask is not completion_mask (a number of tokens from the first on) times tool_mask")
    ratio = tensors.get("importance_sampling_ratio")
    token = ratio is not None and ratio.shape == mask.shape
    return out | {
        "lengths": None if bool(ends.all()) else lengths.tolist(),
        "holes": tool is not None,
        "mask_dtype": _MASKS[mask.dtype],
        "advantages": "token" if tensors["advantages"].dim() == 2 else "mixed",
        "old": "mixed" if "old_logps" in tensors else "absent",
        "ratio": "none" if ratio is None else "token" if token else "sequence",
        "sampler": "given" if "sampling_logps" in tensors else "none",
        "entropy_quantile": "top_entropy_quantile" in tensors,
        "head": "lora" if "lora_a" in tensors else "tied" if "previous_ids" in tensors else "plain",
    }


def build(family: Family, case: Case, s: SimpleNamespace) -> Inputs:
    """The inputs of a stored batch. A token (a sequence, where the ratio is a sequence's) for which rounding alone
    decides on which side of a threshold it falls is masked out and counted, see `Inputs.undecided`. Raises UsageError for
    settings outside their range, and where nothing decided is left."""
    check(case, s)
    x = stored_tensors.inputs(family, case, scalar=True)
    if s.beta != 0.0 and x.ref_logps is None:
        raise UsageError(f"{case.tensors}: beta={s.beta} needs ref_logps")
    if s.head == "lora":
        x = dataclasses.replace(x, leaves=tuple(n for n in x.leaves if n == "hidden") + ("lora_a", "lora_b"))
    open_ = _undecided(case, s, x) & x.mask.bool()
    count = int(open_.sum())
    if count and count == int(x.mask.bool().sum()) and not case.seed:
        raise UsageError(f"{case.tensors}: rounding alone decides on which side of a threshold each token falls")
    if not count:
        return x
    keep = {"mask": (x.mask.bool() & ~open_).to(x.mask.dtype)}
    name = "completion_mask" if x.tool_mask is None else "tool_mask"
    keep[name] = (x.tensors[name].bool() & ~open_).to(x.tensors[name].dtype)  # type: ignore[union-attr]
    return dataclasses.replace(x.replace(**keep), undecided=count)


def _undecided(case: Case, s: SimpleNamespace, x: Inputs) -> Tensor:
    """(B, T) bool: a threshold lies within what rounding may move."""
    exact, z, all_logps, lp = exactly(x)
    margin, mask = error_bound(case, s, exact), x.mask.bool()
    out = torch.zeros_like(mask)
    if x.old_logps is not None:
        d = torch.where(mask, lp - exact.old_logps, 0.0)
        sequence = s.importance_sampling_level == "sequence"
        value, room = (mean(d, mask), margin.amax(-1, keepdim=True)) if sequence else (d, margin)
        for cut in thresholds(s):
            out |= (value - cut).abs() < room
    sampling = exact.sampling_logps if x.sampling_logps is not None else exact.old_logps
    if s.off_policy_mask_threshold is not None and sampling is not None:
        gap = mean((sampling - lp).nan_to_num(nan=0.0), mask)
        out |= (gap - s.off_policy_mask_threshold).abs() < margin.amax(-1, keepdim=True)
    if x.top_entropy_quantile is not None and bool(mask.any()):
        entropy = head.entropy(exact, z, all_logps)
        cut = torch.quantile(entropy[mask], 1 - float(x.top_entropy_quantile))
        if bool(((entropy - cut).abs() < 4 * margin)[mask].any()):  # to drop a token would move the quantile itself
            raise UsageError(f"{case.tensors}: rounding alone decides which tokens the entropy quantile keeps")
    return out
