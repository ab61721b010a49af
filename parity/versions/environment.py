"""Environments: an isolated set of installed versions in which the same harness runs.

`Environment.of(["trl==0.27.2"])` finds or makes one; `run` executes a command in it. One is complete or absent: it is built
beside its place and renamed into it, under a lock that dies with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

from packaging.utils import canonicalize_name

import parity
from parity.decoding import save_json
from parity.errors import UsageError
from parity.running.child import run as run_within
from parity.versions.client import EnvironmentUnusable, UvFailed, cache_root, one_line, uv
from parity.versions.releases import parse_all
from parity.versions.resolve import PARTNERS, UNSLOTH, UNSLOTH_SETTINGS, Lock, lock

_MANIFEST = Path("parity-environment.json")
UNUSED = timedelta(days=30)  # environments that nobody used for so long are removed when another one is made
_NAMED = ("unsloth-zoo", "trl", "liger-kernel", "transformers")
BUILDING, TRASH = ".building-", ".trash-"
# What has to work before a package counts as usable: trl and liger_kernel import lazily, so a bare import proves
# nothing. unsloth_zoo patches the others and comes last.
PROBES = {
    "torch": "import torch",
    "transformers": "from transformers import PreTrainedModel",
    "accelerate": "import accelerate",
    "datasets": "import datasets",
    "peft": "import peft",
    "trl": "import trl; from trl import GRPOConfig, GRPOTrainer",
    "liger-kernel": "import liger_kernel",
    "cut-cross-entropy": "import cut_cross_entropy",
    "unsloth-zoo": "import unsloth_zoo.rl_replacements",
}
_PROBE = """
import json, sys
found = {}
for name, statement in json.loads(sys.argv[1]).items():
    try:
        exec(statement, {})
        found[name] = None
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(found))
"""


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
        capture: bool = False,
        cpu_limit: float = math.inf,
        clock: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, `parity` importable and PYTHONPATH otherwise empty: `run(["python", "-m", "parity"])`.
        Its scripts come first on PATH. `settings` are added to the process environment. Nothing is checked: the caller
        reads `returncode`. `cpu_limit`: seconds of CPU time, of it and its children together; LimitExceeded beyond
        them, or after `clock` seconds, by default `child.BACKSTOP` times as many."""
        pipe = subprocess.PIPE if capture else None
        how: dict[str, Any] = {"env": self._variables(settings), "errors": "replace", "stdout": pipe, "stderr": pipe}
        with self._claimed():
            return run_within(argv, cpu=cpu_limit, clock=clock, **how)

    def become(self, argv: Sequence[str], settings: Mapping[str, str]) -> NoReturn:
        """This process becomes the command, as `run` would run it; the environment is in use until that ends."""
        with self._claimed() as file:
            os.set_inheritable(file.fileno(), True)
            os.execvpe(argv[0], list(argv), self._variables(settings))

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[IO[str]]:
        with claim(self.root, shared=True) as file:
            if file is None or not (self.root / "bin" / "python").exists():
                raise EnvironmentUnusable(f"environment {self.name} was removed meanwhile; ask for it again")
            yield file

    def _variables(self, settings: Mapping[str, str] | None) -> dict[str, str]:
        variables = clean(os.environ)
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
    for left in root.glob(f"{TRASH}*"):
        shutil.rmtree(left, ignore_errors=True)
    old = [made.root for made in listing() if (made.root / _MANIFEST).stat().st_mtime <= oldest]
    for folder in (*old, *root.glob(f"{BUILDING}*")):
        with claim(root / folder.name.removeprefix(BUILDING), wait=False) as alone:
            if alone:
                discard(folder)


def _find_or_make(locked: Lock) -> Environment:
    pins = locked.pins
    shown = [f"{name.removesuffix('-kernel')}-{pins[name]}" for name in _NAMED if name in pins]
    root = environments_root() / "-".join([*shown, locked.digest])
    # Shared first: others may be running in it for minutes.
    with claim(root, shared=True):
        made = _whole(root, locked)
    if made is None:
        prune()
        with claim(root):
            made = _whole(root, locked)
            if made is None:
                _build(root, locked)
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
        return Environment(root, installed(root), manifest["imports"])
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


