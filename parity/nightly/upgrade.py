"""May we upgrade? Compare and a run of the other release, and a team's own settings first: one page, one verdict."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity import data
from parity.case.case import Case
from parity.errors import UsageError
from parity.families.policy_losses import CONFIG_FIELDS
from parity.nightly import steps
from parity.process import installed
from parity.registry import loss_family
from parity.results.ledger import Ledger
from parity.results.memory import CUT, CommandOutcome
from parity.results.report import measured
from parity.results.report.findings import normalised
from parity.results.report.render import escape
from parity.results.trend import SHARE
from parity.tools.settings_check import Run, run_of
from parity.trainers import catalogue
from parity.trainers.specs import TRAINERS
from parity.upstream import trl
from parity.versions import compare, look, releases
from parity.versions.client import EnvironmentUnusable, UvFailed
from parity.versions.compare import Cases, Configs
from parity.versions.row_diff import MARKS

SAFE, CHANGED, NOT_SAFE, UNKNOWN = "safe", "safe, with changes of behaviour", "not safe", "not known"
CODES = {SAFE: 0, CHANGED: 0, NOT_SAFE: 1, UNKNOWN: 3}
NEXT, OWN, COMPARE = "NEXT", "your settings", "compare"
SEEDS, FACTORS = 3, (0.5, 2.0)
"""Of the cases with exactly a team's settings; by which a number is moved to make its neighbours."""
SHAPE = {"B": 3, "T": 6, "V": 33, "H": 8, "lengths": [6, 4, 1], "old": "mixed"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One question of the check: what was asked, the answer in a line, and what was printed."""

    name: str
    verdict: str
    summary: str
    printed: str


def resolved(spec: str) -> str:
    """PKG==VER with NEXT replaced by the newest release. Raises UsageError for what is none."""
    package, _, version = spec.partition("==")
    if version != NEXT:
        return str(releases.parse(spec))
    try:
        return f"{package}=={releases.newest(package).version}"
    except UvFailed as failure:
        raise EnvironmentUnusable(f"{package}: {failure}") from None


def check(
    spec: str,
    config: Path | None,
    reports: Path,
    say: Callable[[str], None],
    device: str,
    limit: float,
    trainer: str | None = None,
) -> tuple[str, list[Part]]:
    """The verdict and its parts, the team's own settings first; these and each command have `limit` seconds. `trainer`: the
    class in TRL that has the settings of `config`. Raises UsageError where the package is not installed here, and as
    `own_settings`."""
    package = spec.partition("==")[0]
    if not (version := installed(package)):
        raise UsageError(f"upgrade-check: {package} is not installed here: there is nothing to upgrade from")
    now = f"{package}=={version}"
    if spec == now:
        raise UsageError(f"upgrade-check: {now} is installed here: there is nothing to upgrade to")
    parts = []
    if config is not None:
        say(f"your settings in {now} and {spec}")
        parts.append(own_settings(now, spec, run_of(config, trainer, Ledger.load(data.ledger_file())), device, limit))
    words = ["run", "--with", spec, "--profile", "pr", "--device", device]
    say(f"parity {' '.join(words)}")
    parts.append(part(steps.part("run", words, reports, limit)))
    say(f"parity compare {now} {spec} --device {device}")
    parts.append(compared(now, spec, device, limit))
    return verdict(parts), parts


def own_cases(settings: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    """(label, case): a team's settings of the policy loss in two dtypes and with several seeds, then each neighbour
    once. Raises UsageError for a value that the policy family does not accept, naming it."""
    family = loss_family("policy")

    def made(dtype: str, seed: int, **moved: Any) -> Case:
        case = family.case(seed, dtype, {**SHAPE, **settings, **moved})
        family.full_settings(case)
        return case

    yield from ((OWN, made(dtype, seed)) for dtype in ("fp32", "bf16") for seed in range(SEEDS))
    for name in CONFIG_FIELDS:
        value, choices = settings.get(name, family.settings[name].default), family.settings[name].choices
        near = [v for v in choices or () if v != value]
        if choices is None and isinstance(value, int | float) and not isinstance(value, bool) and value:
            near = [type(value)(value * factor) for factor in FACTORS]
        yield from ((f"{name}={one}", made("fp32", 0, **{name: one})) for one in near)


def own_settings(before: str, after: str, run: Run, device: str, limit: float) -> Part:
    """A team's run in both releases, in `limit` seconds: GRPO's settings and their neighbours through the plain and the
    fused losses, of another trainer its checks of profile pr; and the fields of its config class. Raises UsageError for a
    value of GRPO's that the policy family does not accept, and for a trainer without checks."""
    kind = run.trainers[0]
    family = next((family for family, name in TRAINERS.items() if name == kind), None)
    if family is None:
        raise UsageError(f"{run.name}: {kind} has no check")
    if kind != "GRPOTrainer":
        cases = [(case.id, case) for case in catalogue.cases(family, "pr", 0)]
        return compared(before, after, device, limit, OWN, [f"{family}.released", f"{family}.fused"], cases, run)
    settings = {name: run.args[name] for name in CONFIG_FIELDS if name in run.args}
    asked = [(f"{label} ({case.dtype}, seed {case.seed})", case) for label, case in own_cases(settings)]
    part = compared(before, after, device, limit, OWN, ["trl.GRPOTrainer.*", "liger.FusedLinearGRPOLoss"], asked, run)
    beside = ", ".join(sorted(run.args.keys() - settings.keys()))
    said = f"{part.printed}\nnot part of the loss, not run: {beside}" if beside else part.printed
    return dataclasses.replace(part, printed=said)


def moved_fields(run: Run, before: Configs, after: Configs) -> tuple[list[str], list[str]]:
    """Of the config class of a run's trainer: the settings of the run that are no fields any more; the defaults that
    changed, of fields that it leaves at them. `args.to_json_string()` writes every field: one at its default is not set
    there, and of one whose default the class computes nobody knows."""
    config = trl.config_name(run.trainers[0])
    if config not in before:
        return [], []
    if config not in after:
        return [f"TRL has no {config} there"], []
    old, new = before[config], after[config]
    every = len(run.args.keys() & old.keys()) > len(old) / 2
    given = {name for name, value in run.args.items() if name in old and not (every and value == old[name])}
    unsure = {name for name in given if every and old[name] in (None, look.MADE)}
    given -= unsure
    gone = [f"{config} has no {name} there" for name in sorted(given - new.keys())]
    told = [f"{config} has no {name} there, if it was set" for name in sorted(unsure - new.keys())]
    changed = compare.changes(old, new)
    return gone, told + [f"default of {name}: {change}" for name, change in changed.items() if name not in given]


def compared(
    before: str,
    after: str,
    device: str,
    limit: float,
    name: str = COMPARE,
    named: Sequence[str] = (),
    asked: Cases | None = None,
    run: Run | None = None,
) -> Part:
    """What moved between two releases; where less than `SHARE` of what is judged in one is in the other, nothing is known. Of
    a team's own cases those with exactly its settings decide, and what moves with their neighbours is told. A setting of its
    `run` that the other release does not know is not safe."""
    try:
        found = compare.compare(([before], [after]), named, asked=asked, device=device, clock=limit)
    except (EnvironmentUnusable, UsageError) as error:
        return Part(name, UNKNOWN, str(error), "")
    exactly = {case.id for label, case in asked or () if label.startswith(OWN)}
    which = " with exactly these settings" if exactly else f" in checks of {run.trainers[0]}" if run else ""
    one, two = (sum(r.judged and (r.case in exactly or not exactly) for r in rows) for rows in found.rows)
    wrong = sum(m.mark == "+" and (m.case.startswith(OWN) or not exactly) for m in found.moved)
    worse, better, other = (sum(m.mark == mark for m in found.moved) for mark in MARKS)
    # Those that were judged before and are not there, though not wrong there either, and why.
    lost = [
        m for m in found.moved if m.mark == "~" and m.before and m.before.judged and not (m.after and m.after.judged)
    ]
    told = {"worse": worse, "better": better, "otherwise moved": other - len(lost)}
    moved = [f"{n} {text}" for text, n in told.items() if n > 0]
    if lost:
        messages = [(m.after.message if m.after else "") or "not run" for m in lost]
        shown = {normalised(text): text for text in messages}
        why = collections.Counter(shown[normalised(text)] for text in messages).most_common(3)
        moved.append(f"{len(lost)} judged before and not there: {', '.join(f'{text} ({n})' for text, n in why)}")
    gone, defaults = moved_fields(run, *found.configs) if run else ([], compare.moved_defaults(*found.configs))
    moved += [*gone, *defaults]
    summary, verdict = "; ".join(moved) or "nothing moved", CHANGED if moved else SAFE
    if wrong or gone:
        summary, verdict = f"{wrong} quantities are wrong{which}; {summary}", NOT_SAFE
    elif two < SHARE * one:
        summary, verdict = f"{two:,} of {one:,} quantities{which} could be judged there; {summary}", UNKNOWN
    return Part(name, verdict, summary, found.text())


def part(step: CommandOutcome) -> Part:
    """What one command says about the upgrade, by its exit code; what it had no time for is not safe."""
    gone = {0: (SAFE, "nothing new is wrong"), 4: (CHANGED, "a known failure is gone")}
    answers = gone | {1: (NOT_SAFE, "something is wrong that is not known"), None: (UNKNOWN, CUT)}
    why = step.tail.rpartition("\n")[2]
    found, said = answers.get(
        step.exit_code, (UNKNOWN, f"it could not answer (exit code {step.exit_code}){why and f': {why}'}")
    )
    if step.reached and step.exit_code in gone:
        found, said = UNKNOWN, f"nothing new is wrong so far, but {CUT}: {step.reached}"
    return Part(step.name, found, said, step.tail)


def verdict(parts: Sequence[Part]) -> str:
    """The gravest of the parts; with settings of its own a team is told about those, and the rest stands below."""
    return _gravest([p for p in parts if p.name == OWN] or parts)


def headline(spec: str, parts: Sequence[Part]) -> str:
    """The verdict in a line, which does not say of everything what holds for a team's own settings."""
    others = [p for p in parts if p.name != OWN]
    beyond = f" for your settings, beyond them {_gravest(others)}" if others and len(others) < len(parts) else ""
    return f"{spec}: {verdict(parts)}{beyond}"


def _gravest(parts: Sequence[Part]) -> str:
    return min((p.verdict for p in parts), key=(NOT_SAFE, UNKNOWN, CHANGED, SAFE).index)


def page(spec: str, parts: Sequence[Part]) -> str:
    answers = measured.table(["asked", "verdict", "why"], ([p.name, p.verdict, escape(p.summary)] for p in parts))
    lines = [f"# Upgrade to {headline(spec, parts)}", "", *answers, ""]
    for p in parts:
        lines += [f"## {p.name}", "", "```", p.printed or "(nothing)", "```", ""]
    return "\n".join(lines)
