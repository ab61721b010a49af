"""What a training run is known to be: its trainers, arguments, models, and what a script imports and names."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from packaging.specifiers import SpecifierSet

from parity.errors import Unsupported
from parity.process import installed
from parity.upstream import trl

LIBRARIES = ("trl", "transformers", "liger-kernel", "cut-cross-entropy", "unsloth-zoo", "bitsandbytes", "torch")


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A value that cannot be read, and why: "args.beta is not a literal"."""

    why: str


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. `trainers` are candidates: one of them runs, unless `certain` all of them do (a class and its bases).

    `args` holds what is set; what is not has the default of the installed config class, unless the run is `open`: then
    something that cannot be read may have set it.
    """

    name: str
    trainers: tuple[str, ...] = ()
    certain: bool = True
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: tuple[str | Unknown, ...] = ()
    imports: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    open: str = ""

    def value(self, name: str) -> Any:
        """The argument, its default where it is not set, `Unknown` where neither can be told."""
        if name in self.args:
            return self.args[name]
        if self.open:
            return Unknown(self.open)
        for trainer in self.trainers:
            try:
                known = trl.fields(trl.class_named(trainer.removesuffix("Trainer") + "Config"))
            except Unsupported:
                continue
            if name in known:
                return known[name]
        return None  # a setting that this trainer has not


def holds(run: Run, name: str, wanted: Any) -> bool | Unknown:
    """Whether a condition of a ledger entry's `applies` holds of a run (`parity.results.user.ForUser`)."""
    if name == "trainer":
        found = [trainer for trainer in run.trainers if trainer in wanted]
        if found and not run.certain:
            return Unknown(f"the file does not say which trainer runs; {' or '.join(run.trainers)} know its settings")
        return bool(found)
    if name == "model":
        return _model(run, wanted)
    if name in ("imports", "uses"):
        given = run.imports if name == "imports" else run.uses
        return any(word == word_given or word_given.startswith(f"{word}.") for word in wanted for word_given in given)
    if name in LIBRARIES:
        version = installed(name)
        return version is not None and version in SpecifierSet(wanted, prereleases=True)
    if name == "liger":
        values = [run.value("use_liger_kernel"), run.value("use_liger_loss")]
        unknown = next((v for v in values if isinstance(v, Unknown)), None)
        return True if any(v is True for v in values) else unknown or False
    value = run.value(name)
    return value if isinstance(value, Unknown) else _within(getattr(value, "value", value), wanted)


def _model(run: Run, wanted: Iterable[str]) -> bool | Unknown:
    names = [name.lower().replace("-", "_") for name in run.models if isinstance(name, str)]
    if any(word in name or word.replace("_", "") in name.replace("_", "") for word in wanted for name in names):
        return True
    unknown = next((name for name in run.models if isinstance(name, Unknown)), None)
    return unknown or (False if names else Unknown("no model is named"))


def _within(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        if value is None or value == wanted.get("not", ...):
            return False
        if {"min", "max"} & wanted.keys():
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            return numeric and wanted.get("min", value) <= value <= wanted.get("max", value)
        return True
    if isinstance(wanted, list):
        return any(v in wanted for v in (value if isinstance(value, list | tuple) else [value]))
    return bool(value == wanted)
