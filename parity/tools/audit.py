"""`parity audit`: does each setting have its effect, in each implementation?

A setting is moved from its default on a case whose definition moves with it. The answer is a query over the judge's rows of
three calls: told the setting and judged by the definition with it, not told it, and told it but judged without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.case.case import Case
from parity.case.inputs import Inputs
from parity.case.probe import Probe
from parity.compare.one_case import rows_of
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.judging.assess import CaseOracle
from parity.judging.oracle import exact
from parity.registry import facts, loss_families, loss_family, resolved, select
from parity.results.ledger import Ledger
from parity.results.report import measured
from parity.results.report.render import code, escape
from parity.results.row import Row

ANSWERS = ("honoured", "ignored", "wrong", "refused", "crashed", "absent", "not run")
"""Moves alike; does not move; moves otherwise; a clear error; an unclear one; no such parameter; nothing to judge."""
FINDINGS = frozenset({"ignored", "wrong", "crashed"})
JUDGED = FINDINGS | {"honoured", "refused"}
SEVERITY = ("not run", "absent", "honoured", "ignored", "wrong", "refused", "crashed")
COLOURS = {"ignored": "bold red", "wrong": "bold red", "crashed": "bold red", "refused": "yellow", "absent": "dim"}
HEADINGS = ("setting", "reference", "candidate", "effect", "silent", "known")

DTYPES = ("fp32", "fp16", "bf16")
CONFOUNDED = "disagrees without the setting too (parity run judges that)"
MOVES = 0.05
"""Least relative change of a quantity of the definition: a hundred times the rounding of float16, twelve of bfloat16."""
TRIES = 16
"""Pairs drawn until enough of them move."""
PATIENCE = 4
"""Pairs on which an implementation may be wrong without the setting until the next one is no longer tried."""
AGREE, NEW, NOTHING = 0, 1, 3

Known = Callable[[Row, Case], str | None]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One case with the setting (`moved`) and without it (`still`); all but `exchanged` is the same to the last bit."""

    case: Case
    moved: CaseOracle
    still: CaseOracle
    exchanged: tuple[str, ...]

    def shift(self) -> float:
        """The largest relative change of a judged quantity of the definition, infinite where only one side has it."""
        a, b = self.moved.exact, self.still.exact
        names = [n for n in a if n in self.moved.inputs.cotangents or n.startswith("grad_")]
        return max(float((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-30)) if n in b else math.inf for n in names)

    def calling(self, implementation: Implementation, side: CaseOracle) -> Implementation:
        """The implementation told the settings of `side`, whatever inputs the judge gives it."""
        exchanged = {n: side.inputs.tensors[n] for n in self.exchanged}

        def call(x: Inputs) -> Any:
            return implementation.call(dataclasses.replace(x, settings=side.inputs.settings).replace(**exchanged))

        return dataclasses.replace(implementation, call=call)


def pair(name: str, probe: Probe, base: Mapping[str, Any], dtype: str, number: int, device: str = "cpu") -> Pair:
    """The `number`-th pair of a probe; log-probs that derive from the oracle are those of the moved side on both."""
    fam = loss_family(name)
    wanted = fam.example(number) | dict(base) | dict(probe.among)
    case = fam.case(1000 + number, dtype, wanted | ({} if probe.data else {probe.setting: probe.value}))
    moved = fam.build(case)
    if probe.leaves:
        moved = dataclasses.replace(moved, leaves=probe.leaves)
    defaults = {n: fam.settings[n].default for n in (probe.setting, *probe.back)}
    still = dataclasses.replace(moved, settings=SimpleNamespace(**vars(moved.settings) | defaults))
    still = still.replace(**probe.off(moved))
    kept = {n: g for n, g in still.cotangents.items() if n not in probe.outputs}
    leaves = tuple(n for n in still.leaves if still.tensors[n] is not None)
    sides = moved, dataclasses.replace(still, cotangents=kept, leaves=leaves)
    changed = tuple(n for n, t in moved.tensors.items() if t is not still.tensors[n])
    with_it, without = (CaseOracle(fam, x.to(device), exact(fam, x)) for x in sides)
    return Pair(case, with_it, without, changed)


