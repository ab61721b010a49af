"""A team's own settings as cases: those of its config file, and its neighbours, each with one setting moved."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from parity.case.case import Case
from parity.case.inputs import Setting
from parity.errors import UsageError
from parity.families.policy_settings import CONFIG_FIELDS
from parity.registry import loss_family

SEEDS = 3
SHAPE = {"B": 3, "T": 6, "V": 33, "H": 8, "lengths": [6, 4, 1], "old": "mixed"}
LARGEST = 1 << 20
"""Bytes of a saved config."""
FACTORS = (0.5, 2.0)
"""By which a number is moved to make its neighbours."""


@dataclasses.dataclass(frozen=True)
class Team:
    """The settings of a config file that decide the policy loss, and the other fields, which do not."""

    settings: Mapping[str, Any]
    others: tuple[str, ...]


def read(path: Path) -> Team:
    """A YAML or JSON file of TRL's argument names, or the `training_args.bin` of a trainer. Nothing in it is executed.

    Raises:
        UsageError: for a file that cannot be read, is no mapping, or has no setting of the policy loss.
    """
    try:
        found = _saved(path) if zipfile.is_zipfile(path) else yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: neither YAML nor JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{path}: expected names of arguments with their values, got a {type(found).__name__}")
    settings = {name: found[name] for name in CONFIG_FIELDS if name in found}
    if not settings:
        raise UsageError(f"{path}: sets none of {', '.join(CONFIG_FIELDS)}")
    return Team(settings, tuple(sorted(found.keys() - settings.keys())))


class _Inert:
    """Stands for every object of a pickle: keeps its state, does nothing."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, *_: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    append = extend


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert


def _saved(path: Path) -> dict[str, Any]:
    """The plain values of a config that `torch.save` wrote, without importing or calling anything that it names."""
    try:
        with zipfile.ZipFile(path) as archive:
            (entry,) = (one for one in archive.infolist() if one.filename.endswith("/data.pkl"))
            if entry.file_size > LARGEST:
                raise ValueError(f"a config of {entry.file_size:,} bytes")
            reader = _Reader(io.BytesIO(archive.read(entry)))
            reader.persistent_load = _Inert  # type: ignore[method-assign]
            state = reader.load().state
            return {name: v for name, v in state.items() if v is None or isinstance(v, bool | int | float | str | list)}
    except Exception as error:  # a pickle fails in any way
        raise UsageError(f"{path}: no config that a trainer saved: {type(error).__name__}: {error}") from None


def cases(team: Team) -> Iterator[tuple[str, Case]]:
    """(label, case): the team's own settings in every dtype and with several seeds, then each neighbour once.

    Raises:
        UsageError: for a value that the policy family does not accept, naming it.
    """
    family = loss_family("policy")
    for dtype in ("fp32", "bf16"):
        for seed in range(SEEDS):
            case = family.case(seed, dtype, SHAPE | dict(team.settings))
            family.full_settings(case)
            yield "your settings", case
    for name in CONFIG_FIELDS:
        for value in _neighbours(team.settings.get(name, family.settings[name].default), family.settings[name]):
            case = family.case(0, "fp32", SHAPE | dict(team.settings) | {name: value})
            family.full_settings(case)
            yield f"{name}={value}", case


def _neighbours(value: Any, setting: Setting) -> Iterator[Any]:
    if setting.choices is not None:
        yield from (v for v in setting.choices if v != value)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value:
        yield from (type(value)(value * factor) for factor in FACTORS)
