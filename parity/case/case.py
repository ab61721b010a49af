"""A test case as data: a family, settings and a seed. Every tensor follows from them.

A value is a function of (seed, tensor name, index) alone: a counter-based integer hash, evaluated on the CPU, on a
dyadic grid. Lowering a shape keeps every other value, so a finding survives while Hypothesis shrinks it, and no
version of any library changes it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from parity.decoding import convert, json_of, of_schema, shown, text_of
from parity.errors import UsageError

SCHEMA = 1

_GOLDEN = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of a loss family: seed, dtype of the parameters under test, and the settings away from their default.

    `settings` holds shapes, mask layout and options alike, under the names of the family's table. `tensors` is the path of
    a safetensors file (in a case file its name: both are in one folder) that replaces the generated inputs, `sha256` its hash.
    """

    family: str
    seed: int
    dtype: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: str | None = None
    sha256: str | None = None

    @functools.cached_property
    def id(self) -> str:
        """`family-xxxxxxxx`: a digest of the canonical JSON, stable across processes and versions."""
        data = self.to_json()
        if self.sha256:  # what is in the file counts, not where it lies
            del data["tensors"]
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        return f"{self.family}-{digest[:10]}"

    def to_json(self) -> dict[str, Any]:
        """The case as a JSON object; `Case.from_json` is its inverse."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "family": self.family,
            "seed": self.seed,
            "dtype": self.dtype,
            "settings": dict(sorted(self.settings.items())),
        }
        stored = {"tensors": self.tensors, "sha256": self.sha256}
        return data | {name: value for name, value in stored.items() if value}

    @classmethod
    def from_json(cls, data: Any, source: str = "case") -> Case:
        """Read a case from a JSON object.

        Raises:
            UsageError: naming `source`, the field and its value, when the object is not a case.
        """
        of_schema(data, SCHEMA, source, "a case")
        raw = convert(_Json, data, source)
        if bool(raw.tensors) != bool(raw.sha256):
            raise UsageError(f"{source}: tensors and sha256 belong together: a case without its hash is not read")
        return cls(raw.family, raw.seed, raw.dtype, raw.settings, raw.tensors, raw.sha256)

    @classmethod
    def load(cls, path: str | Path) -> Case:
        """The case of a file; see `Frozen.load`."""
        return Frozen.load(path).case


class _Json(msgspec.Struct):
    """A case in JSON, with its schema."""

    family: str
    seed: int
    dtype: Literal["fp64", "fp32", "fp16", "bf16"]
    settings: dict[str, Any]
    tensors: str | None = None
    sha256: str | None = None


class _File(msgspec.Struct):
    """A case file with remarks; remarks that are not named here are the writer's own."""

    case: dict[str, Any]
    implementation: str | None = None
    implementations: tuple[str, ...] | None = None
    fast: bool = False
    recorded: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A case file: the case, whom it was found with, who runs on it (None: all), whether without repeated calls, and what it
    gave when it was measured (`parity.results.recorded`).
    """

    case: Case
    implementation: str | None = None
    implementations: tuple[str, ...] | None = None
    fast: bool = False
    recorded: tuple[dict[str, Any], ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Frozen:
        """Read a case file: a case, or one under the key "case" beside remarks.

        Raises:
            UsageError: one line that names the file, the field and its value.
        """
        where = str(path)
        data = json_of(text_of(Path(path), "case"), where, "readable JSON case")
        if not isinstance(data, dict) or "case" not in data:
            return cls(_beside(Path(path), Case.from_json(data, where)))
        raw = convert(_File, data, where)
        case = _beside(Path(path), Case.from_json(raw.case, where))
        return cls(case, raw.implementation, raw.implementations, raw.fast, raw.recorded)


def _beside(path: Path, case: Case) -> Case:
    """The case with the path of its tensors, which a case file names as they stand beside it."""
    if not case.tensors:
        return case
    if Path(case.tensors).name != case.tensors:
        raise UsageError(f"{path}: tensors {shown(case.tensors)} must be the name of a file beside the case")
    return dataclasses.replace(case, tensors=str(path.parent / case.tensors))


def _mix(h: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def hashes(seed: int, name: str, shape: Sequence[int]) -> np.ndarray:
    """uint64 array of `shape`; element (i, j, …) depends on seed, name and (i, j, …) only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    out = np.full((), int.from_bytes(digest, "little"), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for size in shape:
            index = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
            out = _mix(out[..., None] + index)
    return out


def uniform(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """float64 in [0, 1) on the grid 2⁻²⁴."""
    return torch.as_tensor((hashes(seed, name, shape) >> np.uint64(40)).astype(np.float64) * 2.0**-24)


def normal(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """float64, bell-shaped with mean 0 and standard deviation 1.03 in ±3.6, on the grid 2⁻¹³ (a sum of four uniforms)."""
    h = hashes(seed, name, shape)
    total = np.zeros(h.shape, dtype=np.int64)
    for field in range(4):
        total += ((h >> np.uint64(16 * field)) & np.uint64(0x3FFF)).astype(np.int64)
    return torch.as_tensor((total - 2 * 0x3FFF).astype(np.float64) * 2.0**-13 * 0.8984375)


def integers(seed: int, name: str, shape: Sequence[int], bound: int) -> torch.Tensor:
    """int64 in [0, bound). Lowering `bound` keeps every value that stays below it.

    Candidates are read from the high bits downwards with the smallest sufficient number of bits and rejected while too
    large; `bound` of the same bit length therefore share their candidates.
    """
    if bound < 1:
        raise UsageError(f"integers {name!r}: bound {bound} must be at least 1")
    bits = max(1, math.ceil(math.log2(bound))) if bound > 1 else 1
    mask = np.uint64((1 << bits) - 1)
    out = np.full(tuple(shape), -1, dtype=np.int64)
    for attempt in range(12):
        candidate = (hashes(seed, f"{name}#{attempt}", shape) & mask).astype(np.int64)
        out = np.where((out < 0) & (candidate < bound), candidate, out)
    return torch.as_tensor(np.where(out < 0, 0, out))


def rounded(x: torch.Tensor, bits: int = 10) -> torch.Tensor:
    """x rounded to the grid 2⁻ᵇⁱᵗˢ: what is derived from an oracle must not depend on the last bits of a library."""
    return torch.round(x * 2.0**bits) * 2.0**-bits
