"""Environments: an isolated set of installed versions in which the same harness runs.

`Environment.of(["trl==0.27.2"])` finds or makes one; `run` executes a command in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import parity
from parity.errors import UsageError
from parity.running.child import run as run_within
from parity.versions import build
from parity.versions.client import EnvironmentUnusable, cache_root
from parity.versions.releases import parse_all
from parity.versions.resolve import PARTNERS, UNSLOTH, UNSLOTH_SETTINGS, Lock, lock

_MANIFEST = Path("parity-environment.json")
UNUSED = timedelta(days=30)  # environments that nobody used for so long are removed when another one is made
_NAMED = ("unsloth-zoo", "trl", "liger-kernel", "transformers")


@dataclass(frozen=True)
class Environment:
    """A usable environment. `versions`: distribution -> version, read from what is installed. `imports`: package ->
    None, or why it does not import there."""

    root: Path
    versions: dict[str, str]
    imports: dict[str, str | None]

    @classmethod
    def of(cls, specs: Sequence[str], hold: Sequence[str] = ()) -> Environment:
        """The environment of `specs` with partners of their era, `hold` pinned outside it; made if it is not there.
        UsageError for a spec that cannot be read, EnvironmentUnusable for one that cannot be had."""
        asked, held = parse_all(specs), parse_all(hold)
        if clash := {spec.package for spec in asked} & {spec.package for spec in held}:
            raise UsageError(f"{', '.join(sorted(clash))} is both asked for and held; keep one")
        try:
            made = _find_or_make(lock(asked, held))
        except OSError as error:
            raise EnvironmentUnusable(f"cache {cache_root()}: {error.strerror or error}; set PARITY_CACHE") from None
        for spec in (*asked, *held):
            if reason := made.imports.get(spec.package):
                raise EnvironmentUnusable(f"{spec} does not import with {made.partners}: {reason}")
        return made

    @property
    def name(self) -> str:
        """Package, version, hash of the lock."""
        return self.root.name

    @property
    def partners(self) -> str:
        """The versions that matter, on one line: torch 2.13.0+cpu, trl 0.27.2, …"""
        return ", ".join(f"{name} {self.versions[name]}" for name in ("torch", *PARTNERS) if name in self.versions)

    @property
    def described(self) -> str:
        """On one line: versions, and which partner does not import."""
        failing = [f"{name} does not import ({reason})" for name, reason in self.imports.items() if reason]
        return "; ".join([f"with {self.partners}", *failing])

    def run(
        self,
        argv: Sequence[str],
        *,
        settings: Mapping[str, str] | None = None,
        cpu_limit: float = math.inf,
        clock: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, `parity` importable and PYTHONPATH otherwise empty: `run(["python", "-m", "parity"])`.
        Its scripts come first on PATH. `settings` are added to the process environment. Nothing is checked: the caller
        reads `returncode`. `cpu_limit`: seconds of CPU time, of it and its children together; LimitExceeded beyond
        them, or after `clock` seconds, by default `child.BACKSTOP` times as many."""
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
        with self._claimed():
            return run_within(argv, cpu=cpu_limit, clock=clock, env=self._variables(settings), **how)

    def become(self, argv: Sequence[str], settings: Mapping[str, str]) -> NoReturn:
        """This process becomes the command, as `run` would run it; the environment is in use until that ends."""
        with self._claimed() as file:
            os.set_inheritable(file.fileno(), True)
            os.execvpe(argv[0], list(argv), self._variables(settings))

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[IO[str]]:
        with build.claim(self.root, shared=True) as file:
            if file is None or not (self.root / "bin" / "python").exists():
                raise EnvironmentUnusable(f"environment {self.name} was removed meanwhile; ask for it again")
            yield file

    def _variables(self, settings: Mapping[str, str] | None) -> dict[str, str]:
        variables = build.clean(os.environ)
        path = os.pathsep.join([str(self.root / "bin"), variables.get("PATH", os.defpath)])
        fixed = {"PATH": path, "VIRTUAL_ENV": str(self.root), "PYTHONPATH": str(_harness())}
        return {**variables, **_settings(self.versions), **fixed, **(settings or {})}


def environments_root() -> Path:
    return cache_root() / "envs"


def listing() -> list[Environment]:
    """The environments on this machine, by name; a half-removed or foreign folder is not one."""
    root = environments_root()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [made for folder in folders if not folder.name.startswith(".") and (made := _read(folder))]


def prune(unused: timedelta = UNUSED) -> None:
    """Removes environments unused for so long, and left-overs of killed builds; one that is in use stays, and what is
    none. Locks are kept: they are small, and with uv's cache they bring an environment back without a network."""
    root, oldest = environments_root(), time.time() - unused.total_seconds()
    for left in root.glob(f"{build.TRASH}*"):
        shutil.rmtree(left, ignore_errors=True)
    old = [made.root for made in listing() if (made.root / _MANIFEST).stat().st_mtime <= oldest]
    for folder in (*old, *root.glob(f"{build.BUILDING}*")):
        with build.claim(root / folder.name.removeprefix(build.BUILDING), wait=False) as alone:
            if alone:
                build.discard(folder)


def _find_or_make(locked: Lock) -> Environment:
    pins = locked.pins
    shown = [f"{name.removesuffix('-kernel')}-{pins[name]}" for name in _NAMED if name in pins]
    root = environments_root() / "-".join([*shown, locked.digest])
    # Shared first: others may be running in it for minutes.
    with build.claim(root, shared=True):
        made = _whole(root, locked)
    if made is None:
        prune()
        with build.claim(root):
            made = _whole(root, locked)
            if made is None:
                build.build(root, locked, _settings(pins), _MANIFEST)
                made = _read(root)
    if made is None:
        raise EnvironmentUnusable(f"environment {root.name} vanished while it was made; try again")
    os.utime(root / _MANIFEST)
    return made


def _whole(root: Path, locked: Lock) -> Environment | None:
    """The environment at `root`, where it has its Python and every package of the lock; a linked one may have gone."""
    made = _read(root) if (root / "bin" / "python").exists() else None
    whole = made and made.versions.items() >= locked.pins.items() and made.versions.keys() >= {*locked.linked}
    return made if whole else None


def _settings(names: Iterable[str]) -> dict[str, str]:
    return UNSLOTH_SETTINGS if UNSLOTH in names else {}


def _read(root: Path) -> Environment | None:
    try:
        manifest = json.loads((root / _MANIFEST).read_text())
        return Environment(root, build.installed(root), manifest["imports"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _harness() -> Path:
    """A folder that offers `parity` and nothing else that could be imported instead of the environment's packages."""
    package = Path(parity.__file__).resolve().parent
    if not any(package.parent.glob("*.dist-info")):
        return package.parent
    # Installed among others: show it alone, with the metadata that names its plugin and its version.
    names = importlib.metadata.packages_distributions().get(package.name, [])
    shown = cache_root() / "harness" / hashlib.sha256(str(package).encode()).hexdigest()[:12]
    shown.mkdir(parents=True, exist_ok=True)
    files = [file for name in names for file in importlib.metadata.distribution(name).files or ()]
    for target in (package, *(Path(str(file.locate())).parent for file in files if file.name == "METADATA")):
        link = shown / target.name
        if not link.is_symlink():
            with contextlib.suppress(FileExistsError):
                link.symlink_to(target)
    return shown
