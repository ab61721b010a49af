"""Settings → findings of the ledger that they meet on the installed stack → fix."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from parity import data
from parity.errors import Unsupported, UsageError
from parity.process import installed
from parity.results.ledger import Entry, Ledger
from parity.results.report.known import releases
from parity.results.user import SEVERITIES
from parity.tools.advice.read import KNOWN, from_script, from_trainer, from_yaml
from parity.tools.advice.settings import LIBRARIES, Run, Unknown, holds
from parity.upstream import trl


def parsed(run: Run) -> Run:
    """The run with words as TRL's parser takes them ("4" as 4, "yes" as True), by the first trainer that takes all.

    Raises:
        UsageError: where none does, naming the setting, its value, and what it takes.
    """
    refusals = []
    for trainer in run.trainers:
        try:
            config = trl.class_named(trainer.removesuffix("Trainer") + "Config")
        except Unsupported:
            return run
        try:
            return dataclasses.replace(run, args={k: _parsed(config, k, v) for k, v in run.args.items()})
        except ValueError as error:
            refusals.append(f"{run.name}: {error}")
    if refusals:
        raise UsageError(refusals[0])
    return run


def _parsed(config: type, name: str, value: Any) -> Any:
    """A value as transformers' own parser of command lines takes it; ValueError for one that it refuses."""
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(re.sub(r"^argument \S+: ", "", message))

    field = {f.name: f for f in dataclasses.fields(config)}.get(name)
    if field is None or value in (None, [], {}) or isinstance(value, Unknown):
        return value
    given = value if isinstance(value, list | tuple) else [value]
    words = [json.dumps(v) if isinstance(v, dict) else str(v) for v in given]
    one = dataclasses.make_dataclass("One", [(name, field.type, field)])
    if isinstance(value, list | tuple) and "list" not in str(field.type).lower():
        raise ValueError(f"{name}: it takes one value, and no list")
    try:
        read = [getattr(Parser(one).parse_args([f"--{name}={word}"]), name) for word in words]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    known = _choices(config, field)
    odd = [word for word in ",".join(words).split(",") if known and word.strip() not in known]
    if odd:
        raise ValueError(f"{name}: invalid choice: {odd[0]!r} (choose from {', '.join(sorted(known))})")
    return read[0] if isinstance(value, str) else value


def _choices(config: type, field: dataclasses.Field[Any]) -> set[str]:
    """The choices of a setting of TRL's that its help alone lists: the words in quotes, if its default is one of them."""
    from transformers import TrainingArguments

    if field.metadata.get("choices") or field.type not in (str, list[str], "str", "list[str]"):
        return set()
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    words = set(re.findall(r"[`'\"]+(\w+)[`'\"]+", field.metadata.get("help") or ""))
    words -= {f.name for f in dataclasses.fields(config)}
    common = {f.name for f in dataclasses.fields(TrainingArguments)}
    listed = default if isinstance(default, list) else [default]
    return words if field.name not in common and listed and set(listed) <= words else set()


@dataclasses.dataclass(frozen=True)
class RelevantEntry:
    """An entry that a run meets; `unless_known` says what could not be read and would decide it."""

    entry: Entry
    unless_known: str = ""

    @property
    def certain(self) -> bool:
        """Whether the settings alone decide that it applies."""
        return not self.unless_known and not self.entry.user.only_if

    def __str__(self) -> str:
        user, message = self.entry.user, f"[{self.entry.severity}] {self.entry.id}"
        message += f", if {user.only_if}" if user.only_if else ""
        message += f" (cannot tell: {self.unless_known})" if self.unless_known else ""
        return f"{message}\n    {user.effect}\n    fix: {user.fix}. Releases: {releases(self.entry)}"


@dataclasses.dataclass(frozen=True)
class Advice:
    """What is wrong for one run, most severe first. Truth value: whether anything is for certain, conventions apart."""

    run: Run
    findings: tuple[RelevantEntry, ...]

    def __bool__(self) -> bool:
        return any(f.certain and f.entry.severity != "convention" for f in self.findings)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        trainer = (
            next(iter(self.run.trainers), "no trainer of TRL") if self.run.certain else " or ".join(self.run.trainers)
        )
        found = ", ".join(f"{name} {version}" for name in LIBRARIES if (version := installed(name)))
        yield f"{self.run.name}: {trainer}; {found}"
        if not self.findings:
            yield "nothing of the known findings applies"
        yield from map(str, self.findings)


def check(source: Any, trainer: str | None = None, ledger: Path | None = None) -> list[Advice]:
    """The known findings that the settings of a run meet; nothing is changed, and no code of a file is executed.

    `source` is a constructed trainer, or the path of a file of settings (YAML as `trl grpo --config` takes it, JSON as a
    config's `to_json_string` gives it) or of a Python script; `trainer` names the trainer class where the file leaves
    that open. One `Advice` a trainer.

    Raises:
        UsageError: for an unknown trainer, a file that cannot be read or is none of these, a script without a trainer, a
            value that the trainer's config does not take.
    """
    entries, runs = Ledger.load(ledger or data.ledger_file()).entries, _runs(source, trainer)
    if isinstance(source, str | os.PathLike):
        runs = [parsed(run) for run in runs]
    return [_advise(run, entries) for run in runs]


def _runs(source: Any, trainer: str | None) -> list[Run]:
    if not isinstance(source, str | os.PathLike):
        return [from_trainer(source)]
    path, names = Path(source), [f"{name}Trainer" for name in KNOWN]
    if trainer not in (None, *names):
        raise UsageError(f"trainer {trainer!r} is unknown, choose from {', '.join(names)}")
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.suffix in (".yaml", ".yml", ".json"):
        return [from_yaml(path, trainer)]
    if path.suffix == ".py":
        return from_script(path, trainer)
    pickled = "; a pickle runs code when it is read: write trainer.args.to_json_string() to a .json file"
    message = f"{path}: expected a .yaml or .json file of settings or a .py script"
    raise UsageError(message + (pickled if path.suffix in (".bin", ".pkl", ".pt") else ""))


def _advise(run: Run, entries: tuple[Entry, ...]) -> Advice:
    found = []
    for entry in entries:
        if entry.user.part_of or not entry.in_force():
            continue
        met = [_meets(run, table) for table in entry.user.applies]
        if any(m is True for m in met):
            found.append(RelevantEntry(entry))
        elif unknown := next((m for m in met if isinstance(m, Unknown)), None):
            found.append(RelevantEntry(entry, unknown.why))
    order = list(SEVERITIES)
    found.sort(key=lambda f: (order.index(f.entry.severity or "medium"), bool(f.unless_known), f.entry.user.rank))
    return Advice(run, tuple(found))


def _meets(run: Run, table: dict[str, Any]) -> bool | Unknown:
    answers = [holds(run, name, wanted) for name, wanted in table.items()]
    if any(answer is False for answer in answers):
        return False
    return next((a for a in answers if isinstance(a, Unknown)), True)
