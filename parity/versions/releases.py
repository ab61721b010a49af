"""Releases: what a user writes after `--with`, and which ones a package has and when each was uploaded, asked of the index.

`uv pip compile --format pylock.toml` prints the newest release that satisfies a requirement together with the upload
time of its wheels (PEP 751): asking for `PKG`, then for `PKG<that`, and so on, lists them. 0.06 s a release.
"""

import contextlib
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from parity.errors import UsageError
from parity.versions.client import EnvironmentUnusable, UvFailed, uv

OLDEST = {"trl": Version("0.15")}
"""The first release of a package that the adapters drive."""


@dataclass(frozen=True)
class Release:
    """A released version of a package, whose name is normalised (liger_kernel -> liger-kernel). `date`: the upload of
    its wheel for this Python; None where the index gives none, or was not asked."""

    package: str
    version: str
    date: datetime | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


def parse(text: str) -> Release:
    """Reads PKG==VER; UsageError when it is none. The version stays as it was written: the resolver knows 0.27 as 0.27.0."""
    match = re.fullmatch(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*?)\s*==\s*([^\s=].*?)\s*", text)
    if not match:
        raise UsageError(f"release {text!r} cannot be read, write PKG==VER (trl==0.27.2)")
    name = canonicalize_name(match[1])
    try:
        too_old = Version(match[2]) < OLDEST.get(name, Version("0"))
    except InvalidVersion:
        raise UsageError(f"release {text!r}: {match[2]!r} is not a version; write PKG==VER (trl==0.27.2)") from None
    if too_old:
        raise UsageError(f"release {text!r} is not supported: {name} is from {OLDEST[name]} on")
    return Release(name, match[2])


def parse_all(texts: Iterable[str]) -> tuple[Release, ...]:
    """Reads several; UsageError when two name the same package differently."""
    found: dict[str, Release] = {}
    for one in map(parse, texts):
        if (other := found.setdefault(one.package, one)) != one:
            raise UsageError(f"releases {str(other)!r} and {str(one)!r} are both of {one.package}; keep one")
    return tuple(found.values())


def release(package: str, version: str) -> Release:
    """The release `package==version`; EnvironmentUnusable when the index has no such package or version."""
    try:
        return newest(f"{package}=={version}")
    except UvFailed as failure:
        reason = f"{package}=={version}: {failure}"
    with contextlib.suppress(UvFailed):
        reason += f" (the newest release is {newest(package).version})"
    raise EnvironmentUnusable(reason)


def releases(package: str, low: str, high: str) -> list[Release]:
    """Final releases from `low` to `high`, both included, oldest version first; pre-releases are left out.
    EnvironmentUnusable when the package, or an end, does not exist."""
    release(package, low)
    found = [release(package, high)]
    while Version(found[-1].version) > Version(low):
        try:
            found.append(newest(f"{package}<{found[-1].version},>={low}"))
        except UvFailed as failure:
            # uv's way of saying that the list is exhausted; a failing network must not look like a short list.
            if "No solution found" in str(failure) and "network was disabled" not in str(failure):
                break
            raise
    return found[::-1]


def newest(requirement: str) -> Release:
    """The newest release of a package, or that a requirement allows; UvFailed when the index has none."""
    arguments = ["pip", "compile", "--no-deps", "--only-binary", ":all:", "--format", "pylock.toml", "--no-header"]
    printed = uv([*arguments, "--python", sys.executable, "-"], stdin=requirement)
    package = tomllib.loads(printed)["packages"][0]
    dates = [wheel["upload-time"] for wheel in package.get("wheels", ()) if "upload-time" in wheel]
    return Release(package["name"], package["version"], min(dates, default=None))
