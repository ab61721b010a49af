"""A test case as data: a family, settings and a seed. Every tensor follows from them.

A value is a function of (seed, tensor name, index) alone: a counter-based integer hash, evaluated on the CPU, on a
dyadic grid. Lowering a shape keeps every other value, so a finding survives while Hypothesis shrinks it, and no
version of any library changes it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from parity.decoding import convert, decode, of_schema, shown, text_of
from parity.errors import UsageError
from parity.judge import values

SCHEMA = 1
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of a loss family: seed, dtype of the parameters under test, and the settings away from their default.

    `settings` holds shapes, mask layout and options alike, under the names of the family's table. `tensors` is the path of
    a safetensors file (in a case file its name: both are in one folder) that replaces the generated inputs, `sha256` its hash.
    """

    family: str
    seed: int
    dtype: Literal["fp64", "fp32", "fp16", "bf16"]
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
        """Read a case from a JSON object. Raises UsageError, naming `source`, the field and its value, when the object is
        not a case."""
        of_schema(data, SCHEMA, source, "a case")
        case: Case = convert(cls, data, source)
        if bool(case.tensors) != bool(case.sha256):
            raise UsageError(f"{source}: tensors and sha256 belong together: a case without its hash is not read")
        return case

    @classmethod
    def load(cls, path: str | Path) -> Case:
        return Frozen.load(path).case


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A case file: the case, whom it was found with, who runs on it (None: all), whether without repeated calls, and what it
    gave when it was measured (`parity.results.recorded`). Further remarks are the writer's own.
    """

    case: Case
    implementation: str | None = None
    implementations: tuple[str, ...] | None = None
    fast: bool = False
    recorded: tuple[dict[str, Any], ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Frozen:
        """Read a case file: a case, or one under the key "case" beside remarks. Raises UsageError, in one line that names
        the file, the field and its value."""
        where = str(path)
        data = decode(Any, text_of(Path(path), "case"), where)
        if not isinstance(data, dict) or "case" not in data:
            data = {"case": data}
        case = Case.from_json(data["case"], where)
        if case.tensors:  # named as they stand beside the file
            if Path(case.tensors).name != case.tensors:
                raise UsageError(f"{path}: tensors {shown(case.tensors)} must be the name of a file beside the case")
            case = dataclasses.replace(case, tensors=str(Path(path).parent / case.tensors))
        found: Frozen = convert(cls, data, where)
        return dataclasses.replace(found, case=case)


def hashes(seed: int, name: str, shape: Sequence[int]) -> np.ndarray:
    """uint64 array of `shape`: `parity.judge.values.hashes`."""
    return values.hashes(seed, name, shape).numpy().view(np.uint64)


def rounded(x: torch.Tensor, bits: int = 10) -> torch.Tensor:
    """x rounded to the grid 2⁻ᵇⁱᵗˢ: what is derived from an oracle must not depend on the last bits of a library."""
    return torch.round(x * 2.0**bits) * 2.0**-bits


def covering(
    cases: Sequence[T],
    shows: Callable[[T], Set[Hashable]],
    met: Set[Hashable] = frozenset(),
    price: Callable[[T], float] = lambda case: 1.0,
) -> Iterator[T]:
    """Those of the cases that show what neither `met` nor any before them does, the one that shows most of it for its price
    first (the greedy set cover)."""
    shown, seen, prices = [shows(case) for case in cases], set(met), [price(case) for case in cases]
    promised = [(-len(found - seen) / prices[number], number) for number, found in enumerate(shown)]
    heapq.heapify(promised)
    while promised:
        least, number = heapq.heappop(promised)
        new = len(shown[number] - seen) / prices[number]
        if new < -least:  # what it promised was met since
            heapq.heappush(promised, (-new, number))
        elif new:
            seen |= shown[number]
            yield cases[number]
