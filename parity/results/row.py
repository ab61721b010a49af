"""The rows of a results file: the header, one for each judged quantity with its verdict, the shards that are done, the end."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from parity.process import NOT_INSTALLED

SCHEMA = 2  # version of the results file

Verdict = Literal[
    "agree", "disagree", "refused", "unsupported", "crashed", "timed-out", "out-of-memory", "nondeterministic"
]
Class = Literal["logic", "precision"]
DECIDED: tuple[Verdict, ...] = ("agree", "disagree")  # held against the oracle, twice alike
JUDGED: tuple[Verdict, ...] = (*DECIDED, "nondeterministic")  # held against the oracle
STOPPED: tuple[Verdict, ...] = ("crashed", "timed-out", "out-of-memory")  # the call did not come to an end
FAILING: tuple[Verdict, ...] = ("disagree", "nondeterministic", *STOPPED)
"""Needs an explanation: a ledger entry, or it is a new finding."""
DECLINED: tuple[Verdict, ...] = ("refused", "unsupported")  # nothing was judged, and nothing is wrong

UNKNOWN, NO_REFERENCE = "whose fault is not known: ", "no reference ran this case"
"""In the message of a row that blames nobody for a call that came to no end, and after it the reason."""
IN_ITS = ", in its "
"""In such a message, between the cause and the part that ran: "forward pass", "backward pass", "call"."""


class Row(msgspec.Struct, kw_only=True, omit_defaults=True, rename={"cls": "class"}):
    """One quantity of one implementation on one case; docs/results.md explains the fields, `cls` under "class". A number
    that is not finite is None. A field that has its default is left out of a file."""

    run: str = ""
    case: str
    family: str
    implementation: str
    role: Literal["reference", "candidate"] = "candidate"
    against: str | None = None
    quantity: str | None = None
    dtype: str
    device: str
    verdict: Verdict
    cls: Class | None = None
    blame: Literal["candidate", "reference", "both", "harness"] | None = None
    gate: str | None = None
    headroom: float | None = None
    gates: dict[str, float | None] = msgspec.field(default_factory=dict)
    recipe: str | None = None
    recipes: list[str] = msgspec.field(default_factory=list)
    variant: str | None = None
    undecided: int = 0
    value: float | None = None
    value_oracle: float | None = None
    value_reference: float | None = None
    max_abs: float | None = None
    dist: float | None = None
    allclose: bool | None = None
    atol: float | None = None
    rtol: float | None = None
    slope: float | None = None
    worst: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    known: str | None = None
    seed: int | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    features: dict[str, Any] = msgspec.field(default_factory=dict)
    message: str = ""
    replay: str = ""
    unjudged: list[str] = msgspec.field(default_factory=list)
    imported_from: str | UnsetType = UNSET
    shard: str | UnsetType = UNSET
    frozen: str | UnsetType = UNSET
    minimised: bool | UnsetType = UNSET

    @property
    def judged(self) -> bool:
        """Whether something was compared with the oracle."""
        return self.verdict in JUDGED

    @property
    def failing(self) -> bool:
        """Whether it needs an explanation, known or new."""
        return self.verdict in FAILING

    @property
    def new(self) -> bool:
        """Whether it fails and no ledger entry covers it."""
        return self.verdict in FAILING and not self.known

    @property
    def absent(self) -> bool:
        """Whether nothing ran because a library is not installed."""
        return self.verdict == "unsupported" and NOT_INSTALLED in self.message

    @property
    def subject(self) -> str:
        """The quantity; where there is none, the verdict."""
        return self.quantity or self.verdict


def failures(rows: Iterable[Row]) -> dict[str, float]:
    """What fails -> its largest error ÷ allowed, infinite where it has none."""
    out: dict[str, float] = {}
    for row in rows:
        if row.failing:
            out[row.subject] = max(out.get(row.subject, 0.0), math.inf if row.headroom is None else row.headroom)
    return out


def stopped_by(message: str) -> tuple[str, str]:
    """Why a call came to no end, and in which part of it ("": not known), of the message of such a row."""
    said = message.partition(f"; {UNKNOWN}")[0]
    cause, _, part = said.rpartition(IN_ITS)
    return (cause, part) if part in ("forward pass", "backward pass", "call") else (said, "")


SIZE, VALUE = 5, 6  # digits of an error, of a value


def finite(value: float | None, digits: int = SIZE) -> float | None:
    """The value to so many digits, or None where it is NaN or infinite: rows are strict JSON."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits - 1}e}")


class Asked(msgspec.Struct, kw_only=True):
    """What a run was asked for, besides profile and seed: a run that goes on asks for the same. `confirm`: by a night."""

    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "auto"
    require: tuple[str, ...] = ()
    ledger: str | None = None
    confirm: bool = False
    files: dict[str, str] = field(default_factory=dict)


class About(msgspec.Struct, kw_only=True):
    """What a run must record about where it ran."""

    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    device_name: str | None = None
    driver: str | None = None
    products: dict[str, Any] | None = None
    triton: str | None = None
    profile: str | None = None
    seed: int | None = None
    git: str | None = None
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
    cases: int
    of: int
    complete: bool
    exit_code: int
    reasons: list[str] = msgspec.field(default_factory=list)  # of the exit code


class Part(msgspec.Struct, kw_only=True):
    """A shard that is done."""

    name: str
    cases: int
    seconds: float = 0.0
    shown: list[tuple[str, str | None]] | None = None


class Parted(msgspec.Struct, kw_only=True):
    """The row behind those of a shard."""

    part: Part
    schema: int = SCHEMA
    run: str = ""


class Last(msgspec.Struct, kw_only=True):
    end: End
    schema: int = SCHEMA
    run: str = ""


class Header(msgspec.Struct, kw_only=True):
    """The first row. Reading adds `end`, `interrupted` where that is missing or cut, and `parts`, the shards that are done."""

    schema: int = SCHEMA
    run: str = ""
    header: About
    end: End | UnsetType = UNSET
    interrupted: bool | UnsetType = UNSET
    parts: list[Part] | UnsetType = UNSET
