"""What a user writes after `--with`: `PKG==VER`, a released version, or `PKG @ PATH`, a source checkout."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from parity.errors import UsageError

FORMS = "write PKG==VER (trl==0.27.2) or 'PKG @ PATH' (a source checkout)"
_RELEASE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*?)\s*==\s*([^\s=].*)")
_CHECKOUT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*?)\s*@\s*(\S.*)")


@dataclass(frozen=True)
class Spec:
    """One package, at a released version or as a source checkout: exactly one of `version` and `path` is set.

    `name` is in its normalised form (liger_kernel -> liger-kernel).
    """

    name: str
    version: str | None = None
    path: Path | None = None

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" if self.path is None else f"{self.name} @ {self.path}"

    @property
    def requirement(self) -> str:
        """The line of a requirements file that asks for it; a checkout is editable, so that it is never stale."""
        return str(self) if self.path is None else f"-e {self.path.as_uri()}"


def parse(text: str | Spec) -> Spec:
    """Reads a spec; UsageError when it has neither form, the version is not one, or the path is not a project."""
    if isinstance(text, Spec):
        return text
    stripped = text.strip()
    if match := _RELEASE.fullmatch(stripped):
        name, version = match[1], match[2].strip()
        try:
            # The index's spelling matters to no one, but 0.27 and 0.27.0 must be one environment: keep what was
            # asked (the resolver knows they are equal), refuse only what is no version at all (==0.*, ==latest).
            Version(version)
        except InvalidVersion:
            raise UsageError(f"spec {text!r}: {version!r} is not a version; {FORMS}") from None
        return Spec(canonicalize_name(name), version=version)
    if match := _CHECKOUT.fullmatch(stripped):
        path = Path(match[2]).expanduser()
        if not path.is_dir():
            raise UsageError(f"spec {text!r}: there is no folder {match[2]!r}; {FORMS}")
        if not any((path / file).is_file() for file in ("pyproject.toml", "setup.py")):
            raise UsageError(f"spec {text!r}: {match[2]!r} has no pyproject.toml or setup.py; name the checkout's root")
        return Spec(canonicalize_name(match[1]), path=path.resolve())
    raise UsageError(f"spec {text!r} is neither a version nor a path; {FORMS}")


def parse_all(texts: Iterable[str | Spec]) -> tuple[Spec, ...]:
    """Reads several specs; UsageError when two name the same package differently."""
    specs: dict[str, Spec] = {}
    for text in texts:
        spec = parse(text)
        if specs.setdefault(spec.name, spec) != spec:
            raise UsageError(f"specs {str(specs[spec.name])!r} and {str(spec)!r} both name {spec.name}; keep one")
    return tuple(specs.values())


@dataclass(frozen=True)
class Checkout:
    """State of a source checkout: `revision` (None outside git), whether files differ from it, the commit's date."""

    revision: str | None
    dirty: bool
    date: datetime

    def __str__(self) -> str:
        return "no git revision" if self.revision is None else self.revision[:12] + ("+changes" if self.dirty else "")


def checkout(path: Path) -> Checkout:
    """Reads the state of the checkout at `path`; without git the date is now, so that no era is imposed on it."""
    shown = _git(path, "log", "-1", "--format=%H %cI")
    if not shown:
        return Checkout(None, False, datetime.now(UTC))
    revision, date = shown.split()
    dirty = bool(_git(path, "status", "--porcelain", "--untracked-files=no"))
    return Checkout(revision, dirty, datetime.fromisoformat(date))


def _git(path: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(path), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
