"""Calls to uv, the only client that contacts a package index.

No index is named here: uv's own configuration decides. uv does not read pip's, so the three settings without which
a machine set up for pip would behave differently (index, local wheel folder, certificates) are passed on, unless
uv's own variables already say something.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_FROM_PIP = {"index-url": "UV_DEFAULT_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}


class EnvironmentUnusable(RuntimeError):
    """An environment cannot be made, or what it holds cannot be imported; the message is one line."""


class UvFailed(EnvironmentUnusable):
    """uv ended with an error; the message is uv's own, on one line."""


def cache_root() -> Path:
    """The folder that holds environments and locks: $PARITY_CACHE, else parity/ in the user's cache folder."""
    if named := os.environ.get("PARITY_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "parity"


def uv(arguments: Sequence[str], *, stdin: str | None = None, offline: bool = False) -> str:
    """Runs uv and returns what it printed; UvFailed with its own message otherwise, EnvironmentUnusable without uv."""
    command = [binary(), "--quiet", "--color", "never", "--no-progress", *(["--offline"] if offline else [])]
    # The working folder is the cache: a pyproject.toml or uv.toml where the user stands must not change the outcome.
    done = subprocess.run(
        [*command, *arguments],
        input=stdin,
        text=True,
        errors="replace",
        capture_output=True,
        env=settings(),
        cwd=cache_root(),
        check=False,
    )
    if done.returncode:
        raise UvFailed(one_line(done.stderr) or f"uv {' '.join(arguments[:2])} ended with status {done.returncode}")
    return done.stdout


def one_line(message: str, limit: int = 600) -> str:
    """A tool's message on one line, without its labels, cut at `limit` characters."""
    lines = [re.sub(r"^(error|cause|Caused by):\s*", "", line.strip(" \t│╰─▶×")) for line in message.splitlines()]
    text = " · ".join(line for line in lines if line and not line.startswith("warning:"))
    text = text.replace(", we can conclude that your requirements are unsatisfiable", "")
    return text if len(text) <= limit else text[: limit - 1] + "…"


@functools.cache
def binary() -> str:
    """The uv of this interpreter, else the one on PATH; EnvironmentUnusable without one."""
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        if found := shutil.which("uv"):
            return found
    raise EnvironmentUnusable("uv is not installed; it makes the environments: pip install uv")


def settings() -> dict[str, str]:
    """Environment variables of a call to uv: hard links, a cache on the filesystem of `cache_root`, pip's index. That folder is
    made; EnvironmentUnusable when it cannot be."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentUnusable(f"cache folder {root}: {error.strerror}; set PARITY_CACHE to another") from None
    settings = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "UV_PYTHON")}
    for variable, value in _pip_settings().items():
        settings.setdefault(variable, value)
    settings.setdefault("UV_LINK_MODE", "hardlink")
    settings.setdefault("UV_PYTHON_DOWNLOADS", "never")
    if "UV_CACHE_DIR" not in settings:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uv"
        usual.mkdir(parents=True, exist_ok=True)
        # Hard links do not cross filesystems, and a copied environment costs gigabytes.
        if usual.stat().st_dev != root.stat().st_dev:
            settings["UV_CACHE_DIR"] = str(root / "uv")
    return settings


@functools.cache
def _pip_settings() -> dict[str, str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        match = re.fullmatch(r"([^=]+)\.([\w-]+)=(.*)", line)
        if not match or match[2] not in _FROM_PIP or match[1] not in ("global", "install", ":env:"):
            continue
        # pip separates several folders by white space, uv by commas; the environment beats the files.
        value = ",".join(str(ast.literal_eval(match[3])).split())
        if match[1] == ":env:" or _FROM_PIP[match[2]] not in found:
            found[_FROM_PIP[match[2]]] = value
    return found
