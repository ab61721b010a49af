"""`parity findings --config`: the ledger's findings, filtered by a training run's settings."""

import collections
import dataclasses
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from parity import data
from parity.decoding import short
from parity.errors import Unsupported, UsageError
from parity.process import installed
from parity.registry import meant
from parity.results import ledger
from parity.results.ledger import Entry, Ledger
from parity.results.report.stack import LIBRARIES, Stack
from parity.upstream import trl

ALIASES = {"lora_modules_to_save": "modules_to_save", "activation_checkpointing": "gradient_checkpointing"}
SCRIPT = ("ModelConfig", "ScriptArguments", "DatasetMixtureConfig")
COMMAND = "accelerate_config config datasets env num_processes reward_funcs reward_model_name_or_path".split()
"""Classes of settings, and settings, that a file for `trl grpo --config` has besides its trainer's."""
MODELS = ("model", "model_name", "model_name_or_path")


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A value that cannot be told, and why; `absent`: the name that a file would tell it by."""

    why: str
    absent: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: the class of its trainer, and the arguments that are set; `uses`: the switches that are on."""

    name: str
    trainers: tuple[str, ...]
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: tuple[str | Unknown, ...] = ()
    uses: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()  # names in its file that are no setting of its trainer, model or data

    def value(self, name: str) -> Any:
        """The argument, else its default; None for a setting that these trainers have not."""
        if name in self.args:
            return self.args[name]
        return next((known[name] for known in map(_fields, self.trainers) if name in known), None)


@dataclasses.dataclass(frozen=True)
class Advice:
    """What is wrong for one run, most severe first. `conditions`: id of an entry that it meets -> what besides the settings
    decides whether that applies, nothing where they decide; `absent`: name that its file lacks -> the entries that depend on
    it. Truth value: whether anything is for certain, conventions apart."""

    run: Run
    stack: Stack
    conditions: Mapping[str, str]
    absent: Mapping[str, Sequence[str]]

    def __bool__(self) -> bool:
        return any(self._certain)

    @property
    def _certain(self) -> list[bool]:
        return [not self.conditions[e.id] for e in self.stack.entries if e.severity != "convention"]

    @property
    def title(self) -> str:
        """The run, the stack, and how many defects of it the run meets or may meet."""
        sure = f", {sum(self._certain)} for certain" * bool(self._certain)
        return f"{self.run.name}: {self.run.trainers[0]}; {self.stack.named}: {self.stack.defects}{sure}"


def known_of(trainer: Any, model: str, quantities: Collection[str]) -> list[Entry]:
    """What the ledger has against these quantities of a trainer of TRL over a model of the architecture `model`, for certain."""
    kinds = tuple(k.__name__ for k in type(trainer).__mro__ if k.__name__.endswith("Trainer"))
    kinds = tuple(k for k in kinds if k != trl.TRANSFORMERS) or kinds  # every trainer of TRL extends it
    args = {ALIASES.get(name, name): value for name, value in vars(trainer.args).items()}
    run = Run(kinds[0], kinds, args, (model,), frozenset(name for name, value in args.items() if value is True))
    found = advice(run, Ledger.load(data.ledger_file()))
    return [e for e in found.stack.entries if not found.conditions[e.id] and {*quantities} & {*e.quantities}]


def advice(run: Run, ledger: Ledger) -> Advice:
    """The known findings that a run on this stack meets."""
    here, conditions, absent = Stack.here(ledger), dict[str, str](), collections.defaultdict[str, list[str]](list)
    for e in here.entries:
        applies = _applies(run, e)
        if isinstance(applies, Unknown) and applies.absent:
            absent[applies.absent].append(e.id)
        elif isinstance(applies, Unknown):
            conditions[e.id] = f"cannot tell: {applies.why}"
        elif applies:
            conditions[e.id] = f"if {e.user.only_if}" if e.user.only_if else ""
    return Advice(run, Stack(here.versions, [e for e in here.entries if e.id in conditions]), conditions, absent)


def _applies(run: Run, entry: Entry) -> bool | Unknown:
    """Whether all of one of its tables holds."""
    whole = [[holds(run, *one) for one in table.items()] for table in entry.user.applies]
    whole = [answers for answers in whole if False not in answers]
    unknown = [next((a for a in answers if isinstance(a, Unknown)), True) for answers in whole]
    return True in unknown or next((a for a in unknown if isinstance(a, Unknown)), False)


