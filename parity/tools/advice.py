"""`python -m parity.fixes check`: the ledger's findings, filtered by a training run's settings. Files are parsed, never run."""

import argparse
import ast
import collections
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from parity import data
from parity.errors import Unsupported, UsageError
from parity.process import installed
from parity.results.ledger import Entry, Ledger
from parity.results.report.stack import LIBRARIES, releases
from parity.results.user import SEVERITIES
from parity.upstream import trl

ALIASES = {"lora_modules_to_save": "modules_to_save", "activation_checkpointing": "gradient_checkpointing"}
MODELS = ("model", "model_name", "model_name_or_path")


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A value that cannot be told, and why."""

    why: str


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. `trainers` are candidates: one of them runs, unless `certain` all of them do (a class and its bases).

    `args` holds what is set. What is not has its default, unless the run is `open`: something unknown may have set it.
    """

    name: str
    trainers: tuple[str, ...]
    certain: bool = True
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: tuple[str | Unknown, ...] = ()
    imports: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    open: str = ""

    def value(self, name: str) -> Any:
        """The argument, else its default; None for a setting that these trainers have not."""
        if name in self.args or self.open:
            return self.args.get(name, Unknown(self.open))
        return next((known[name] for known in map(_fields, self.trainers) if name in known), None)


@dataclasses.dataclass(frozen=True)
class RelevantEntry:
    """An entry that a run meets; `unless_known` says what cannot be told and would decide it."""

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
        trainer = self.run.trainers[0] if self.run.certain else " or ".join(self.run.trainers)
        found = ", ".join(f"{name} {version}" for name in LIBRARIES if (version := installed(name)))
        said = [str(f) for f in self.findings] or ["nothing of the known findings applies"]
        return "\n".join([f"{self.run.name}: {trainer}; {found}", *said])


def check(source: Any, trainer: str | None = None) -> list[Advice]:
    """The known findings that the settings of a run meet; `parity.fixes.check` says what `source` may be.

    Raises:
        UsageError: for an unknown trainer, and for a file that cannot be read or leaves the trainer open.
    """
    entries = Ledger.load(data.ledger_file()).entries
    known = sorted({name for e in entries for table in e.user.applies for name in table.get("trainer", ())})
    if trainer not in (None, *known):
        raise UsageError(f"trainer {trainer!r} is unknown, choose from {', '.join(known)}")
    asked = [trainer] if trainer else known
    runs = _of_file(Path(source), asked) if isinstance(source, str | os.PathLike) else [_of_trainer(source)]
    return [Advice(run, tuple(_met(run, entries))) for run in runs]


def _met(run: Run, entries: Iterable[Entry]) -> list[RelevantEntry]:
    found = []
    for entry in entries:
        if entry.user.part_of or not entry.in_force():
            continue
        alone = [run] if run.certain else [dataclasses.replace(run, trainers=(t,), certain=True) for t in run.trainers]
        answers = {one.trainers[0]: _applies(one, entry) for one in alone}
        meeting = [trainer for trainer, answer in answers.items() if answer is not False]
        why = "" if len(meeting) == len(alone) else f"the file does not say which trainer runs: {' or '.join(meeting)}"
        why = why or next((a.why for a in answers.values() if isinstance(a, Unknown)), "")
        if meeting:
            found.append(RelevantEntry(entry, why))
    order = list(SEVERITIES)
    return sorted(found, key=lambda f: (order.index(f.entry.severity or "medium"), not f.certain, f.entry.user.rank))


def _applies(run: Run, entry: Entry) -> bool | Unknown:
    answers = [_all([holds(run, *one) for one in table.items()]) for table in entry.user.applies]
    return True in answers or next((a for a in answers if isinstance(a, Unknown)), False)


def _all(answers: list[bool | Unknown]) -> bool | Unknown:
    return False not in answers and next((a for a in answers if isinstance(a, Unknown)), True)


def holds(run: Run, name: str, wanted: Any) -> bool | Unknown:
    """Whether a condition of a ledger entry's `applies` holds of a run (`parity.results.user.ForUser`)."""
    if name == "trainer":
        return bool({*run.trainers} & {*wanted})
    if name in LIBRARIES:
        version = installed(name)
        return version is not None and version in SpecifierSet(wanted, prereleases=True)
    if name in ("imports", "uses"):
        given = run.imports if name == "imports" else run.uses
        return any(f"{one}.".startswith(f"{word}.") for word in wanted for one in given)
    if name == "model":
        names = [one.lower().replace("-", "").replace("_", "") for one in run.models if isinstance(one, str)]
        if any(word.replace("-", "").replace("_", "") in one for word in wanted for one in names):
            return True
        return next((one for one in run.models if isinstance(one, Unknown)), not names and Unknown("no model is named"))
    if name == "liger":
        both = [_within(one, run.value(one), True) for one in ("use_liger_kernel", "use_liger_loss")]
        return True in both or next((one for one in both if isinstance(one, Unknown)), False)
    return _within(name, run.value(name), wanted)


