"""The typed row of a results file, its verdicts and their sets: what judging writes, and every report and search reads."""

import math
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

SCHEMA = 1
"""Version of the results file; one with another number is not read."""

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

UNKNOWN, NO_REFERENCE = "not known whose fault: ", "no reference ran this case"
"""In the message of a row that blames nobody for a call that came to no end, and after it the reason."""
IN_ITS = ", in its "
"""In such a message, between the cause and the part that ran: "forward pass", "backward pass", "call"."""


def described(text: str) -> Meta:
    """What a field holds, for docs/results.md."""
    return Meta(description=text)


class Written(msgspec.Struct):
    """A row of a results file, of whatever kind."""

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object; `parity.decoding.convert(kind, …)` is the inverse."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


class Row(Written, kw_only=True, rename={"cls": "class"}):
    """One quantity of one implementation on one case; in JSON under the names of its fields, `cls` as "class".

    A number that is not finite is None. Fields without a default are in every row; those of a later parity than this one
    are ignored.
    """

    schema: Annotated[int, described("version of the file")] = SCHEMA
    run: Annotated[str, described("id of the run")] = ""
    case: Annotated[str, described("id of the case, or what is pooled")]
    family: Annotated[str, described("family of losses, or the trainer")]
    implementation: Annotated[str, described("its id")]
    role: Annotated[Literal["reference", "candidate"], described("reference: the plain path of the library")] = (
        "candidate"
    )
    against: Annotated[str | None, described("id of the reference judged beside it")] = None
    quantity: Annotated[
        str | None, described('what was judged: "loss", "grad_weight", "protocol", …; null where nothing was')
    ] = None
    dtype: Annotated[str, described("of the parameters under test")]
    device: Annotated[str, described("cpu or cuda")]
    verdict: Annotated[Verdict, described("below")]
    cls: Annotated[Class | None, described("precision: finer arithmetic mends it")] = None
    blame: Annotated[Literal["candidate", "reference", "both", "harness"] | None, described("who is wrong")] = None
    gate: Annotated[str | None, described("the tightest gate")] = None
    headroom: Annotated[float | None, described("error ÷ allowed at that gate: above 1 fails")] = None
    gates: Annotated[dict[str, float | None], described("every gate and its headroom")] = msgspec.field(
        default_factory=dict
    )
    recipe: Annotated[str | None, described("the precision that the implementation declares")] = None
    recipe_measured: Annotated[str | None, described("the precision found")] = None
    variant: Annotated[str | None, described("another definition that explains all failures")] = None
    undecided: Annotated[int, described("entries that rounding alone decides, not judged")] = 0
    value: Annotated[float | None, described("a scalar's value, a tensor's norm")] = None
    value_oracle: Annotated[float | None, described("the same by the definition, in float64")] = None
    value_reference: Annotated[float | None, described("the same of the reference")] = None
    max_abs: Annotated[float | None, described("largest |error|")] = None
    max_rel: Annotated[float | None, described("largest |error| ÷ largest |oracle|")] = None
    dist: Annotated[float | None, described("torch.dist from the oracle")] = None
    allclose: Annotated[bool | None, described("torch.allclose to the oracle at atol and rtol")] = None
    atol: Annotated[float | None, described("absolute tolerance, derived from the dtype")] = None
    rtol: Annotated[float | None, described("relative tolerance, derived from the dtype")] = None
    slope: Annotated[float | None, described("error projected on the oracle: a factor of 1 + slope")] = None
    worst: Annotated[
        list[dict[str, Any]],
        described(
            "at most five entries {index, value, oracle, error}, with {sequence, position, token, masked} or {parameter}"
        ),
    ] = msgspec.field(default_factory=list)
    known: Annotated[str | None, described("id of the ledger entry that covers it")] = None
    seed: Annotated[int | None, described("of the case")] = None
    settings: Annotated[
        dict[str, Any], described("those away from their default, and the shapes; empty: about the whole run")
    ] = msgspec.field(default_factory=dict)
    features: Annotated[dict[str, Any], described("what the case exercises, for scopes of the ledger")] = msgspec.field(
        default_factory=dict
    )
    message: Annotated[str, described("what differs, hints at why, or the reason for the verdict")] = ""
    replay: Annotated[str, described("the command that shows it again")] = ""
    unjudged: Annotated[list[str], described("what a user's function returned beside its family's outputs")] = (
        msgspec.field(default_factory=list)
    )
    imported_from: Annotated[str | UnsetType, described("file of the library, where not in site-packages")] = UNSET
    shard: Annotated[str | UnsetType, described("its part")] = UNSET
    frozen: Annotated[str | UnsetType, described("file of the frozen case; only on rows of one")] = UNSET
    minimised: Annotated[bool | UnsetType, described("true: of a minimised case; false: no time was left for it")] = (
        UNSET
    )

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
    def subject(self) -> str:
        """The quantity; where there is none, the verdict."""
        return self.quantity or self.verdict


def stopped_by(message: str) -> tuple[str, str]:
    """Why a call came to no end, and in which part of it ("": not known), of the message of such a row."""
    said = message.partition(f"; {UNKNOWN}")[0]
    cause, _, part = said.rpartition(IN_ITS)
    return (cause, part) if part in ("forward pass", "backward pass", "call") else (said, "")


def finite(value: float | None) -> float | None:
    """The value, or None where it is NaN or infinite: rows are strict JSON."""
    return None if value is None or not math.isfinite(value) else float(value)
