"""From a lock to a folder: an isolated virtual environment, complete or absent.

It is built beside its place and renamed into it, under a lock that dies with the process, so a build that was killed
or ran out of disk leaves nothing that could be taken for an environment.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from packaging.utils import canonicalize_name

from parity.decoding import save_json
from parity.versions.client import EnvironmentUnusable, UvFailed, one_line, uv
from parity.versions.resolve import Lock

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


def build(root: Path, lock: Lock, settings: Mapping[str, str], manifest: Path) -> None:
    """Makes the environment at `root`, replacing what is there; the caller has claimed it. Packages come from uv's own
    cache by hard link, without a network if they are all there. `manifest` (a file name) is written last and holds the
    outcome of the probes. EnvironmentUnusable when it cannot be made."""
    fresh = root.with_name(BUILDING + root.name)
    try:
        discard(fresh)
        uv(["venv", "--relocatable", "--python", sys.executable, str(fresh)])
        pins = fresh / "lock.txt"
        pins.write_text(lock.text)
        sync = ["pip", "sync", "--python", str(fresh / "bin" / "python"), str(pins)]
        try:
            uv(sync, offline=True)
        except UvFailed:
            uv(sync)
        _link(lock.linked, site_packages(fresh))
        save_json(fresh / manifest, {"lock": lock, "imports": probe(fresh, settings)})
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