class Pairs:
    """The pairs of one probe, made when an implementation asks for them and shared by all."""

    def __init__(self, name: str, probe: Probe, device: str):
        self.name, self.probe, self.device = name, probe, device
        self._made: dict[tuple[int, str, int], Pair] = {}

    def moving(self, base: int, dtype: str) -> Iterator[Pair]:
        """Pairs on which the definition moves, or, where the probe says so, stays."""
        for number in range(TRIES):
            key = (base, dtype, number)
            if key not in self._made:
                self._made[key] = pair(self.name, self.probe, self.probe.bases[base], dtype, number, self.device)
            if (self._made[key].shift() >= MOVES) != self.probe.stays:
                yield self._made[key]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of one implementation to one probe.

    Attributes:
        answer: one of `ANSWERS`, over all pairs tried.
        reason: message of the refusal, or why there is nothing to judge.
        case: the pair's case that shows it best; None where there is none.
        gates: failing quantity -> its gate.
        metrics: metrics that disagree although loss and gradients agree.
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
    gates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    loss: float | None = None
    gradient: float | None = None
    silent: bool | None = None
    known: tuple[str, ...] = ()

    @property
    def new(self) -> bool:
        """Whether it is a finding that the ledger does not have."""
        return self.answer in FINDINGS and not self.known


def answer(implementation: Implementation, pairs: Pairs, count: int, known: Known) -> Answer:
    """The answer of an implementation on `count` pairs of the first base and dtype on which it runs at all.

    Pairs that disagree about the answer make it "wrong", unless one side is an error.
    """
    blank = Answer(pairs.name, implementation.id, implementation.role, pairs.probe, "not run")
    reasons: list[str] = []
    for base in range(len(pairs.probe.bases)):
        for dtype in DTYPES:
            found: list[Answer] = []
            confounded = 0
            for one in pairs.moving(base, dtype):
                said = _one(implementation, one, blank, known)
                if said is None:
                    continue
                if said.reason == CONFOUNDED:
                    confounded += 1
                elif said.answer == "not run":
                    reasons.append(said.reason)
                    break
                else:
                    found.append(said)
                if len(found) == count or confounded == PATIENCE:
                    break
            if found:
                return _merged(found)
            if confounded:
                return dataclasses.replace(blank, reason=CONFOUNDED)
    return dataclasses.replace(blank, reason=reasons[0] if reasons else "no case on which the definition moves")


def _merged(found: Sequence[Answer]) -> Answer:
    """The pair that is furthest off, under the answer of all: an error on one is the answer, else they must be alike."""
    worst = max(found, key=lambda a: (SEVERITY.index(a.answer), _far(a.loss) + _far(a.gradient)))
    mixed = len({a.answer for a in found}) > 1 and worst.answer in ("ignored", "wrong")
    return dataclasses.replace(worst, answer="wrong") if mixed else worst


def _far(ratio: float | None) -> float:
    return 0.0 if ratio is None else abs(math.log(max(abs(ratio), 1e-30)))


def _one(implementation: Implementation, pair: Pair, blank: Answer, known: Known) -> Answer | None:
    """The answer on one pair; None where the judge could not tell the two sides apart."""
    moved, said = _judged(implementation, pair.moved)
    out = dataclasses.replace(blank, case=pair.case)
    if lacking := [n for n in blank.probe.outputs if n not in implementation.outputs]:
        return dataclasses.replace(out, answer="absent", reason=f"has no {' and no '.join(lacking)}")
    verdict, message = moved[0].verdict, moved[0].message
    if verdict == "unsupported":
        never = (
            message.startswith("Triton's interpreter") or _judged(implementation, pair.still)[0][0].verdict == verdict
        )
        return dataclasses.replace(blank if never else out, answer="not run" if never else "absent", reason=message)
    if moved[0].quantity is None:
        covered = _known(moved, known, pair.case)
        kind = "refused" if verdict == "refused" else "crashed"
        return dataclasses.replace(
            out, answer=kind, reason=message, silent=None if kind == "refused" else False, known=covered
        )
    wrong = _failing(moved, pair.moved)
    out = dataclasses.replace(out, loss=_ratio(moved, "loss"), gradient=_ratio(moved, "grad_"))
    if not wrong:
        untold = pair.calling(implementation, pair.still)
        if not blank.probe.stays and not _failing(_judged(untold, pair.moved)[0], pair.moved):
            return None
        metrics = [str(r.quantity) for r in moved if r.failing and r.gate not in ("protocol", "relation")]
        return dataclasses.replace(out, answer="honoured", metrics=tuple(metrics))
    told = _judged(pair.calling(implementation, pair.moved), pair.still)[0]
    moves = not blank.probe.stays and not blank.probe.outputs
    ignored = moves and told[0].quantity is not None and not _failing(told, pair.still)
    still, said_still = _judged(implementation, pair.still)
    if not ignored and still[0].quantity is not None and _failing(still, pair.still):
        return dataclasses.replace(out, answer="not run", reason=CONFOUNDED)
    return dataclasses.replace(
        out,
        answer="ignored" if ignored else "wrong",
        gates={str(r.quantity): str(r.gate) for r in wrong},
        silent=not said - said_still,
        known=_known(wrong, known, pair.case),
    )


