"""Environments: an isolated set of installed versions in which the same harness runs.

`Environment.of(["trl==0.27.2"])` finds or makes one; `run` executes a command in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
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
from parity.running.cpu_limit import run as run_within
from parity.versions import build
from parity.versions.client import EnvironmentUnusable, cache_root
from parity.versions.resolve import PARTNERS, RECIPES, Lock, lock
from parity.versions.spec import Spec, parse_all

_MANIFEST = Path("parity-environment.json")
_NAMED = ("unsloth-zoo", "trl", "liger-kernel", "transformers")


@dataclass(frozen=True)
class Environment:
    """A usable environment. `versions`: distribution -> version, read from what is installed.

    `imports`: package -> None, or why it does not import there; `before`: nothing newer was considered (ISO 8601,
    None: no limit); `torch`: "index", or "linked" where the running torch is shown in it; `checkouts`: revision of
    each source checkout.
    """

    root: Path
    versions: dict[str, str]
    imports: dict[str, str | None]
    before: str | None
    torch: str
    checkouts: dict[str, str]

    @classmethod
    def of(cls, specs: Sequence[str | Spec], hold: Sequence[str | Spec] = ()) -> Environment:
        """The environment of `specs` with partners of their era, `hold` pinned outside it; made if it is not there.

        UsageError for a spec that cannot be read, EnvironmentUnusable for one that cannot be resolved, made or imported.
        """
        asked, held = parse_all(specs), parse_all(hold)
        if clash := {spec.name for spec in asked} & {spec.name for spec in held}:
            raise UsageError(f"{', '.join(sorted(clash))} is both asked for and held; keep one")
        try:
            made = _find_or_make(lock(asked, held))
        except OSError as error:
            raise EnvironmentUnusable(f"cache {cache_root()}: {error.strerror or error}; set PARITY_CACHE") from None
        for spec in (*asked, *held):
            if spec.name not in made.versions:
                raise EnvironmentUnusable(
                    f"{spec}: no package named {spec.name} was installed by it; use the project's own name"
                )
            if reason := made.imports.get(spec.name):
                raise EnvironmentUnusable(f"{spec} does not import with {made.partners}: {reason}")
        return made

    @property
    def name(self) -> str:
        """The name that `parity env` shows: package, version, hash of the lock."""
        return self.root.name

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def partners(self) -> str:
        """The versions that matter, on one line: torch 2.13.0+cpu, trl 0.27.2, …"""
        return ", ".join(f"{name} {self.versions[name]}" for name in ("torch", *PARTNERS) if name in self.versions)

    def run(
        self,
        argv: Sequence[str],
        *,
        settings: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        capture: bool = False,
        stdin: str | None = None,
        cpu_limit: float | None = None,
        clock: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, `parity` importable and PYTHONPATH otherwise empty: `run(["python", "-m", "parity"])`.

        Its scripts come first on PATH. `settings` are added to the process environment, `stdin` is what it reads.
        Nothing is checked: the caller reads `returncode`. `cpu_limit`: seconds of CPU time, of it and its children
        together; LimitExceeded beyond them, or after `clock` seconds, by default `cpu_limit.BACKSTOP` times as many.
        """
        how: dict[str, Any] = {"env": self._variables(settings), "cwd": cwd, "errors": "replace"}
        with self._claimed():
            if cpu_limit is None:
                return subprocess.run(list(argv), capture_output=capture, input=stdin, text=True, check=False, **how)
            pipe = subprocess.PIPE if capture else None
            return run_within(argv, cpu=cpu_limit, clock=clock, stdin=stdin, stdout=pipe, stderr=pipe, **how)

    def become(self, argv: Sequence[str], settings: Mapping[str, str]) -> NoReturn:
        """This process becomes the command, as `run` would run it; the environment is in use until that ends."""
        with self._claimed() as file:
            os.set_inheritable(file.fileno(), True)
            os.execvpe(argv[0], list(argv), self._variables(settings))

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[IO[str]]:
        with build.claim(self.root, shared=True) as file:
            if file is None or not self.python.exists():
                raise EnvironmentUnusable(f"environment {self.name} was removed meanwhile; ask for it again")
            yield file

    def _variables(self, settings: Mapping[str, str] | None) -> dict[str, str]:
        variables = build.clean(os.environ)
        path = os.pathsep.join([str(self.root / "bin"), variables.get("PATH", os.defpath)])
        fixed = {"PATH": path, "VIRTUAL_ENV": str(self.root), "PYTHONPATH": str(_harness())}
        return {**variables, **_settings(self.versions), **fixed, **(settings or {})}