def holds(run: Run, name: str, wanted: Any) -> bool | Unknown:
    """Whether a condition of a ledger entry's `applies` holds of a run (`parity.results.ledger.ForUser`)."""
    if name == "trainer":
        return bool({*run.trainers} & {*wanted})
    if name in LIBRARIES:
        version = installed(name)
        return version is not None and version in SpecifierSet(wanted, prereleases=True)
    if name == "uses":
        unsaid = "use_peft" in wanted and not run.models and "use_peft" not in run.args
        return bool({*run.uses} & {*wanted}) or (Unknown("no use_peft", "use_peft") if unsaid else False)
    if name == "model":
        models = [one for one in run.models if isinstance(one, str)]
        names, words = ([re.sub(r"[^a-z0-9/]", "", str(one).lower()) for one in of] for of in (models, wanted))
        if any(word in one for word in words for one in names):
            return True
        none = Unknown("no model_name_or_path", MODELS[-1])
        return next((one for one in run.models if isinstance(one, Unknown)), not names and none)
    if name == "liger":
        both = [_within(one, run.value(one), True) for one in ("use_liger_kernel", "use_liger_loss")]
        return True in both or next((one for one in both if isinstance(one, Unknown)), False)
    return _within(name, run.value(name), wanted)


def _within(name: str, value: Any, wanted: Any) -> bool | Unknown:
    value = getattr(value, "value", value)  # of an enumeration
    if value is None or isinstance(value, Unknown):
        return value or False
    if isinstance(wanted, list | str):
        wanted = [wanted] if isinstance(wanted, str) else wanted
        return any(one in wanted for one in (value if isinstance(value, list | tuple) else [value]))
    if isinstance(value, str):  # words, as transformers' parser takes them
        value = {"yes": True, "true": True, "no": False, "false": False}.get(value.lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return Unknown(f"{name} is {short(repr(value))}")
    return ledger.holds(number, wanted)


def _fields(trainer: str) -> Mapping[str, Any]:
    """The settings of a trainer's config class with their defaults; none where it is not installed."""
    return _fields_of(trl.config_name(trainer))


def _fields_of(config: str) -> Mapping[str, Any]:
    try:
        return trl.fields(trl.class_named(config))
    except Unsupported:
        return {}


def settings_of(path: Path) -> dict[str, Any]:
    """The settings in a file, as `trl grpo --config` takes them or `args.to_json_string()` gives them. Raises
    UsageError for a file that cannot be read, or holds something else."""
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


def run_of(path: Path, asked: str | None, ledger: Ledger) -> Run:
    """The run whose settings are in a file. Its trainer, one of the ledger's entries, is the one asked for, else its own
    `trainer`, else the one whose config knows most of the settings; of those that tie the base, or the one that the name of the
    file has in it. Raises UsageError for an unknown trainer, and for a file that cannot be read or leaves the trainer open."""
    known = sorted({name for e in ledger.entries for table in e.user.applies for name in table.get("trainer", ())})
    if asked not in (None, *known):
        raise UsageError(f"trainer {asked!r} is unknown, {meant(str(asked), known)}")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    args = settings_of(path)
    if (given := args.get("trainer")) in known:
        asked = asked or str(given)
        del args["trainer"]
    # each config extends that of transformers' own trainer, which is asked for by name
    counts = {
        trainer: len(args.keys() & _fields(trainer).keys())
        for trainer in known
        if not asked and trainer != trl.TRANSFORMERS
    }
    likely = [asked] if asked else [t for t, n in counts.items() if n == max(counts.values()) > 0]
    if len(likely) > 1:
        likely = [
            t for t in likely if not any(t != o and issubclass(trl.config_of(t), trl.config_of(o)) for o in likely)
        ]
    named = [t for t in likely if t.removesuffix("Trainer").lower() in re.split(r"[^a-z]+", path.stem.lower())]
    likely = named if len(named) == 1 else likely
    if len(likely) != 1:
        fits = f"fit {', '.join(likely)}" if likely else "are none of a trainer that a finding is of"
        raise UsageError(f"{path}: its settings {fits}; say which runs it (--trainer GRPOTrainer)")
    models = tuple(_model(str(args[k])) for k in MODELS if args.get(k))
    own, others = _fields(likely[0]), {name for kind in SCRIPT for name in _fields_of(kind)}
    odd = args.keys() - {*own, *others, *COMMAND, *MODELS, *ALIASES.values()} if own else ()
    unread = tuple(sorted(name for name in odd if not name.startswith("_")))
    return Run(str(path), tuple(likely), args, models, frozenset(k for k, v in args.items() if v is True), unread)


def _model(name: str) -> str | Unknown:
    """A model's name, with the architecture where it is a folder."""
    folder = Path(name)
    try:
        if not (folder.is_absolute() or name.startswith(".") or folder.is_dir()):
            return name
        return f"{name} {json.loads((folder / 'config.json').read_text())['model_type']}"
    except (OSError, ValueError, LookupError, TypeError):
        return Unknown(f"{short(name)} has no readable config.json")