def _judged(implementation: Implementation, oracle: CaseOracle) -> tuple[list[Row], set[str]]:
    """The rows of a call, and the warnings."""
    said: set[str] = set()

    def call(x: Inputs) -> Any:
        with _heard(said):
            return implementation.call(x)

    return list(rows_of(oracle, dataclasses.replace(implementation, call=call), thorough=False)), said


@contextlib.contextmanager
def _heard(said: set[str]) -> Iterator[None]:
    """Warnings and log lines of level warning, also those that a filter or a level would keep from a user's eyes here."""
    warn, log = warnings.warn, logging.Logger.warning

    def warned(message: Any, *args: Any, **kwargs: Any) -> Any:
        said.add(str(message))
        return warn(message, *args, **kwargs)

    def logged(self: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> Any:
        said.add(str(message))
        return log(self, message, *args, **kwargs)

    warnings.warn, logging.Logger.warning = warned, logged  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        warnings.warn, logging.Logger.warning = warn, log  # type: ignore[method-assign]


def _failing(rows: Iterable[Row], oracle: CaseOracle) -> list[Row]:
    """The rows that the audit is about: outputs with an upstream gradient, and gradients; no metrics."""
    asked = oracle.inputs.cotangents
    return [
        r for r in rows if r.failing and (r.quantity is None or r.quantity in asked or r.quantity.startswith("grad_"))
    ]


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


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """What the command line asked for; `cases`: pairs of inputs for each setting, which must all give the same answer."""

    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    device: str = "auto"
    cases: int = 2
    ledger: Path | None = None
    reports: Path = Path("reports")


def audit(options: AuditOptions, device: str) -> list[Answer]:
    """The answers, references first.

    Raises:
        UsageError: for a family, implementation or setting that does not exist.
    """
    from parity.data import ledger_file

    names = [resolved(name) for name in options.families]
    if odd := next((n for n in names if n not in loss_families()), None):
        raise UsageError(f"family {odd!r} is not audited, choose from {', '.join(loss_families())}")
    known = sorted({p.setting for name in names or loss_families() for p in loss_family(name).audited()})
    if odd := next((n for n in options.settings if n not in known), None):
        raise UsageError(f"setting {odd!r} is not audited, choose from {', '.join(known)}")
    chosen = sorted(select(options.implementations), key=lambda i: i.role != "reference")
    ledger = Ledger.load(options.ledger or ledger_file())
    answers: list[Answer] = []
    for name in names or loss_families():
        in_family = [i for i in chosen if i.family == name]
        for probe in loss_family(name).audited() if in_family else ():
            if not options.settings or probe.setting in options.settings:
                pairs = Pairs(name, probe, device)
                answers += [
                    answer(i, pairs, options.cases, lambda row, case: ledger.match(row, facts(case))) for i in in_family
                ]
    return answers


def exit_code(answers: Sequence[Answer]) -> int:
    """3 when nothing was judged, 1 for a finding that is not known, else 0."""
    if not any(a.answer in JUDGED for a in answers):
        return NOTHING
    return NEW if any(a.new for a in answers) else AGREE


def run(options: AuditOptions, console: Console) -> int:
    """Audit, print, write `audit.ndjson` and `audit.md`; returns the exit code."""
    from parity.process import prepare
    from parity.results.report.rows import writer
    from parity.running.provenance import header, resolve_device

    device = resolve_device(options.device)
    prepare(device, threads=1)
    answers = audit(options, device)
    about = header("audit", device, "audit", 0)
    with writer(options.reports / "audit.ndjson") as write:
        write(about)
        for one in answers:
            write(row(one))
    shown = ("torch", "transformers", "trl", "liger-kernel", "cut-cross-entropy")
    versions = ", ".join(f"{k} {v}" for k, v in about.header.versions.items() if k in shown)
    page = f"{measured.head('Settings audit', 'parity')}\n{markdown(answers, versions)}"
    (options.reports / "audit.md").write_text(page, encoding="utf-8")
    show(answers, console)
    found = exit_code(answers)
    console.print(f"\n{versions}", markup=False)
    console.print(f"reports in {options.reports}/: audit.ndjson, audit.md; exit code {found}", markup=False)
    return found


def row(one: Answer) -> dict[str, Any]:
    """One answer as a JSON object; its case can be given to `parity replay`."""
    plain = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name not in ("probe", "case", "gates")}
    return plain | {
        "setting": one.probe.setting,
        "value": one.probe.value,
        "label": one.probe.label,
        "gates": dict(one.gates),
        "case": None if one.case is None else one.case.to_json(),
        "new": one.new,
    }


