"""What moved between two environments: the frozen cases in both, quantity by quantity, held against the oracle."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from parity import data
from parity.case import Case
from parity.errors import UsageError
from parity.versions.checks import Check, Row, amount
from parity.versions.client import EnvironmentUnusable
from parity.versions.environment import Environment
from parity.versions.history import folder
from parity.versions.probe import rows
from parity.versions.resolve import PARTNERS

FAMILIES = ("policy", "logprobs")
RELATIVE = 1e-4
"""A value has moved when its norm changed by more than this share and at least one side uses half of its gate."""
_DEFAULTS = """
import dataclasses, json
from trl import GRPOConfig
print("\\n" + json.dumps({f.name: repr(f.default) for f in dataclasses.fields(GRPOConfig)
                         if f.default is not dataclasses.MISSING}))
"""


@dataclasses.dataclass(frozen=True)
class Moved:
    """A quantity that differs: rows before and after, one of them None where that side hands out no such quantity."""

    case: str
    implementation: str
    quantity: str | None
    before: Row | None
    after: Row | None

    @property
    def mark(self) -> str:
        """ "+" worse, "-" better, as asv prints them, "~" neither: both inside their gates, or a refusal."""
        order = {"agree": 0, "disagree": 1, "crashed": 1, "nondeterministic": 1}
        sides = [order.get(r["verdict"]) if r else None for r in (self.before, self.after)]
        if sides[0] is None or sides[1] is None or sides == [0, 0]:
            return "~"
        if sides[0] != sides[1]:
            return "+" if sides[1] > sides[0] else "-"
        levels = [math.inf if r is None or r["headroom"] is None else r["headroom"] for r in (self.before, self.after)]
        return "~" if levels[0] == levels[1] else "+" if levels[1] > levels[0] else "-"

    @property
    def nearer(self) -> str:
        """Which side is nearer to the oracle: "before", "after", or "" where that cannot be said."""
        if self.before is None or self.after is None:
            return ""
        far = [r["dist"] if r["value"] is not None else math.inf for r in (self.before, self.after)]
        if None in far or far[0] == far[1]:
            return ""
        return "before" if far[0] < far[1] else "after"


def cases() -> list[tuple[str, Case]]:
    """The frozen cases of the families compared: regressions, and those of the history records."""
    paths = {path.stem: path for path in [*sorted(folder().glob("*.json")), *data.frozen_cases()]}
    found = [(name, Case.load(path)) for name, path in paths.items()]
    return [(name, case) for name, case in found if case.family in FAMILIES and case.tensors is None]


def implementations(named: Sequence[str]) -> list[str]:
    """The named ones, else all that take part in a run and need neither an interpreter nor our own fixes."""
    from parity.implementations import select

    chosen = [i for i in select(named) if i.family in FAMILIES]
    if not named:
        chosen = [i for i in chosen if i.library in ("trl", "liger-kernel") and not i.interpreted]
    return [i.id for i in chosen]


def moved(before: Sequence[Row], after: Sequence[Row], names: dict[str, str]) -> list[Moved]:
    """What differs, most telling first; `names`: case id -> the name it is known by."""
    sides: list[dict[tuple[str, str, str | None], Row]]
    sides = [{(r["case"], r["implementation"], r["quantity"]): r for r in found} for found in (before, after)]
    out = []
    for key in {**sides[0], **sides[1]}:
        one, two = sides[0].get(key), sides[1].get(key)
        case, implementation, quantity = key
        if one is None or two is None:
            # The whole-case row (refused, crashed) of the other side says it; lists of quantities differ by themselves.
            if quantity is not None:
                continue
        elif not _differ(one, two):
            continue
        out.append(Moved(names.get(case, case), implementation, quantity, one, two))
    return sorted(out, key=lambda m: ("+-~".index(m.mark), m.implementation, m.case))


def _differ(one: Row, two: Row) -> bool:
    if one["verdict"] != two["verdict"]:
        return True
    if one["quantity"] is None:
        return False
    values = one["value"], two["value"]
    if None in values:
        return values[0] is not values[1]
    scale = max(abs(values[0]), abs(values[1]), 1e-12)
    loose = RELATIVE if one["dtype"] == "fp32" else 0.05
    return abs(values[0] - values[1]) > loose * scale and max(one["headroom"] or 9, two["headroom"] or 9) > 0.5


def table(found: Sequence[Moved]) -> str:
    """Mark, case, implementation, quantity, before, after, ratio, by definition, and which side is nearer to it."""
    lines: list[tuple[str, ...]] = [
        ("", "case", "implementation", "quantity", "before", "after", "ratio", "definition", "nearer")
    ]
    for m in found:
        exact = next((r["value_oracle"] for r in (m.before, m.after) if r and r["value_oracle"] is not None), None)
        values = [r["value"] if r else None for r in (m.before, m.after)]
        ratio = f"{values[1] / values[0]:.4g}" if values[0] and values[1] is not None else ""
        told = [_cell(r) for r in (m.before, m.after)]
        definition = "" if m.quantity is None else amount(exact)
        lines.append((m.mark, m.case, m.implementation, m.quantity or "", *told, ratio, definition, m.nearer))
    wide = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, wide, strict=True)).rstrip() for line in lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "(judged)"
    if row["quantity"] is None or row["gate"] == "protocol":
        return str(row["verdict"])
    return amount(row["value"]) + {"agree": "", "disagree": "!"}.get(row["verdict"], f" {row['verdict']}")


def compare(specs: tuple[Sequence[str], Sequence[str]], named: Sequence[str] = ()) -> tuple[str, int]:
    """The report and the exit code: 0, 1 when something newly disagrees in the second, 3 when nothing was compared.

    EnvironmentUnusable when one of the environments cannot be made, imported or run.
    """
    frozen, wanted = cases(), implementations(named)
    sides = [Environment.of(one) for one in specs]
    found = [rows(made, [case for _, case in frozen], wanted) for made in sides]
    judged = [sum(r["verdict"] in ("agree", "disagree") for r in side) for side in found]
    if not all(judged):
        raise EnvironmentUnusable(f"compare: {' and '.join(map(str, judged))} judged quantities, nothing to compare")
    different = moved(found[0], found[1], {case.id: name for name, case in frozen})
    lines = [f"before: {sides[0].partners}", f"after:  {sides[1].partners}", ""]
    lines += [table(different), ""] if different else []
    counts = {mark: sum(m.mark == mark for m in different) for mark in "+-~"}
    lines.append(
        f"{len(frozen)} cases, {judged[0]} and {judged[1]} judged quantities: "
        f"{counts['+']} worse (+), {counts['-']} better (-), {counts['~']} otherwise moved (~); ! outside its gate"
    )
    packages = [
        f"{n} {a} -> {b}" for n in PARTNERS if (a := sides[0].versions.get(n)) != (b := sides[1].versions.get(n))
    ]
    lines.append(f"packages: {', '.join(packages) or 'the same'}")
    lines += _defaults(sides)
    return "\n".join(lines), int(any(m.mark == "+" for m in different))


def _defaults(sides: Sequence[Environment]) -> list[str]:
    """Fields of GRPOConfig that came, went or have another default."""
    before, after = (_config(made) for made in sides)
    if not before or not after:
        return []
    changed = [f"{n} {before[n]} -> {after[n]}" for n in before if n in after and before[n] != after[n]]
    gone, new = [n for n in before if n not in after], [f"{n}={v}" for n, v in after.items() if n not in before]
    kinds = (("defaults changed", changed), ("settings gone", gone), ("settings new", new))
    return [f"GRPOConfig, {kind}: {', '.join(names)}" for kind, names in kinds if names]


def _config(made: Environment) -> dict[str, Any]:
    done = made.run(["python", "-W", "ignore", "-c", _DEFAULTS], settings={"HF_HUB_OFFLINE": "1"}, capture=True)
    try:
        return dict(json.loads(done.stdout.rstrip().rpartition("\n")[2]))
    except ValueError:
        return {}


def first_difference(
    package: str, older: str, newer: str, hold: Sequence[str], named: Sequence[str], find: str
) -> Check:
    """The frozen case, implementation and quantity that differ most clearly between two releases of a package.

    Raises:
        UsageError: when no verdict differs in the direction asked for.
    """
    frozen, wanted = cases(), implementations(named)
    asked = [case for _, case in frozen], wanted
    found = [rows(Environment.of([f"{package}=={version}"], hold), *asked) for version in (older, newer)]
    mark = "+" if find == "broken" else "-"
    names = {case.id: name for name, case in frozen}
    for one in moved(found[0], found[1], names):
        if one.mark == mark and one.quantity is not None and one.before and one.after:
            case = next(case for name, case in frozen if name == one.case)
            return Check(one.case, case, one.implementation, (one.quantity,))
    raise UsageError(
        f"nothing {'broke' if find == 'broken' else 'was mended'} between {package} {older} and {newer} "
        f"in {len(frozen)} frozen cases; name one with --case or --check"
    )
