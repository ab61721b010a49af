"""Which releases a package has, and when each was uploaded, asked of the index through uv.

`uv pip compile --format pylock.toml` prints the newest release that satisfies a requirement together with the upload
time of its wheels (PEP 751): asking for `PKG`, then for `PKG<that`, and so on, lists them. 0.06 s a release.
"""

import sys
import tomllib
from dataclasses import dataclass
from datetime import datetime

from packaging.version import Version

from parity.versions.client import EnvironmentUnusable, UvFailed, uv


@dataclass(frozen=True)
class Release:
    """A released version with a wheel for this Python; `date`: its upload, None if the index gives none."""

    package: str
    version: str
    date: datetime | None


def release(package: str, version: str) -> Release:
    """The release `package==version`; EnvironmentUnusable when the index has no such package or version."""
    try:
        return _newest(f"{package}=={version}")
    except UvFailed as failure:
        reason = str(failure)
    if "was not found in the package registry" in reason or "not found in the cache" in reason:
        raise EnvironmentUnusable(f"{package}=={version}: {reason}")
    try:
        newest = _newest(package).version
    except UvFailed:
        raise EnvironmentUnusable(f"{package}=={version}: {reason}") from None
    raise EnvironmentUnusable(f"{package}=={version}: {reason} (the newest release is {newest})")


def releases(package: str, low: str | None = None, high: str | None = None) -> list[Release]:
    """Final releases from `low` to `high`, both included, oldest version first; pre-releases are left out.

    EnvironmentUnusable when the package, or an end that was named, does not exist.
    """
    if low is not None:
        release(package, low)
    return _down_from(release(package, high) if high is not None else newest(package), low)


def _down_from(newest: Release, low: str | None) -> list[Release]:
    found = [newest]
    floor = f",>={low}" if low is not None else ""
    while low is None or Version(found[-1].version) > Version(low):
        try:
            found.append(_newest(f"{newest.package}<{found[-1].version}{floor}"))
        except UvFailed as failure:
            # uv's way of saying that the list is exhausted; a failing network must not look like a short list.
            if "No solution found" in str(failure) and "network was disabled" not in str(failure):
                break
            raise
    return found[::-1]


def newest(package: str) -> Release:
    """The newest release; EnvironmentUnusable when the index does not have the package."""
    try:
        return _newest(package)
    except UvFailed as failure:
        raise EnvironmentUnusable(f"{package}: {failure}") from None


def _newest(requirement: str) -> Release:
    arguments = ["pip", "compile", "--no-deps", "--only-binary", ":all:", "--format", "pylock.toml", "--no-header"]
    printed = uv([*arguments, "--python", sys.executable, "-"], stdin=requirement)
    package = tomllib.loads(printed)["packages"][0]
    dates = [wheel["upload-time"] for wheel in package.get("wheels", ()) if "upload-time" in wheel]
    return Release(package["name"], package["version"], min(dates, default=None))
