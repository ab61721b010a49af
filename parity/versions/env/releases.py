"""Which releases a package has, and when each was uploaded, asked of the index through uv.

`uv pip compile --format pylock.toml` prints the newest release that satisfies a requirement together with the upload
time of its wheels (PEP 751): asking for `PKG`, then for `PKG<that`, and so on, lists them. 0.06 s a release.
"""

import sys
import tomllib
from dataclasses import dataclass
from datetime import datetime

from packaging.version import InvalidVersion, Version

from parity.versions.env.client import EnvironmentUnusable, UvFailed, uv
from parity.versions.env.spec import SpecError


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


def span(package: str, text: str) -> list[Release]:
    """Releases in a range written `LOW..HIGH`, oldest first; either end may be left out.

    A HIGH of two numbers names a series: 0.19..1.3 ends with the newest 1.3 release. SpecError when the text is no
    range, EnvironmentUnusable when nothing is in it.
    """
    low, dots, high = (part.strip() for part in text.partition(".."))
    try:
        numbers = [len(Version(end).release) if end else 0 for end in (low, high)]
    except InvalidVersion:
        dots = ""
    if not dots:
        raise SpecError(f"range {text!r}: write LOW..HIGH, LOW.. or ..HIGH, such as 0.19..1.3")
    limits = [f">={low}"] if low else []
    if high:
        limits.append(f"=={high}.*" if numbers[1] < 3 else f"<={high}")
    try:
        newest = _newest(package + ",".join(limits))
    except UvFailed as failure:
        raise EnvironmentUnusable(f"{package} {text}: {failure}") from None
    return _down_from(newest, low or None)


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
