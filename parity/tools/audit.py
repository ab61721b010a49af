"""`parity audit`: does each setting have its effect, in each implementation?

A setting is moved from its default on a case whose definition moves with it. The answer is a query over the judge's rows of two
calls on the same tensors, with the setting and without it; an implementation that does not move ignores it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rich.console import Console
from rich.markdown import Markdown

from parity.case.case import Case
from parity.case.inputs import Inputs
from parity.compare.one_case import rows_of
from parity.data import ledger_file
from parity.decoding import save_json, write
from parity.errors import UsageError
from parity.families.probes import Probe, example, probes_of
from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle
from parity.process import prepare
from parity.registry import facts, loss_families, loss_family, resolved, select
from parity.results.ledger import Ledger
from parity.results.report import measured
from parity.results.report.render import code, escape
from parity.results.row import Row
from parity.running.provenance import header, resolve_device

ANSWERS = ("honoured", "ignored", "wrong", "refused", "crashed", "absent", "not run")
"""Moves alike; does not move; moves otherwise; a clear error; an unclear one; no such parameter; nothing to judge."""
FINDINGS = frozenset({"ignored", "wrong", "crashed"})
SEVERITY = ("not run", "absent", "honoured", "ignored", "wrong", "refused", "crashed")
HEADINGS = ("setting", "reference", "candidate", "effect", "silent", "known")
DTYPES = ("fp32", "fp16", "bf16")
CONFOUNDED = "disagrees without the setting too (parity run judges that)"
MOVES = 0.05
"""Least relative change of a quantity of the definition: a hundred times the rounding of float16, twelve of bfloat16."""
STILL = 1e-6
"""Relative change of a norm up to which an implementation did not move."""
TRIES = 16
"""Pairs drawn until enough of them move."""
PATIENCE = 4
"""Pairs on which an implementation may be wrong without the setting until the next one is no longer tried."""
AGREE, NEW, NOTHING = 0, 1, 3

Known = Callable[[Row, Case], str | None]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One case with the setting (`moved`) and without it (`still`); every tensor that is not the setting's is the same."""

    case: Case
    moved: CaseOracle
    still: CaseOracle

    def shift(self) -> float:
        """The largest relative change of a judged quantity of the definition, infinite where only one side has it."""
        a, b = self.moved.exact, self.still.exact
        names = [n for n in a if n in self.moved.inputs.cotangents or n.startswith("grad_")]
        return max(float((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-30)) if n in b else math.inf for n in names)


def pair(name: str, probe: Probe, base: Mapping[str, Any], dtype: str, number: int, device: str = "cpu") -> Pair:
    """The `number`-th pair of a probe; log-probs that derive from the oracle are those of the moved side on both."""
    fam = loss_family(name)
    wanted = example(fam, number) | dict(base) | dict(probe.among)
    case = fam.case(1000 + number, dtype, wanted | ({} if probe.data else {probe.setting: probe.value}))
    moved = fam.build(case)
    if probe.leaves:
        moved = dataclasses.replace(moved, leaves=probe.leaves)
    defaults = {n: fam.settings[n].default for n in (probe.setting, *probe.back)}
    still = dataclasses.replace(moved, settings=SimpleNamespace(**vars(moved.settings) | defaults))
    still = still.replace(**probe.off(moved))
    kept = {n: g for n, g in still.cotangents.items() if n not in probe.outputs}
    leaves = tuple(n for n in still.leaves if still.tensors[n] is not None)
    still = dataclasses.replace(still, cotangents=kept, leaves=leaves)
    return Pair(case, *(CaseOracle.at(fam, x.to(device)) for x in (moved, still)))


