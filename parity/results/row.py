"""The typed row of a results file, its verdicts and their sets: what judging writes, and every report and search reads."""

import math
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from parity.process import NOT_INSTALLED

SCHEMA = 2
"""Version of the results file."""

Verdict = Literal[
    "agree", "disagree", "refused", "unsupported", "crashed", "timed-out", "out-of-memory", "nondeterministic"
]
Class = Literal["logic", "precision"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
DECIDED: tuple[Verdict, ...] = ("agree", "disagree")
"""Held against the oracle, twice alike."""
JUDGED: tuple[Verdict, ...] = (*DECIDED, "nondeterministic")
"""Held against the oracle."""
STOPPED: tuple[Verdict, ...] = ("crashed", "timed-out", "out-of-memory")
"""The call did not come to an end."""
FAILING: tuple[Verdict, ...] = ("disagree", "nondeterministic", *STOPPED)
"""Needs an explanation: a ledger entry, or it is a new finding."""
DECLINED: tuple[Verdict, ...] = ("refused", "unsupported")
"""Nothing was judged, and nothing is wrong."""

UNKNOWN, NO_REFERENCE = "whose fault is not known: ", "no reference ran this case"
"""In the message of a row that blames nobody for a call that came to no end, and after it the reason."""
IN_ITS = ", in its "
"""In such a message, between the cause and the part that ran: "forward pass", "backward pass", "call"."""


class Written(msgspec.Struct):
    """A row of a results file, of whatever kind."""

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object; `parity.decoding.convert(kind, …)` is the inverse."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


class Row(Written, kw_only=True, omit_defaults=True, rename={"cls": "class"}):
    """One quantity of one implementation on one case; its fields are explained in docs/results.md, `cls` under "class".

    A number that is not finite is None. A field that has its default is left out of a file; those of a later parity than this
    one are ignored.
    """

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
    recipe_measured: str | None = None
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


def stopped_by(message: str) -> tuple[str, str]:
    """Why a call came to no end, and in which part of it ("": not known), of the message of such a row."""
    said = message.partition(f"; {UNKNOWN}")[0]
    cause, _, part = said.rpartition(IN_ITS)
    return (cause, part) if part in ("forward pass", "backward pass", "call") else (said, "")


TOKENS = "0123456789abcdefghij"
"""The error of a token as a sign: 9 the largest or not finite, each less half as large, 0 none; letters: a masked token."""
SIZE, VALUE = 5, 6
"""Digits of an error, of a value."""


def finite(value: float | None, digits: int = SIZE) -> float | None:
    """The value to so many digits, or None where it is NaN or infinite: rows are strict JSON."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits - 1}e}")
