"""Inputs of a case whose tensors are stored: what the tensors say of the settings, and what may not contradict them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import Inputs
from parity.case.layouts import arranged, laid_out
from parity.case.stored import check_values, read, sizes
from parity.errors import UsageError
from parity.families import head
from parity.families.head import IGNORE_INDEX, REQUIRED
from parity.judge.recipe import DTYPES

HEAD = {"hidden": "BTH", "weight": "VH", "bias": "V", "ids": "BT"}
"""Letters of the dimensions of each tensor; a letter is one size throughout."""


def of_head(
    family: Family, tensors: Mapping[str, Tensor], where: str, required: tuple[str, ...] = REQUIRED
) -> dict[str, Any]:
    """The settings of an LM head that its tensors decide. Raises UsageError for shapes that do not fit each other, and
    for a head in a dtype that no case has."""
    found: dict[str, Any] = sizes(family, tensors, where, required)
    found = {k: v for k, v in found.items() if k in ("B", "T", "V", "H")}
    hidden, weight, ids = (tensors[name] for name in REQUIRED)
    if weight.dtype not in (hidden.dtype, torch.float32):
        raise UsageError(f"{where}: weight is {weight.dtype} beside hidden states in {hidden.dtype}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"{where}: ids are {ids.dtype}, expected int64 or int32")
    return found | {
        "bias": of_bias(tensors.get("bias")),
        "head_dtype": "same" if weight.dtype == hidden.dtype else "fp32",
        "ids_dtype": str(ids.dtype).removeprefix("torch."),
    }


def of_bias(bias: Tensor | None) -> str:
    """The setting `bias` of a head."""
    return "none" if bias is None else "banned" if bool((bias == -torch.inf).any()) else "random"


def of_labels(family: Family, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """`of_head`, and the setting `ignored` of its labels."""
    out, hidden = of_head(family, tensors, where), tensors["ids"] == IGNORE_INDEX
    return out | {"ignored": "all" if bool(hidden.all()) else "some" if bool(hidden.any()) else "none"}


def inputs(family: Family, case: Case, scalar: bool = False) -> Inputs:
    """The inputs of a case whose tensors are stored. Seed 0: as they are; any other: hidden states negated, last row first.
    `scalar`: the first output is one number, not one for each position.

    The upstream gradient is the stored one, "d QUANTITY", else what the setting `cotangent` makes. Raises UsageError for
    tensors that do not fit the family, the case's settings or its dtype.
    """
    s, found, where = family.full_settings(case), read(case), str(case.tensors)
    check_values(found, where)
    for name, value in family.derived(found, where).items():
        if getattr(s, name) != value:
            raise UsageError(f"{where}: {name} is {value!r} in these tensors, {getattr(s, name)!r} in the case")
    if found["hidden"].dtype != DTYPES[case.dtype]:
        raise UsageError(f"{where}: hidden is {found['hidden'].dtype}, the case says {case.dtype}")
    first, ids = family.first, found["ids"]
    if bool(((ids >= s.V) | ((ids < 0) & (ids != IGNORE_INDEX))).any()):
        raise UsageError(f"{where}: ids hold {int(ids.min())} to {int(ids.max())}, the vocabulary is V={s.V}")
    shape = () if scalar else tuple(ids.shape)
    upstream = found.pop(f"d {first}", head.cotangent(case, s, first, shape)).double()
    if tuple(upstream.shape) != shape:
        raise UsageError(f"{where}: d {first} has shape {tuple(upstream.shape)}, expected {shape}")
    hidden = -found["hidden"].flip(0, 1) if case.seed else found["hidden"]
    tensors = dict.fromkeys(family.stored) | found | {"hidden": laid_out(hidden, s.layout)}
    return arranged(head.inputs(case, s, tensors, head.leaves(s), {first: upstream}))
