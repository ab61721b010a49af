"""Rows of a case: the empty one, of a judged quantity, of a yes or no; whose fault one is, and what does not fail twice."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from parity.case.case import Case
from parity.case.family import AnyFamily
from parity.judge.gates import Judgement
from parity.judging.assess import CaseOracle
from parity.process import elsewhere
from parity.protocol.exceptions import Outcome
from parity.results.row import DECIDED, STOPPED, VALUE, Row, finite
from parity.results.watched import token_signs

LONGEST = 1024
"""Tokens of a case whose errors are kept one by one."""
NUMBERS = ("headroom", "max_abs", "dist", "atol", "rtol", "slope")
"""Fields that a judgement and its row have in common."""


def empty_row(family: AnyFamily, case: Case, implementation: str, device: str, **fields: Any) -> Row:
    """A row of the results contract in which nothing was judged: unsupported, unless `fields` say otherwise."""
    s = family.full_settings(case)
    shapes = {k: getattr(s, k) for k in family.shapes if hasattr(s, k)}
    replayed = str(Path(case.tensors).with_suffix(".json")) if case.tensors else case.id
    base: dict[str, Any] = {
        "case": case.id,
        "family": case.family,
        "implementation": implementation,
        "dtype": case.dtype,
        "device": device,
        "verdict": "unsupported",
        "seed": case.seed,
        "settings": dict(case.settings) | shapes,
        "features": dict(family.features(case)),
        "replay": replay_line(replayed, implementation),
    }
    return Row(**base | fields)


def replay_line(case: str, implementation: str) -> str:
    """The command that shows a case again, with the versions that `--with` named."""
    return f"parity replay {case} --implementation {implementation}{elsewhere()}"


def size(x: Any) -> float | None:
    """A scalar's value, a tensor's norm."""
    if x is None or isinstance(x, float):
        return x
    x = x.detach().double()
    return float(x) if x.dim() == 0 else float(x.norm())


def judged_row(base: Row, oracle: CaseOracle, name: str, j: Judgement, outcome: Outcome) -> Row:
    numbers: dict[str, Any] = {field: finite(getattr(j, field)) for field in NUMBERS}
    return replace(
        base,
        quantity=name,
        verdict="agree" if j.agrees else "disagree",
        gate=j.gate,
        gates={k: finite(v) for k, v in j.gates.items()},
        undecided=oracle.inputs.undecided + j.undecided,
        value=finite(size(outcome.quantities.get(name)), VALUE),
        value_oracle=finite(size(oracle.exact.get(name)), VALUE),
        allclose=j.allclose,
        worst=[] if j.agrees else [_entry(oracle, name, *w) for w in j.worst],
        tokens=[] if j.agrees else _tokens(oracle, name, outcome.quantities.get(name)),
        message=j.message,
        **numbers,
    )


def _entry(
    oracle: CaseOracle, name: str, index: tuple[int, ...], value: float, truth: float, error: float
) -> dict[str, Any]:
    """One of the worst entries; sequence, position, token id and mask of its position, or the token of its row of the head."""
    out = {"index": list(index), "value": finite(value, VALUE), "oracle": finite(truth, VALUE), "error": finite(error)}
    ids, masked = _ids(oracle)
    if _by_token(oracle, name):
        b, t = index[0], index[1]
        return out | {"sequence": b, "position": t, "token": int(ids[b, t]), "masked": bool(masked[b, t])}
    return out | ({"token": index[0]} if name in ("grad_weight", "grad_bias") and index and ids.dim() == 2 else {})


def _ids(oracle: CaseOracle) -> tuple[torch.Tensor, torch.Tensor]:
    """The token ids (B, T), and which are masked; empty where no token stands at (sequence, position)."""
    ids, mask = (oracle.inputs.tensors.get(name) for name in ("ids", "mask"))
    if ids is None or ids.dim() != 2:
        return torch.empty(0), torch.empty(0)
    return ids, ids < 0 if mask is None or mask.shape != ids.shape else ~mask.bool()


def _by_token(oracle: CaseOracle, quantity: str) -> bool:
    there = quantity in ("logps", "entropy", "grad_hidden")
    return there and oracle.exact[quantity].shape[:2] == _ids(oracle)[0].shape


def _tokens(oracle: CaseOracle, quantity: str, given: Any) -> list[str]:
    """The largest error of each token, a text of `TOKENS` for each sequence; of at most `LONGEST` tokens."""
    if not _by_token(oracle, quantity) or not isinstance(given, torch.Tensor):
        return []
    ids, masked = _ids(oracle)
    exact, given = oracle.exact[quantity].detach().cpu().double(), given.detach().cpu().double()
    if ids.numel() > LONGEST or given.shape != exact.shape:
        return []
    error = torch.where(given == exact, 0.0, (given - exact).abs()).reshape(*ids.shape, -1).amax(-1)
    return token_signs(error, masked.cpu())


def logic_row(base: Row, quantity: str, holds: bool, message: str) -> Row:
    """The row of a relation ("relation: …") or of the protocol: it holds, or it does not."""
    gate, headroom = quantity.partition(":")[0], 0.0 if holds else None
    return replace(
        base,
        quantity=quantity,
        verdict="agree" if holds else "disagree",
        cls=None if holds else "logic",
        gate=gate,
        headroom=headroom,
        gates={gate: headroom},
        message=message,
    )


def flaky(failing: Collection[str], again: Callable[[], Mapping[str, bool]]) -> set[str]:
    """Those of the failing quantities that do not fail a second time. `again` makes the same call once more, and says of
    each quantity whether it agreed; it is not called where none fails."""
    second = again() if failing else {}
    return {name for name in failing if second.get(name, True)}


@dataclasses.dataclass
class Blame:
    """Who is wrong on one case: its rows go through `decide` one after another, those of the reference first.

    A candidate is compared with the reference where that was judged: both are to blame where both disagree with the oracle.
    A call that came to no end is the fault of a candidate where a reference came to its end on the case, else nobody's.
    A quantity that follows another definition (`variant`) is nobody's fault.
    """

    against: str | None = None
    reference: dict[str | None, Row] = dataclasses.field(default_factory=dict)

    def decide(self, row: Row) -> Row:
        """Sets `blame`, `against` and `value_reference` of a row, and returns it."""
        wrong = row.judged and row.verdict != "agree"
        if row.role == "reference":
            if wrong or row.verdict in STOPPED:
                row.blame = row.blame or "reference"
            if row.verdict in DECIDED:
                self.reference[row.quantity], self.against = row, row.implementation
            return row
        beside = self.reference.get(row.quantity)
        row.against = self.against
        if beside and beside.value_oracle == row.value_oracle:  # else of another upstream gradient, of fewer outputs
            row.value_reference = beside.value
        if row.verdict in STOPPED and self.against:  # the case can be run
            row.blame = row.blame or "candidate"
        if wrong and row.variant is None:
            row.blame = "both" if beside and beside.verdict == "disagree" else "candidate"
        return row
