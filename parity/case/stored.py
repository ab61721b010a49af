"""Tensors of a case that are stored beside it, in a safetensors file, instead of generated from its seed."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from parity import decoding
from parity.case.case import Case
from parity.case.family import LARGEST_CASE, Family
from parity.errors import UsageError
from parity.judge.recipe import DTYPES

MAY_BE_INFINITE = frozenset(
    "bias teacher_bias support_logps top1_logps label_logps sampling_logps teacher_logits".split()
)
"""Where -inf excludes a token; sampling log-probs are NaN where the sampler could not score one."""


def write(case: Case, tensors: Mapping[str, Tensor], to: Path, **remarks: object) -> Case:
    """Write a case to `to` and its tensors beside it, both complete or not at all; the case as it will be read. Raises
    UsageError when the files cannot be written."""
    from safetensors.torch import save

    content = save({n: t.detach().cpu().contiguous().clone() for n, t in sorted(tensors.items())})
    beside = to.with_suffix(".safetensors")
    named = dataclasses.replace(case, tensors=beside.name, sha256=hashlib.sha256(content).hexdigest())
    try:
        decoding.write(beside, content)
        decoding.write(to, json.dumps({"case": named.to_json(), **remarks}, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}: the case is not written") from None
    return dataclasses.replace(named, tensors=str(beside))


@functools.lru_cache(maxsize=1)
def _parsed(path: str, sha256: str) -> dict[str, Tensor]:
    try:
        if (length := Path(path).stat().st_size) > 8 * LARGEST_CASE:
            raise UsageError(f"{path}: {length:,} bytes, at most {8 * LARGEST_CASE:,}")
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: the case's tensors are not there: {getattr(error, 'strerror', error)}") from None
    return decoding.tensors_of(content, sha256, path)


def read(case: Case) -> dict[str, Tensor]:
    """The tensors of a case, its hash checked. Raises UsageError where the file is missing, too large, damaged or no
    safetensors file."""
    if not case.tensors or not case.sha256:
        raise UsageError(f"case {case.id}: stored tensors need both a file (tensors) and its sha256")
    return dict(_parsed(case.tensors, case.sha256))


def sizes(family: Family, tensors: Mapping[str, Tensor], where: str, required: Collection[str]) -> dict[str, int]:
    """Letter -> size of the dimensions that `Family.stored` names; `required`: the tensors that must be there. Raises
    UsageError for a tensor that the family does not have, one that is missing, or a shape that fits no other."""
    known, out = family.stored, dict[str, int]()
    for name in tensors:
        if name.removeprefix("d ") not in {*known, *family.outputs}:
            raise UsageError(f"{where}: tensor {name!r} is unknown to family {family.name}: {', '.join(known)}")
    if missing := [name for name in required if name not in tensors]:
        raise UsageError(f"{where}: tensor {', '.join(missing)} is missing, family {family.name} needs it")
    for name, letters in sorted(known.items(), key=lambda one: one[0] not in required):
        if name not in tensors:
            continue
        shape = tuple(tensors[name].shape)
        fitting = [dict(zip(one, shape, strict=True)) for one in letters.split("|") if len(one) == len(shape)]
        fitting = [of for of in fitting if all(out.get(k, n) == n for k, n in of.items() if k != "1")]
        if not fitting or 0 in shape:
            wanted = " or ".join(f"({', '.join(one)})" for one in letters.split("|"))
            at = ", ".join(f"{k}={n}" for k, n in out.items())
            raise UsageError(f"{where}: {name} has shape {shape}, expected {wanted}{' with ' + at if at else ''}")
        out |= {k: n for k, n in fitting[0].items() if k != "1"}
    return out


def check_values(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse what no definition has a value for. Raises UsageError for an infinite or NaN entry, or a floating-point type
    that no case has."""
    for name, value in tensors.items():
        if value.is_floating_point() and value.dtype not in DTYPES.values():
            raise UsageError(f"{where}: {name} is {value.dtype}, no case has that")
        if value.is_floating_point() and name not in MAY_BE_INFINITE and not bool(torch.isfinite(value).all()):
            raise UsageError(f"{where}: {name} has entries that are not finite: the definition has no value for them")