def environments_root() -> Path:
    """The folder that holds the environments."""
    return cache_root() / "envs"


def listing() -> list[Environment]:
    """The environments on this machine, by name; a half-removed or foreign folder is not one."""
    root = environments_root()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [made for folder in folders if not folder.name.startswith(".") and (made := _read(folder))]


def show(name: str) -> Environment:
    """The one environment whose name begins with `name`; EnvironmentUnusable naming the choices otherwise."""
    every = listing()
    found = [one for one in every if one.name == name] or [one for one in every if one.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    choices = ", ".join(one.name for one in found or every) or "none is made yet"
    raise EnvironmentUnusable(f"environment {name!r}: {'several match' if found else 'none matches'}: {choices}")


def own_bytes(made: Environment) -> int:
    """Bytes that removing it would free: its files that no other environment and no cache shares."""
    total = 0
    for folder, _, files in os.walk(made.root):
        for file in files:
            status = os.lstat(os.path.join(folder, file))
            total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def prune(names: Sequence[str] = (), *, unused: timedelta | None = timedelta(days=30)) -> list[str]:
    """Removes environments and returns their names: the named ones, else those unused for `unused` (None: all).

    Left-overs of killed builds go too; one that is in use stays. Locks are kept: they are small, and with uv's cache
    they bring an environment back without a network.
    """
    chosen = [show(name) for name in names] or listing()
    newest = time.time() if names or unused is None else time.time() - unused.total_seconds()
    removed = []
    for made in chosen:
        if (made.root / _MANIFEST).stat().st_mtime > newest:
            continue
        with build.claim(made.root, wait=False) as alone:
            if alone:
                build.discard(made.root)
                removed.append(made.name)
    _sweep()
    return removed


def _find_or_make(locked: Lock) -> Environment:
    root = environments_root() / _name(locked)
    # A checkout is read where it lies, so a changed one needs its imports tried again.
    edited = any("+changes" in state or "no git" in state for state in locked.checkouts.values())
    # Shared first: others may be running in it for minutes.
    with build.claim(root, shared=True):
        made = _whole(root, locked)
    if made is None or edited:
        with build.claim(root):
            made = None if edited else _whole(root, locked)
            if made is None:
                build.build(root, locked, _settings(locked.pins), _MANIFEST)
                made = _read(root)
    if made is None:
        raise EnvironmentUnusable(f"environment {root.name} vanished while it was made; try again")
    os.utime(root / _MANIFEST)
    return made


def _whole(root: Path, locked: Lock) -> Environment | None:
    return _read(root) if root.is_dir() and build.damage(root, locked) is None else None


def _sweep() -> None:
    root = environments_root()
    for left in root.iterdir() if root.is_dir() else ():
        if left.name.startswith(build.TRASH):
            shutil.rmtree(left, ignore_errors=True)
        elif left.name.startswith(build.BUILDING) or (left.is_dir() and _read(left) is None):
            with build.claim(root / left.name.removeprefix(build.BUILDING), wait=False) as alone:
                if alone:
                    build.discard(left)


def _name(locked: Lock) -> str:
    versions = {**locked.pins, **dict.fromkeys(locked.checkouts, "checkout")}
    shown = [f"{name.removesuffix('-kernel')}-{versions[name]}" for name in _NAMED if name in versions]
    return "-".join([*shown, locked.digest])


def _settings(names: Iterable[str]) -> dict[str, str]:
    return {key: value for name in names if name in RECIPES for key, value in RECIPES[name].settings.items()}


def _read(root: Path) -> Environment | None:
    try:
        manifest = json.loads((root / _MANIFEST).read_text())
        of = manifest["lock"]
        torch = "linked" if "torch" in of["linked"] else "index"
        return Environment(root, build.installed(root), manifest["imports"], of["before"], torch, of["checkouts"])
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
    for target in (package, *(_metadata_folder(name) for name in names)):
        link = shown / target.name
        if not link.is_symlink():
            with contextlib.suppress(FileExistsError):
                link.symlink_to(target)
    return shown


def _metadata_folder(name: str) -> Path:
    files = importlib.metadata.distribution(name).files or ()
    return next(Path(str(file.locate())).parent for file in files if file.name == "METADATA")
