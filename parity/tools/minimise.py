"""The smallest part of a stored batch that still disagrees: sequences, positions, vocabulary and hidden columns left out."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parity.case.case import Case
from parity.case.family import Family
from parity.case.stored import read
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.judge.gates import stands_for
from parity.registry import loss_family, run_case
from parity.results.row import DECLINED, failures
from parity.tools.capture import stored

AXES = ("B", "T", "V", "H")
IDS = ("ids", "previous_ids", "support_ids", "top1_ids")  # tensors whose entries are columns of the vocabulary


def minimise(case: Case, implementation: Implementation, to: Path, device: str = "cpu") -> Case:
    """Write to `to` a part of the case that shows as clearly every quantity that fails on the whole. Each axis in turn is cut
    by delta debugging (Zeller and Hildebrandt 2002): halves, quarters, … single entries are left out as long as all of it
    still fails. Raises UsageError where nothing disagrees, or the tensors are generated."""
    if not case.tensors:
        raise UsageError(f"case {case.id}: --minimise is for stored tensors; a drawn case is minimised by the run")
    of, whole = loss_family(case.family), read(case)
    rows = list(run_case(case, [implementation], device, thorough=False))
    wanted = failures(rows)
    if not wanted:
        declined = [r.message for r in rows if r.implementation == implementation.id and r.verdict in DECLINED]
        why = f"is not judged: {declined[0]}" if declined else "agrees, so there is nothing to minimise"
        raise UsageError(f"case {case.id}: {implementation.id} {why}")
    sizes = (*whole["hidden"].shape[:2], *whole["weight"].shape)
    kept = {axis: list(range(n)) for axis, n in zip(AXES, sizes, strict=True)}
    with tempfile.TemporaryDirectory(prefix="parity-minimise-") as folder:

        def shows(trial: Mapping[str, Sequence[int]]) -> bool:
            try:
                made = _part(of, case, whole, trial, Path(folder) / "case.json")
                return stands_for(failures(run_case(made, [implementation], device, thorough=False)), wanted)
            except UsageError:  # no case any more: no token is decided, or an axis is empty
                return False

        before = None
        while before != kept:
            before = {axis: list(of_axis) for axis, of_axis in kept.items()}
            for axis in AXES:
                kept[axis] = _smallest(kept[axis], lambda part, axis=axis: shows(kept | {axis: part}))  # type: ignore[misc]
    return _part(of, case, whole, kept, to, implementation.id)


def _smallest(items: list[int], shows: Callable[[list[int]], bool]) -> list[int]:
    size = len(items) // 2
    while size:
        at = 0
        while at < len(items) and len(items) > 1:
            rest = items[:at] + items[at + size :]
            if rest and shows(rest):
                items = rest
            else:
                at += size
        size = min(size, len(items)) // 2
    return items


def _part(
    of: Family,
    case: Case,
    whole: Mapping[str, Tensor],
    kept: Mapping[str, Sequence[int]],
    to: Path,
    found_with: str = "",
) -> Case:
    """The case of those rows and columns, written to `to`."""
    named = [whole[n][kept["B"]][:, kept["T"]] for n in IDS if n in whole]
    present = {int(i) for ids in named for i in ids.unique() if int(i) >= 0}
    columns = sorted({*kept["V"], *present})
    vocabulary = whole["weight"].shape[0]
    beyond = [*columns, *range(vocabulary, max(whole.get("teacher_weight", whole["weight"]).shape[0], vocabulary))]
    place = torch.full((vocabulary,), -1)
    place[columns] = torch.arange(len(columns))
    index = {"B": list(kept["B"]), "T": list(kept["T"]), "V": columns, "H": list(kept["H"]), "W": beyond}
    tensors = {}
    for name, value in whole.items():
        letters = "BT" if name.startswith("d ") else of.stored[name]
        letters = next(one for one in letters.split("|") if len(one) == value.dim()) if value.dim() else ""
        for axis, letter in enumerate(letters):
            if letter in index:
                value = value.index_select(axis, torch.tensor(index[letter]))
        if name in IDS:
            value = torch.where(value < 0, value, place[value.long().clamp(min=0)]).to(value.dtype)
        tensors[name] = value
    if case.family == "policy":
        tensors = {n: v for n, v in tensors.items() if n not in ("completion_mask", "tool_mask")}
    remarks = {"implementation": found_with} if found_with else {}
    return stored(of, tensors, case.settings, to, case.seed, **remarks)