def site_packages(root: Path) -> Path:
    return root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


@contextlib.contextmanager
def claim(root: Path, *, shared: bool = False, wait: bool = True) -> Iterator[IO[str] | None]:
    """Holds the environment at `root`, as long as the file that it yields is open: shared while it is used, alone while
    it is built or removed. Yields None, only with wait=False, when somebody else holds it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(root.parent / f".{root.name}.claim", "a") as file:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(file, mode if wait else mode | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield file


def _build(root: Path, locked: Lock) -> None:
    """Makes the environment at `root`, replacing what is there; the caller has claimed it. Packages come from uv's own
    cache by hard link, without a network if they are all there. The manifest is written last and holds the outcome of the
    probes. EnvironmentUnusable when it cannot be made."""
    fresh = root.with_name(BUILDING + root.name)
    try:
        discard(fresh)
        uv(["venv", "--relocatable", "--python", sys.executable, str(fresh)])
        pins = fresh / "lock.txt"
        pins.write_text(locked.text)
        sync = ["pip", "sync", "--python", str(fresh / "bin" / "python"), str(pins)]
        try:
            uv(sync, offline=True)
        except UvFailed:
            uv(sync)
        _link(locked.linked, site_packages(fresh))
        save_json(fresh / _MANIFEST, {"lock": locked, "imports": probe(fresh, _settings(locked.pins))})
        discard(root)
        fresh.rename(root)
    except OSError as error:
        raise EnvironmentUnusable(f"environment {root.name} in {root.parent}: {error.strerror or error}") from None
    finally:
        discard(fresh)


def probe(root: Path, settings: Mapping[str, str]) -> dict[str, str | None]:
    """Imports what the environment is for, in it: package -> None, or the import's own error on one line."""
    present = {canonicalize_name(name) for name in installed(root)}
    wanted = {name: statement for name, statement in PROBES.items() if name in present}
    command = [str(root / "bin" / "python"), "-W", "ignore", "-c", _PROBE, json.dumps(wanted)]
    quiet = {**clean(os.environ), **settings, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # The first import is the slow one; its bytecode stays in the environment whatever the user says of his own code.
    quiet["PYTHONDONTWRITEBYTECODE"] = ""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=quiet, check=False)
    try:
        answers = json.loads(done.stdout.rstrip().rpartition("\n")[2])
        inside = f"{site_packages(root)}{os.sep}"
        return {name: error and one_line(error.replace(inside, "")) for name, error in answers.items()}
    except (ValueError, AttributeError):
        reason = one_line(done.stderr.rstrip().rpartition("\n")[2]) or f"python ended with status {done.returncode}"
        return dict.fromkeys(wanted, reason)


def clean(variables: Mapping[str, str]) -> dict[str, str]:
    """A process environment without what would let packages in from outside."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX")
    return {**{key: value for key, value in variables.items() if key not in foreign}, "PYTHONNOUSERSITE": "1"}


def installed(root: Path) -> dict[str, str]:
    """Distribution name (normalised) -> version, as importlib.metadata reads them in the environment."""
    found = importlib.metadata.distributions(path=[str(site_packages(root))])
    return {canonicalize_name(one.metadata["Name"]): one.version for one in found if one.metadata["Name"]}


def discard(root: Path) -> None:
    """Removes a folder so that no half of it can be seen in its place."""
    if not root.exists():
        return
    doomed = root.with_name(f"{TRASH}{os.getpid()}-{root.name.lstrip('.')}")
    root.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _link(names: tuple[str, ...], site: Path) -> None:
    """Shows distributions of the running installation in the environment, and nothing else of it. System site-packages
    would show everything, so that a library that the era lacks appears in today's version."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        origin = Path(str(distribution.locate_file("")))
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        if not tops:
            raise EnvironmentUnusable(f"{name} {distribution.version} in {origin} lists no files; reinstall it")
        for top in sorted(tops):
            if not (site / top).exists():
                (site / top).symlink_to(origin / top)