def _within(name: str, value: Any, wanted: Any) -> bool | Unknown:
    value = getattr(value, "value", value)  # of an enumeration
    if value is None or isinstance(value, Unknown):
        return value or False
    if isinstance(wanted, list):
        return any(one in wanted for one in (value if isinstance(value, list | tuple) else [value]))
    if isinstance(value, str):  # words, as transformers' parser takes them
        value = {"yes": True, "true": True, "no": False, "false": False}.get(value.lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Unknown(f"{name} is {value!r}")
    if isinstance(wanted, dict):
        return number != wanted.get("not") and wanted.get("min", number) <= number <= wanted.get("max", number)
    return number == wanted


def _fields(trainer: str) -> Mapping[str, Any]:
    """The settings of a trainer's config class with their defaults; none where it is not installed."""
    try:
        return trl.fields(trl.class_named(trainer.removesuffix("Trainer") + "Config"))
    except Unsupported:
        return {}


def _of_file(path: Path, trainers: list[str]) -> list[Run]:
    import yaml

    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.suffix not in (".yaml", ".yml", ".json", ".py"):
        raise UsageError(f"{path}: expected settings in a .yaml or .json file (args.to_json_string()), or a .py script")
    try:
        found: Any = (ast.parse if path.suffix == ".py" else yaml.safe_load)(path.read_text())
    except (yaml.YAMLError, ValueError, SyntaxError) as error:
        raise UsageError(f"{path}: not a readable {path.suffix} file: {error}") from None
    if isinstance(found, ast.Module):
        runs = list(_of_script(str(path), found, trainers))
    elif isinstance(found, dict):
        runs = _of_table(str(path), {ALIASES.get(str(k), str(k)): v for k, v in found.items()}, trainers)
    else:
        raise UsageError(f"{path}: expected a table of settings")
    if not runs:
        raise UsageError(f"{path}: it names no trainer that a finding is of; say which runs it (--trainer GRPOTrainer)")
    return runs


def _of_table(name: str, args: dict[str, Any], trainers: list[str]) -> list[Run]:
    """What `trl grpo --config` takes. The trainer is one of those whose config knows most of the settings."""
    counts = {trainer: len(args.keys() & _fields(trainer).keys()) for trainer in trainers}
    likely = [t for t, n in counts.items() if len(trainers) == 1 or n == max(counts.values()) > 0]
    models = tuple(_model(str(args[k])) for k in MODELS if args.get(k))
    uses = frozenset(k for k, v in args.items() if v is True)
    return [Run(name, tuple(likely), len(likely) == 1, args, models, uses=uses)] if likely else []


def _model(name: str) -> str | Unknown:
    """A model's name, with the architecture where it is a folder."""
    folder = Path(name)
    if not (folder.is_absolute() or name.startswith(".") or folder.is_dir()):
        return name
    try:
        return f"{name} {json.loads((folder / 'config.json').read_text()).get('model_type', '')}"
    except (OSError, ValueError):
        return Unknown(f"{name} has no readable config.json")


def _of_script(name: str, tree: ast.Module, trainers: list[str]) -> Iterator[Run]:
    """One run for each of the trainers that the script names, or whose arguments it makes."""
    nodes = list(ast.walk(tree))
    literal = _literals(nodes)
    imported = [alias for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]
    real = {alias.asname: alias.name for alias in imported if alias.asname}
    real |= {
        n.name: base for n in nodes if isinstance(n, ast.ClassDef) for base in map(_last, n.bases) if _trains(base)
    }
    calls = collections.defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Call):
            calls[real.get(_last(node.func), _last(node.func))].append(node)
    words = {_last(n) for n in nodes if isinstance(n, ast.Name | ast.Attribute)} | {alias.name for alias in imported}
    keywords = [k for group in calls.values() for call in group for k in call.keywords]
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    shared = Run(
        name,
        (),
        models=tuple(_models(calls, literal)),
        imports=frozenset(modules | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}),
        uses=frozenset(words | {k.arg for k in keywords if k.arg and literal(k.value) not in (None, False)}),
    )
    later = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for trainer in trainers:
        config = trainer.removesuffix("Trainer") + "Config"
        if len(trainers) > 1 and not words & {trainer, config}:
            continue
        made = calls[config]
        opened = "" if len(made) == 1 else f"the script calls {config} {len(made) or 'no'} times"
        given = [k for call in [*calls["LoraConfig"], *calls["BitsAndBytesConfig"], *made] for k in call.keywords]
        args = {ALIASES.get(k.arg, k.arg): literal(k.value) for k in given if k.arg}
        opened = opened or next((f"the script gives **{ast.unparse(k.value)}" for k in given if not k.arg), "")
        args |= {one: Unknown(f"{one} is assigned to") for one in later}
        yield dataclasses.replace(shared, trainers=(trainer,), args=args if len(made) < 2 else {}, open=opened)


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _trains(name: str) -> bool:
    return name.endswith("Trainer") and name != "Trainer"