class Pairs:
    """The pairs of one probe, made when an implementation asks for them and shared by all."""

    def __init__(self, name: str, probe: Probe, device: str):
        self.name, self.probe = name, probe
        self._made = functools.cache(
            lambda base, dtype, number: pair(name, probe, probe.bases[base], dtype, number, device)
        )

    def moving(self, base: int, dtype: str) -> Iterator[Pair]:
        """Pairs on which the definition moves, or, where the probe says so, stays."""
        made = (self._made(base, dtype, number) for number in range(TRIES))
        return (one for one in made if (one.shift() >= MOVES) != self.probe.stays)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of one implementation to one probe.

    Attributes:
        answer: one of `ANSWERS`, over all pairs tried.
        reason: message of the refusal, or why there is nothing to judge.
        case: the pair's case that shows it best; None where there is none.
        loss, gradient: value and norm over the definition's; None where that is 0 or not finite.
        silent: no warning that is not there without the setting; None unless the answer is a finding.
        known: ledger entries, when they cover every failing quantity.
    """

    family: str
    implementation: str
    role: str
    probe: Probe
    answer: str
    reason: str = ""
    case: Case | None = None
    loss: float | None = None
    gradient: float | None = None
    silent: bool | None = None
    known: tuple[str, ...] = ()

    @property
    def new(self) -> bool:
        """Whether it is a finding that the ledger does not have."""
        return self.answer in FINDINGS and not self.known

    @property
    def weight(self) -> tuple[int, float]:
        """The graver answer first, then the further one."""
        far = (abs(math.log(max(abs(ratio), 1e-30))) for ratio in (self.loss, self.gradient) if ratio is not None)
        return SEVERITY.index(self.answer), sum(far)


def answer(implementation: Implementation, pairs: Pairs, count: int, known: Known) -> Answer:
    """The answer of an implementation on `count` pairs of the first base and dtype on which it runs at all.

    Pairs that disagree about the answer make it "wrong", unless one side is an error.
    """
    blank = Answer(pairs.name, implementation.id, implementation.role, pairs.probe, "not run")
    reasons: list[str] = []
    for base, dtype in itertools.product(range(len(pairs.probe.bases)), DTYPES):
        found: list[Answer] = []
        confounded = 0
        for one in pairs.moving(base, dtype):
            said = _one(implementation, one, blank, known)
            confounded += said.reason == CONFOUNDED
            if said.answer != "not run":
                found.append(said)
            elif said.reason not in ("", CONFOUNDED):
                reasons.append(said.reason)
                break
            if len(found) == count or confounded == PATIENCE:
                break
        if found:
            worst = max(found, key=lambda a: a.weight)
            mixed = len({a.answer for a in found}) > 1 and worst.answer == "ignored"
            return dataclasses.replace(worst, answer="wrong") if mixed else worst
        if confounded:
            return dataclasses.replace(blank, reason=CONFOUNDED)
    return dataclasses.replace(blank, reason=reasons[0] if reasons else "no case on which the definition moves")


def _one(implementation: Implementation, pair: Pair, blank: Answer, known: Known) -> Answer:
    """The answer on one pair; "not run" without a reason where the judge could not tell its two sides apart."""
    out = dataclasses.replace(blank, case=pair.case)
    if lacking := [n for n in blank.probe.outputs if n not in implementation.outputs]:
        return dataclasses.replace(out, answer="absent", reason=f"has no {' and no '.join(lacking)}")
    moved, said = _judged(implementation, pair.moved)
    still, said_still = _judged(implementation, pair.still)
    verdict, message = moved[0].verdict, moved[0].message
    if verdict == "unsupported":
        never = message.startswith("Triton's interpreter") or still[0].verdict == verdict
        return dataclasses.replace(blank if never else out, answer="not run" if never else "absent", reason=message)
    if verdict == "refused":
        return dataclasses.replace(out, answer="refused", reason=message)
    if moved[0].quantity is None:
        covered = _known(moved, known, pair.case)
        return dataclasses.replace(out, answer="crashed", reason=message, silent=False, known=covered)
    wrong = [r for r in moved if r.failing and _asked(r, pair.moved)]
    stays = not blank.probe.stays and not blank.probe.outputs and _unmoved(moved, still, pair)
    out = dataclasses.replace(out, loss=_ratio(moved, "loss"), gradient=_ratio(moved, "grad_"))
    if not wrong:
        return blank if stays else dataclasses.replace(out, answer="honoured")
    if still[0].quantity is not None and any(r.failing and _asked(r, pair.still) for r in still):
        return dataclasses.replace(blank, reason=CONFOUNDED)
    covered, silent = _known(wrong, known, pair.case), not said - said_still
    return dataclasses.replace(out, answer="ignored" if stays else "wrong", silent=silent, known=covered)


def _judged(implementation: Implementation, oracle: CaseOracle) -> tuple[list[Row], set[str]]:
    """The rows of a call, and its warnings, also those that a filter or a level would keep from a user's eyes here."""
    said: set[str] = set()

    def call(x: Inputs) -> Any:
        def warned(message: Any, *_: Any, **__: Any) -> None:
            said.add(str(message))

        logged = mock.patch.object(logging.Logger, "warning", lambda self, *given, **named: warned(*given))
        with mock.patch.object(warnings, "warn", warned), logged:
            return implementation.call(x)

    return list(rows_of(oracle, dataclasses.replace(implementation, call=call), thorough=False)), said


def _asked(row: Row, oracle: CaseOracle) -> bool:
    """Whether the audit is about it: an output with an upstream gradient, or a gradient; no metric."""
    return row.quantity is None or row.quantity in oracle.inputs.cotangents or row.quantity.startswith("grad_")


def _unmoved(moved: Iterable[Row], still: Iterable[Row], pair: Pair) -> bool:
    """Whether every value and norm of the implementation is the same with the setting and without it."""
    then = {r.quantity: r.value for r in still if _asked(r, pair.still)}
    both = [(r.value, then[r.quantity]) for r in moved if _asked(r, pair.moved) and r.quantity in then]
    return bool(both) and all(a == b or (a and b and math.isclose(a, b, rel_tol=STILL)) for a, b in both)


def _ratio(rows: Iterable[Row], start: str) -> float | None:
    """The norm of what begins so over the definition's; None where that is 0 or not finite."""
    of = [r for r in rows if str(r.quantity).startswith(start)]
    found = [(r.value, r.value_oracle) for r in of if r.value is not None and r.value_oracle is not None]
    if not found or len(found) < len(of):
        return None
    value, truth = found[0] if len(found) == 1 else (math.hypot(*side) for side in zip(*found, strict=True))
    return value / truth if truth else None


