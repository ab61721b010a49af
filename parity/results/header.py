"""The first row of a results file: what the run was, and where."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType, field

from parity.results.row import SCHEMA, Written, described


class Asked(msgspec.Struct, kw_only=True):
    """What a run was asked for, besides profile and seed: a run that goes on, or is joined with others, asks for the same."""

    families: list[str] = field(default_factory=list)
    implementations: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    device: str = "auto"
    require: list[str] = field(default_factory=list)
    ledger: str | None = None
    share: str = ""
    files: Annotated[dict[str, str], described("digests of the user's files and of the ledger")] = field(
        default_factory=dict
    )


class About(msgspec.Struct, kw_only=True, rename={"source_hash": "cut-cross-entropy source"}):
    """What a run must record about where it ran."""

    versions: Annotated[dict[str, str], described("of the harness and of the libraries")] = field(default_factory=dict)
    source_hash: Annotated[str | None, described("digest of its files")] = None
    device: Annotated[str | None, described("cpu or cuda")] = None
    device_name: Annotated[str | None, described("of the GPU or the processor")] = None
    driver: Annotated[str | None, described("CUDA version of torch")] = None
    float32_matmul_precision: Annotated[str | None, described("as set in torch")] = None
    products: Annotated[
        dict[str, Any] | None, described("how tf32 and 16-bit products and sums were found to round")
    ] = None
    triton: Annotated[str | None, described("compiled or interpreted")] = None
    profile: Annotated[str | None, described("size of the run")] = None
    seed: Annotated[int | None, described("of the drawn cases")] = None
    git: Annotated[str | None, described('revision of the harness; "+" where it has changes')] = None
    rollouts: Annotated[list[str] | None, described("recordings")] = None
    started: Annotated[str | None, described("ISO 8601, UTC")] = None
    command: Annotated[str | None, described("command line")] = None
    asked: Annotated[Asked | UnsetType, described("options")] = UNSET
    plan: Annotated[dict[str, int] | UnsetType, described("shard -> cases")] = UNSET
    ends: Annotated[bool | UnsetType, described("true: the last row is a record of the end")] = UNSET
    dimensions: Annotated[dict[str, dict[str, Any]] | UnsetType, described("family -> setting -> its default")] = UNSET
    seconds: Annotated[float | UnsetType, described("how long the run took; known to its own report only")] = UNSET

    @property
    def shards(self) -> dict[str, int]:
        """What of the plan is this machine's: every N-th shard from the I-th on, where it has share I/N."""
        plan = self.plan if isinstance(self.plan, dict) else {}
        share = self.asked.share if isinstance(self.asked, Asked) else ""
        number, machines = map(int, share.split("/")) if share else (1, 1)
        return dict(list(plan.items())[number - 1 :: machines])


class End(msgspec.Struct, kw_only=True):
    """How a run ended."""

    cases: Annotated[int, described("run")]
    of: Annotated[int, described("planned")]
    complete: Annotated[bool, described("whether the run did all that it had planned")]
    exit_code: Annotated[int, described("of the command")]


class Part(msgspec.Struct, kw_only=True):
    """A shard that is done."""

    name: Annotated[str, described("of the shard")]
    cases: Annotated[int, described("run")]
    seconds: Annotated[float, described("CPU time")] = 0.0
    spent: Annotated[dict[str, dict[str, float]], described("CPU time by stage, phase and implementation")] = field(
        default_factory=dict
    )
    checked: Annotated[dict[str, bool | None], described("ledger entry -> whether it is stale")] = field(
        default_factory=dict
    )
    shown: Annotated[list[tuple[str, str | None]] | None, described("of a finding: what a fresh process shows")] = None
    apart: Annotated[
        dict[str, list[tuple[str, str, str]]], described("implementation -> pairs that it does not run with, and why")
    ] = field(default_factory=dict)


class Parted(Written, kw_only=True):
    """The row behind those of a shard."""

    part: Part
    schema: Annotated[int, described("version of the file")] = SCHEMA
    run: Annotated[str, described("id of the run")] = ""


class Last(Written, kw_only=True):
    """The last row."""

    end: Annotated[End, described("how the run ended")]
    schema: Annotated[int, described("version of the file")] = SCHEMA
    run: Annotated[str, described("id of the run")] = ""


class Header(Written, kw_only=True):
    """The first row. Reading a file adds `end`, of its last row, `interrupted`, where that is missing or cut, and `parts`, the
    shards that are done."""

    schema: Annotated[int, described("version of the file")] = SCHEMA
    run: Annotated[str, described("id of the run")] = ""
    header: About
    end: End | UnsetType = UNSET
    interrupted: bool | UnsetType = UNSET
    parts: list[Part] | UnsetType = UNSET
