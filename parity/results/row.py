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


def _of(text: str) -> Meta:
    return Meta(description=text)


class Row(msgspec.Struct, kw_only=True, rename={"cls": "class"}):
    """One quantity of one implementation on one case; in JSON under the names of its fields, `cls` as "class".

    A number that is not finite is None. Fields without a default are in every row; those of a later parity than this one
    are ignored.
    """

    schema: Annotated[int, _of("version of the file")] = SCHEMA
    run: Annotated[str, _of("id of the run")] = ""
    case: Annotated[str, _of("id of the case, or what is pooled")]
    family: Annotated[str, _of("family of losses, or the trainer")]
    implementation: Annotated[str, _of("its id")]
    role: Annotated[Literal["reference", "candidate"], _of("reference: the plain path of the library")] = "candidate"
    against: Annotated[str | None, _of("id of the reference judged beside it")] = None
    quantity: Annotated[
        str | None, _of('what was judged: "loss", "grad_weight", "protocol", …; null where nothing was')
    ] = None
    dtype: Annotated[str, _of("of the parameters under test")]
    device: Annotated[str, _of("cpu or cuda")]
    verdict: Annotated[Verdict, _of("below")]
    cls: Annotated[Class | None, _of("precision: finer arithmetic mends it")] = None
    blame: Annotated[Literal["candidate", "reference", "both", "harness"] | None, _of("who is wrong")] = None
    gate: Annotated[str | None, _of("the tightest gate")] = None
    headroom: Annotated[float | None, _of("error ÷ allowed at that gate: above 1 fails")] = None
    gates: Annotated[dict[str, float | None], _of("every gate and its headroom")] = msgspec.field(default_factory=dict)
    recipe: Annotated[str | None, _of("the precision that the implementation declares")] = None
    recipe_measured: Annotated[str | None, _of("the precision found")] = None
    variant: Annotated[str | None, _of("another definition that explains all failures")] = None
    undecided: Annotated[int, _of("entries that rounding alone decides, not judged")] = 0
    value: Annotated[float | None, _of("a scalar's value, a tensor's norm")] = None
    value_oracle: Annotated[float | None, _of("the same by the definition, in float64")] = None
    value_reference: Annotated[float | None, _of("the same of the reference")] = None
    max_abs: Annotated[float | None, _of("largest |error|")] = None
    max_rel: Annotated[float | None, _of("largest |error| ÷ largest |oracle|")] = None
    dist: Annotated[float | None, _of("torch.dist from the oracle")] = None
    allclose: Annotated[bool | None, _of("torch.allclose to the oracle at atol and rtol")] = None
    atol: Annotated[float | None, _of("absolute tolerance, derived from the dtype")] = None
    rtol: Annotated[float | None, _of("relative tolerance, derived from the dtype")] = None
    slope: Annotated[float | None, _of("error projected on the oracle: a factor of 1 + slope")] = None
    worst: Annotated[
        list[dict[str, Any]],
        _of(
            "at most five entries {index, value, oracle, error}, with {sequence, position, token, masked} or {parameter}"
        ),
    ] = msgspec.field(default_factory=list)
    known: Annotated[str | None, _of("id of the ledger entry that covers it")] = None
    seed: Annotated[int | None, _of("of the case")] = None
    settings: Annotated[
        dict[str, Any], _of("those away from their default, and the shapes; empty: about the whole run")
    ] = msgspec.field(default_factory=dict)
    features: Annotated[dict[str, Any], _of("what the case exercises, for scopes of the ledger")] = msgspec.field(
        default_factory=dict
    )
    message: Annotated[str, _of("what differs, hints at why, or the reason for the verdict")] = ""
    replay: Annotated[str, _of("the command that shows it again")] = ""
    unjudged: Annotated[list[str], _of("what a user's function returned beside its family's outputs")] = msgspec.field(
        default_factory=list
    )
    imported_from: Annotated[str | UnsetType, _of("file of the library, where not in site-packages")] = UNSET
    shard: Annotated[str | UnsetType, _of("its part")] = UNSET
    frozen: Annotated[str | UnsetType, _of("file of the frozen case; only on rows of one")] = UNSET
    minimised: Annotated[bool | UnsetType, _of("true: of a minimised case; false: no time was left for it")] = UNSET

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

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object; `parity.decoding.convert(Row, …)` is the inverse."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def finite(value: float | None) -> float | None:
    """The value, or None where it is NaN or infinite: rows are strict JSON."""
    return None if value is None or not math.isfinite(value) else float(value)
