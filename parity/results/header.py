"""The first row of a results file: what the run was, and where."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, field

from parity.results.row import SCHEMA, Written


class Asked(msgspec.Struct, kw_only=True):
    """What a run was asked for, besides profile and seed: a run that goes on asks for the same."""

    families: list[str] = field(default_factory=list)
    implementations: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    device: str = "auto"
    require: list[str] = field(default_factory=list)
    ledger: str | None = None
    files: dict[str, str] = field(default_factory=dict)


class About(msgspec.Struct, kw_only=True, rename={"source_hash": "cut-cross-entropy source"}):
    """What a run must record about where it ran."""

    versions: dict[str, str] = field(default_factory=dict)
    source_hash: str | None = None
    device: str | None = None
    device_name: str | None = None
    driver: str | None = None
    float32_matmul_precision: str | None = None
    products: dict[str, Any] | None = None
    triton: str | None = None
    profile: str | None = None
    seed: int | None = None
    git: str | None = None
    rollouts: list[str] | None = None
    started: str | None = None
    command: str | None = None
    asked: Asked | UnsetType = UNSET
    plan: dict[str, int] | UnsetType = UNSET
    ends: bool | UnsetType = UNSET
    seconds: float | UnsetType = UNSET

    @property
    def shards(self) -> dict[str, int]:
        """The cases of each shard of the plan, where the file has one."""
        return self.plan if isinstance(self.plan, dict) else {}


class End(msgspec.Struct, kw_only=True):
    """How a run ended."""

    cases: int
    of: int
    complete: bool
    exit_code: int


class Part(msgspec.Struct, kw_only=True):
    """A shard that is done."""

    name: str
    cases: int
    seconds: float = 0.0
    memory: int = 0
    checked: dict[str, bool | None] = field(default_factory=dict)
    shown: list[tuple[str, str | None]] | None = None


class Parted(Written, kw_only=True):
    """The row behind those of a shard."""

    part: Part
    schema: int = SCHEMA
    run: str = ""


class Last(Written, kw_only=True):
    """The last row."""

    end: End
    schema: int = SCHEMA
    run: str = ""


class Header(Written, kw_only=True):
    """The first row. Reading a file adds `end`, of its last row, `interrupted`, where that is missing or cut, and `parts`, the
    shards that are done."""

    schema: int = SCHEMA
    run: str = ""
    header: About
    end: End | UnsetType = UNSET
    interrupted: bool | UnsetType = UNSET
    parts: list[Part] | UnsetType = UNSET