def grouped(answers: Sequence[Answer]) -> Iterator[tuple[str, list[tuple[Answer, tuple[str, ...]]], list[str]]]:
    """For each implementation its title, the answers worth a row with their cells under `HEADINGS`, and remarks on the rest."""
    references = {(a.family, a.probe.label): a for a in answers if a.role == "reference"}
    for family, name in dict.fromkeys((a.family, a.implementation) for a in answers):
        rows: list[tuple[Answer, tuple[str, ...]]] = []
        rest: dict[str, list[str]] = {}
        for one in (a for a in answers if (a.family, a.implementation) == (family, name)):
            other = references.get((one.family, one.probe.label), one)
            if one.answer == "honoured" and not one.metrics:
                rest.setdefault("honoured", []).append(one.probe.label)
            elif one.answer == "not run":
                rest.setdefault(f"not run: {one.reason}", []).append(one.probe.label)
            elif one.answer == other.answer == "absent":
                rest.setdefault("not in this release", []).append(one.probe.label)
            else:
                rows.append((one, _cells(one, None if other is one else other)))
        rows.sort(key=lambda r: (not r[0].new, ANSWERS.index(r[0].answer)))
        remarks = [
            f"{why}: {', '.join(labels) if len(labels) <= 6 or why[:3] != 'not' else f'{len(labels)} settings'}"
            for why, labels in rest.items()
        ]
        yield f"{family}: {name}", rows, remarks


def _cells(one: Answer, reference: Answer | None) -> tuple[str, ...]:
    said = "; ".join([one.answer, *(f"{name} wrong" for name in one.metrics)])
    reason = f": {one.reason[:90]}" if one.reason else ""
    ratios = (("loss", one.loss), ("gradient", one.gradient))
    effect = ", ".join(f"{name} ×{value:.3g}" for name, value in ratios if value is not None)
    silent = "" if one.silent is None else "yes" if one.silent else "no"
    known = ", ".join(one.known) or ("new" if one.new else "")
    effect = (effect or "not finite") if one.answer in ("ignored", "wrong") else ""
    return one.probe.label, "" if reference is None else reference.answer, said + reason, effect, silent, known


def counts(answers: Iterable[Answer]) -> str:
    """How many (implementation, setting) pairs have each answer."""
    found = [a.answer for a in answers]
    return " · ".join(f"{found.count(kind)} {kind}" for kind in ANSWERS)


def show(answers: Sequence[Answer], console: Console) -> None:
    """Print the counts, then for each implementation what is not simply honoured."""
    console.print(Text(counts(answers), style="bold"))
    for title, rows, remarks in grouped(answers):
        console.print(Text(f"\n{title}", style="bold"))
        table = Table(*HEADINGS, box=None, pad_edge=False, header_style="bold")
        for one, cells in rows:
            bright = one.new or one.answer == "refused"
            table.add_row(*map(Text, cells), style=COLOURS.get(one.answer, "") if bright else "dim")
        if rows:
            console.print(table)
        for remark in remarks:
            console.print(Text(remark, style="dim"))


def markdown(answers: Sequence[Answer], versions: str) -> str:
    """The same as Markdown, as one posts it in an issue."""
    out = [escape(versions), "", f"**{escape(counts(answers))}**", ""]
    for title, rows, remarks in grouped(answers):
        out += [f"## {code(title)}", ""]
        if rows:
            out += [*measured.table(HEADINGS, (map(escape, cells) for _, cells in rows)), ""]
        for remark in remarks:
            out += [f"{escape(remark[0].upper() + remark[1:])}.", ""]
    return "\n".join(out)