def _literals(nodes: list[ast.AST]) -> Callable[[ast.expr], Any]:
    """The value of a literal, or of a name that is bound once, to a literal; else `Unknown`."""
    bound = collections.Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    bound.update(n.arg for n in nodes if isinstance(n, ast.arg))
    given = [(target, n.value) for n in nodes if isinstance(n, ast.Assign) for target in n.targets]
    constants = {_last(target): value for target, value in given if isinstance(target, ast.Name)}

    def literal(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(
                constants[_last(node)] if isinstance(node, ast.Name) and bound[node.id] == 1 else node
            )
        except (KeyError, ValueError):
            return Unknown(f"{ast.unparse(node)[:60]} is not a literal")

    return literal


def _models(calls: dict[str, list[ast.Call]], literal: Callable[[ast.expr], Any]) -> Iterator[str | Unknown]:
    """What `from_pretrained` is given, and a trainer where that is text; of a tokenizer it is no model."""
    for called, call in [(name, call) for name, group in calls.items() for call in group]:
        if not (_trains(called) or called == "from_pretrained") or re.search(
            "okenizer|ocessor", ast.unparse(call.func)
        ):
            continue
        for node in [*call.args[:1], *(k.value for k in call.keywords if k.arg in MODELS)]:
            found = literal(node)
            if isinstance(found, str):
                yield _model(found)
            elif called == "from_pretrained":
                yield Unknown(f"{ast.unparse(node)[:60]} is not a literal")


def _of_trainer(trainer: Any) -> Run:
    """A constructed trainer; nothing of it is changed or run."""
    import torch

    model: Any = getattr(trainer, "model", None)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "config", None)
    models = [str(getattr(config, name, "")) for name in ("model_type", "_name_or_path")] if config is not None else []
    kinds = [kind for kind in type(trainer).__mro__ if _trains(kind.__name__)]
    losses = ("liger_loss", "liger_grpo_loss", "liger_loss_fn", "dpo_loss_fn")
    imports = {kind.__module__ for kind in (*kinds, *(type(getattr(trainer, name, None)) for name in losses))}
    uses: set[str] = set()
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if isinstance(head, torch.nn.Module):
        imports.add(type(head).__module__)
        uses |= {"register_forward_hook"} if head._forward_hooks or head._forward_pre_hooks else set()
        uses |= {"load_in_4bit"} if type(head).__name__ == "Linear4bit" else set()
    args = {ALIASES.get(k, k): v for k, v in vars(getattr(trainer, "args", None) or Run("", ())).items()}
    peft = next(iter(getattr(model, "peft_config", {}).values()), None)
    args["modules_to_save"] = list(getattr(peft, "modules_to_save", None) or [])
    if any(getattr(m, "gradient_checkpointing", False) for m in (model.modules() if model is not None else ())):
        args["gradient_checkpointing"] = True
    trainers = tuple(kind.__name__ for kind in kinds) or (type(trainer).__name__,)
    return Run(type(trainer).__name__, trainers, True, args, tuple(models), frozenset(imports), frozenset(uses))


def main() -> int:
    """The command: 1 where something known is wrong for a file's settings, 0 where not, 2 for misuse."""
    parser = argparse.ArgumentParser(prog="python -m parity.fixes", description="Known findings that settings meet.")
    command = parser.add_subparsers(required=True).add_parser(
        "check", help="known findings that a file's settings meet"
    )
    command.add_argument("file", help="config.yaml, args.json or script.py; nothing of it is executed")
    command.add_argument("--trainer", help="the trainer class, where the file does not say: GRPOTrainer")
    given = parser.parse_args()
    try:
        found = check(given.file, given.trainer)
    except UsageError as error:
        print(f"parity.fixes: {error}", file=sys.stderr)
        return 2
    print(*found, sep="\n\n")
    return int(any(found))