def _known(rows: Iterable[Row], known: Known, case: Case) -> tuple[str, ...]:
    """The entries that cover the failing quantities; none when one of them is not covered."""
    found = [known(row, case) for row in rows]
    return () if None in found else tuple(dict.fromkeys(map(str, found)))


def audit(
    families: Sequence[str],
    implementations: Sequence[str],
    settings: Sequence[str],
    cases: int,
    ledger: Path | None,
    device: str,
) -> list[Answer]:
    """The answers, references first; `cases` pairs of inputs for each setting must all give the same one.

    Raises:
        UsageError: for a family, implementation or setting that does not exist.
    """
    names = [resolved(name) for name in families] or loss_families()
    probes = [(name, probe) for name in names if name in loss_families() for probe in probes_of(loss_family(name))]
    settings_known = sorted({probe.setting for _, probe in probes})
    for kind, asked, there in (("family", names, loss_families()), ("setting", settings, settings_known)):
        if odd := [n for n in asked if n not in there]:
            raise UsageError(f"{kind} {odd[0]!r} is not audited, choose from {', '.join(there)}")
    chosen = sorted(select(implementations), key=lambda i: i.role != "reference")
    entries = Ledger.load(ledger or ledger_file())
    answers: list[Answer] = []
    for name, probe in probes:
        if not settings or probe.setting in settings:
            pairs = Pairs(name, probe, device)
            known: Known = lambda row, case: entries.match(row, facts(case))  # noqa: E731
            answers += [answer(i, pairs, cases, known) for i in chosen if i.family == name]
    return answers


def exit_code(answers: Sequence[Answer]) -> int:
    """3 when nothing was judged, 1 for a finding that is not known, else 0."""
    if all(a.answer in ("absent", "not run") for a in answers):
        return NOTHING
    return NEW if any(a.new for a in answers) else AGREE


def run(console: Console, reports: Path, device: str, **asked: Any) -> int:
    """Audit, print, write `audit.md` and the cases of what is new; returns the exit code."""
    device = resolve_device(device)
    prepare(device, threads=1)
    answers = audit(device=device, **asked)
    versions = header("audit", device, "audit", 0).header.versions
    shown = ("torch", "transformers", "trl", "liger-kernel", "cut-cross-entropy")
    page = markdown(answers, ", ".join(f"{k} {v}" for k, v in versions.items() if k in shown))
    write(reports / "audit.md", f"{measured.head('Settings audit', 'parity')}\n{page}")
    for one in answers:
        if one.new and one.case is not None:
            content = {"case": one.case.to_json(), "implementation": one.implementation}
            save_json(reports / "findings" / f"{one.case.id}.json", content)
    console.print(Markdown(page))
    found = exit_code(answers)
    console.print(f"\nreports in {reports}/: audit.md, findings/; exit code {found}", markup=False)
    return found


def markdown(answers: Sequence[Answer], versions: str) -> str:
    """The counts, then of each implementation a table of what is not simply honoured, and the rest in a sentence."""
    counts = [a.answer for a in answers]
    out = [escape(versions), "", f"**{escape(' · '.join(f'{counts.count(kind)} {kind}' for kind in ANSWERS))}**", ""]
    references = {(a.family, a.probe.label): a for a in answers if a.role == "reference"}
    for family, name in dict.fromkeys((a.family, a.implementation) for a in answers):
        rows: list[Answer] = []
        rest: dict[str, list[str]] = {}
        for one in (a for a in answers if (a.family, a.implementation) == (family, name)):
            if one.answer == references.get((family, one.probe.label), one).answer == "absent":
                rest.setdefault("Not in this release", []).append(one.probe.label)
            elif one.answer in ("honoured", "not run"):
                why = f"Not run: {one.reason}" if one.answer == "not run" else "Honoured"
                rest.setdefault(why, []).append(one.probe.label)
            else:
                rows.append(one)
        rows.sort(key=lambda a: (not a.new, ANSWERS.index(a.answer)))
        cells = (map(escape, _cells(one, references.get((family, one.probe.label)))) for one in rows)
        out += [f"## {code(f'{family}: {name}')}", "", *(measured.table(HEADINGS, cells) if rows else ()), ""]
        for why, labels in rest.items():
            told = ", ".join(labels) if len(labels) <= 6 or why == "Honoured" else f"{len(labels)} settings"
            out += [f"{escape(f'{why}: {told}')}.", ""]
    return "\n".join(out)


def _cells(one: Answer, reference: Answer | None) -> tuple[str, ...]:
    reason = f": {one.reason[:90]}" if one.reason else ""
    ratios = [f"{name} ×{value:.3g}" for name, value in (("loss", one.loss), ("gradient", one.gradient)) if value]
    effect = (", ".join(ratios) or "not finite") if one.answer in ("ignored", "wrong") else ""
    silent = "" if one.silent is None else "yes" if one.silent else "no"
    known = ", ".join(one.known) or (f"new: {one.case.id}" if one.new and one.case else "")
    other = "" if reference in (None, one) else reference.answer
    return one.probe.label, other, one.answer + reason, effect, silent, known
