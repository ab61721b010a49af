"""`parity audit`: ask every implementation about every setting, print the tables, write rows and Markdown."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.registry import facts, loss_families, loss_family, resolved, select
from parity.results.ledger import Ledger
from parity.tools.audit import table
from parity.tools.audit.pairs import Pairs
from parity.tools.audit.responsible import engine, is_wired, to_repair
from parity.tools.audit.verdicts import JUDGED, Answer, answer

CASES = 2
"""Pairs of inputs for each setting; all must give the same answer."""
AGREE, NEW, NOTHING = 0, 1, 3


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """What the command line asked for."""

    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    device: str = "auto"
    cases: int = CASES
    ledger: Path | None = None
    reports: Path = Path("reports")

    def argv(self) -> list[str]:
        """The command line that asks for the same elsewhere, without the folder of its reports."""
        many = {"family": self.families, "implementation": self.implementations, "setting": self.settings}
        out = [word for option, values in many.items() for value in values for word in (f"--{option}", value)]
        out += ["--device", self.device, "--cases", str(self.cases)]
        return out + (["--ledger", str(self.ledger.resolve())] if self.ledger else [])


def audit(options: AuditOptions) -> tuple[list[Answer], dict[int, str]]:
    """The answers, and where to repair by their number.

    Raises:
        UsageError: for a family, implementation or setting that does not exist.
    """
    from parity.data import ledger_file
    from parity.running.provenance import resolve_device

    _check(options)
    chosen = select(options.implementations)
    ledger = Ledger.load(options.ledger or ledger_file())
    device = resolve_device(options.device)
    answers: list[Answer] = []
    for name in map(resolved, options.families or loss_families()):
        in_family = _with_engines([i for i in chosen if i.family == name])
        for probe in loss_family(name).audited() if in_family else ():
            if options.settings and probe.setting not in options.settings:
                continue
            pairs = Pairs(name, probe, device)
            answers += [
                answer(i, pairs, options.cases, lambda row, case: ledger.match(row, facts(case))) for i in in_family
            ]
    return answers, dict(_repairs(answers))


def _check(options: AuditOptions) -> None:
    names = [resolved(name) for name in options.families]
    for name in names:
        if name not in loss_families():
            raise UsageError(f"family {name!r} is not audited, choose from {', '.join(loss_families())}")
    known = sorted({p.setting for name in names or loss_families() for p in loss_family(name).audited()})
    for name in options.settings:
        if name not in known:
            raise UsageError(f"setting {name!r} is not audited, choose from {', '.join(known)}")


def _with_engines(chosen: Sequence[Implementation]) -> list[Implementation]:
    """The implementations, references first, and the kernels behind them, which decide where to repair."""
    known = {i.id: i for i in chosen}
    engines = {e for i in chosen if is_wired(i.id) and (e := engine(i.id)) is not None and e not in known}
    every = [*chosen, *(select([e])[0] for e in sorted(engines))]
    return sorted(every, key=lambda i: i.role != "reference")


def _repairs(answers: Sequence[Answer]) -> Iterator[tuple[int, str]]:
    by = {(a.implementation, a.family, a.probe.label): a for a in answers}
    references = {(a.family, a.probe.label): a for a in answers if a.role == "reference"}
    for number, one in enumerate(answers):
        behind = engine(one.implementation)
        kernel = None if behind is None else by.get((behind, one.family, one.probe.label))
        reference = None if one.role == "reference" else references.get((one.family, one.probe.label))
        text = to_repair(one, kernel, reference)
        if text:
            yield number, text


def exit_code(answers: Sequence[Answer]) -> int:
    """3 when nothing was judged, 1 for a finding that is not known, else 0."""
    if not any(a.answer in JUDGED for a in answers):
        return NOTHING
    return NEW if any(a.new for a in answers) else AGREE


def run(options: AuditOptions, console: Console) -> int:
    """Audit, print, write `audit.ndjson` and `audit.md`; returns the exit code."""
    from parity.process import prepare
    from parity.running.provenance import header, resolve_device

    device = resolve_device(options.device)
    prepare(device, threads=1)
    from parity.results.report import measured
    from parity.results.report.rows import writer

    answers, repairs = audit(options)
    about = header("audit", device, "audit", 0)
    with writer(options.reports / "audit.ndjson") as write:
        write(about)
        for number, one in enumerate(answers):
            write(table.row(one, repairs.get(number, "")))
    versions = ", ".join(f"{k} {v}" for k, v in about.header.versions.items() if k in SHOWN)
    page = f"{measured.head('Settings audit', 'parity')}\n{table.markdown(answers, repairs, versions)}"
    (options.reports / "audit.md").write_text(page, encoding="utf-8")
    table.show(answers, repairs, console)
    code = exit_code(answers)
    console.print(f"\n{versions}", markup=False)
    console.print(f"reports in {options.reports}/: audit.ndjson, audit.md; exit code {code}", markup=False)
    return code


SHOWN = ("torch", "transformers", "trl", "liger-kernel", "cut-cross-entropy")
