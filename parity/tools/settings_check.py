"""`parity findings --config`: the ledger's findings, filtered by a training run's settings."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from parity import data
from parity.errors import Unsupported, UsageError
from parity.process import installed
from parity.results.ledger import Entry, Ledger
from parity.results.report.stack import LIBRARIES, Stack, releases
from parity.upstream import trl

ALIASES = {"lora_modules_to_save": "modules_to_save", "activation_checkpointing": "gradient_checkpointing"}
MODELS = ("model", "model_name", "model_name_or_path")


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A value that cannot be told, and why."""

    why: str


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: the class of its trainer and that class's bases, and the arguments that are set."""

    name: str
    trainers: tuple[str, ...]
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: tuple[str | Unknown, ...] = ()
    imports: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()

    def value(self, name: str) -> Any:
        """The argument, else its default; None for a setting that these trainers have not."""
        if name in self.args:
            return self.args[name]
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
    stack: Stack

    def __bool__(self) -> bool:
        return any(f.certain and f.entry.severity != "convention" for f in self.findings)

    @property
    def title(self) -> str:
        """The run, the stack, and how many defects of it the run meets."""
        return f"{self.run.name}: {self.run.trainers[0]}; {self.stack.named}: {self.stack.defects}"

    def __str__(self) -> str:
        said = [str(f) for f in self.findings] or ["nothing of the known findings applies"]
        return "\n".join([self.title, *said])


def check(source: Any, trainer: str | None = None, ledger: Ledger | None = None) -> Advice:
    """The known findings that the settings of a run meet; `parity.fixes.check` says what `source` may be.

    Raises:
        UsageError: for an unknown trainer, and for a file that cannot be read or leaves the trainer open.
    """
    ledger = ledger or Ledger.load(data.ledger_file())
    here, entries = Stack.here(ledger), ledger.entries
    known = sorted({name for e in entries for table in e.user.applies for name in table.get("trainer", ())})
    if trainer not in (None, *known):
        raise UsageError(f"trainer {trainer!r} is unknown, choose from {', '.join(known)}")
    is_file = isinstance(source, str | os.PathLike)
    run = _of_file(Path(source), trainer, known) if is_file else _of_trainer(source)
    answers = [(e, _applies(run, e)) for e in here.entries]
    found = [RelevantEntry(e, a.why if isinstance(a, Unknown) else "") for e, a in answers if a is not False]
    return Advice(run, tuple(found), Stack(here.versions, [f.entry for f in found]))


def _applies(run: Run, entry: Entry) -> bool | Unknown:
    answers = [_all([holds(run, *one) for one in table.items()]) for table in entry.user.applies]
    return True in answers or next((a for a in answers if isinstance(a, Unknown)), False)


def _all(answers: list[bool | Unknown]) -> bool | Unknown:
    return False not in answers and next((a for a in answers if isinstance(a, Unknown)), True)


def holds(run: Run, name: str, wanted: Any) -> bool | Unknown:
    """Whether a condition of a ledger entry's `applies` holds of a run (`parity.results.ledger.ForUser`)."""
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


def _config(trainer: str) -> type:
    return trl.class_named(trainer.removesuffix("Trainer") + "Config")


def _fields(trainer: str) -> Mapping[str, Any]:
    """The settings of a trainer's config class with their defaults; none where it is not installed."""
    try:
        return trl.fields(_config(trainer))
    except Unsupported:
        return {}


def settings_of(path: Path) -> dict[str, Any]:
    """The settings in a file, as `trl grpo --config` takes them or `args.to_json_string()` gives them.

    Raises:
        UsageError: for a file that cannot be read, or holds something else.
    """
    import yaml

    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(f"{path}: expected settings in a .yaml or .json file, as args.to_json_string() gives them")
    try:
        found: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a readable {path.suffix} file: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{path}: expected a table of settings")
    return {ALIASES.get(str(name), str(name)): value for name, value in found.items()}


def _of_file(path: Path, asked: str | None, known: Sequence[str]) -> Run:
    """Its trainer is the one asked for, else the one whose config knows most of the settings: the base of those that tie."""
    args = settings_of(path)
    counts = {trainer: len(args.keys() & _fields(trainer).keys()) for trainer in known}
    likely = [asked] if asked else [t for t, n in counts.items() if n == max(counts.values()) > 0]
    if len(likely) > 1:
        likely = [t for t in likely if not any(t != o and issubclass(_config(t), _config(o)) for o in likely)]
    if len(likely) != 1:
        fits = f"fit {', '.join(likely)}" if likely else "are none of a trainer that a finding is of"
        raise UsageError(f"{path}: its settings {fits}; say which runs it (--trainer GRPOTrainer)")
    models = tuple(_model(str(args[k])) for k in MODELS if args.get(k))
    return Run(str(path), tuple(likely), args, models, uses=frozenset(k for k, v in args.items() if v is True))


def _model(name: str) -> str | Unknown:
    """A model's name, with the architecture where it is a folder."""
    folder = Path(name)
    if not (folder.is_absolute() or name.startswith(".") or folder.is_dir()):
        return name
    try:
        return f"{name} {json.loads((folder / 'config.json').read_text()).get('model_type', '')}"
    except (OSError, ValueError):
        return Unknown(f"{name} has no readable config.json")


def _of_trainer(trainer: Any) -> Run:
    """A constructed trainer; nothing of it is changed or run."""
    import torch

    model: Any = getattr(trainer, "model", None)
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "config", None)
    models = [str(getattr(config, name, "")) for name in ("model_type", "_name_or_path")] if config is not None else []
    kinds = [kind for kind in type(trainer).__mro__ if kind.__name__.endswith("Trainer") and kind.__name__ != "Trainer"]
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
    return Run(type(trainer).__name__, trainers, args, tuple(models), frozenset(imports), frozenset(uses))
