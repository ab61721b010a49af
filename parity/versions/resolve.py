"""From the specs asked for to a lock: every package of the environment, pinned.

TRL and Liger put no upper bound on transformers, so metadata alone resolves to tuples that do not import. The era
does what the metadata does not: nothing newer than the asked wheel's own date plus `GRACE` is considered. Exempt are
what was asked for, the running torch with the packages that it pins exactly, triton, and the harness's test tools.
"""

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from parity.decoding import save_json, saved
from parity.process import installed
from parity.versions.client import UvFailed, cache_root, uv
from parity.versions.releases import Release, release

GRACE = timedelta(days=14)
PARTNERS = ("trl", "liger-kernel", "transformers", "accelerate", "datasets", "peft", "cut-cross-entropy")
# Whose date is the era: what stands on the others declares the lower bounds that it needs of them, none an upper one.
LEADERS = ("unsloth-zoo", "trl", "transformers", "liger-kernel")
# TRL 0.2x to 1.x imports requests without declaring it.
UNDECLARED = ("requests",)
HARNESS = ("rich", "click", "jinja2", "safetensors", "numpy", "packaging", "psutil", "msgspec", "pyyaml", "allpairspy")
# The tools that draw and collect cases stay as they are here: the same seed draws the same cases in every environment,
# and pytest's strict configuration knows the same options.
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "pytest-benchmark")


UNSLOTH = "unsloth-zoo"
# It is installed without its dependencies, which name a GPU stack; these are the ones its losses import.
UNSLOTH_NEEDS = ("tyro",)
# It patches libraries when it is imported.
UNSLOTH_SETTINGS = {"UNSLOTH_IS_PRESENT": "1", "UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_DISABLE": "1"}


@dataclass(frozen=True)
class Lock:
    """What an environment consists of. `text`: pinned requirements, one a line; `before`: the era's end (ISO 8601).
    `linked`: distributions shown from the running installation, because no index has this build of torch."""

    text: str
    before: str | None
    linked: tuple[str, ...] = ()

    @property
    def pins(self) -> dict[str, str]:
        """Package -> version."""
        lines = (line.partition("==") for line in self.text.splitlines())
        return {canonicalize_name(name): version for name, equals, version in lines if equals}

    @property
    def digest(self) -> str:
        """Hash of everything that decides what is on disk."""
        running = [sys.implementation.cache_tag, platform.system(), platform.machine(), platform.libc_ver()[0]]
        where = [str(Path(str(importlib.metadata.distribution(name).locate_file("")))) for name in self.linked]
        return _digest([self.text, running, where, self.linked])


def lock(specs: Sequence[Release], hold: Sequence[Release] = ()) -> Lock:
    """The lock of `specs` and their partners of the era; `hold` pins partners without a say in the era. The first of
    `LEADERS` that is asked for sets the era, else the oldest release asked for. If something asked or held cannot live
    with that era, the rest moves, as little as it must, up to the newest of them. Kept on disk by request, so that a
    second call needs no index; EnvironmentUnusable says why there is none."""
    # What besides the request decides the resolution; a change of any of it is a new lock.
    rules = [GRACE.days, PARTNERS, LEADERS, UNDECLARED, HARNESS, [UNSLOTH]]
    here = [sys.version_info[:2], platform.machine(), installed("torch"), installed("triton"), _tools(), rules]
    request = [[str(spec) for spec in specs], [str(spec) for spec in hold], here]
    kept = cache_root() / "locks" / f"{_digest(request)}.json"
    known: Lock | None = saved(Lock, kept)
    if known is None:
        save_json(kept, known := _resolve(specs, hold))
    return known


def _resolve(specs: Sequence[Release], hold: Sequence[Release]) -> Lock:
    asked = {spec.package: spec for spec in (*specs, *hold)}
    dates = {name: release(name, spec.version).date for name, spec in asked.items()}
    leader = next((asked[name] for name in LEADERS for spec in specs if spec.package == name), None)
    dated = [date for spec in specs if (date := dates[spec.package]) is not None]
    start = dates[leader.package] if leader else min(dated, default=None)
    end = max((date for date in dates.values() if date), default=None)

    plain = [spec for spec in asked.values() if spec.package != UNSLOTH]
    torch, linked = ([], ()) if "torch" in asked else _running_torch()
    base = [*torch, *UNDECLARED, *HARNESS, *_tools(), *(UNSLOTH_NEEDS if UNSLOTH in asked else ())]
    base += [name for name in PARTNERS if name not in asked]
    exempt = {"torch", "triton", *_torch_pins(), *asked, *(Requirement(tool).name for tool in _tools())}

    def era(pinned: Iterable[Release], last: datetime | None, prefer: str = "") -> str:
        named = list(pinned)
        missing = [spec.package for spec in plain if spec not in named and spec.package in PARTNERS]
        lines = [*base, *missing, *map(str, named)]
        excludes = ("torch", *_torch_pins()) if linked else ()
        try:
            return _compile(lines, last, exempt, excludes=excludes, prefer=prefer)
        except UvFailed:
            if last is None:
                raise
            # The running torch may be years younger than the era, and so may the setuptools that it asks for.
            needs = {canonicalize_name(requirement.name) for requirement in _requirements("torch")}
            return _compile(lines, last, exempt | needs, excludes=excludes, prefer=prefer)

    before = start
    try:
        text = era(plain, start)
    except UvFailed:
        if start is None or end is None or end <= start:
            raise
        alone = [spec for spec in plain if spec is leader]
        before, text = end, era(plain, end, prefer=era(alone, start))
    if UNSLOTH in asked:
        text += _compile([str(asked[UNSLOTH]), "unsloth"], before, exempt, no_deps=True)
    return Lock(text, (before + GRACE).isoformat() if before else None, linked)


def _compile(
    lines: Iterable[str],
    last: datetime | None,
    exempt: Iterable[str],
    *,
    excludes: Iterable[str] = (),
    prefer: str = "",
    no_deps: bool = False,
) -> str:
    with tempfile.TemporaryDirectory() as folder:
        wanted, left_out, locked = (Path(folder) / name for name in ("wanted.in", "left-out.in", "locked.txt"))
        wanted.write_text("\n".join(lines) + "\n")
        left_out.write_text("\n".join(excludes) + "\n")
        locked.write_text(prefer)
        # Wheels alone, so that no compiler decides the outcome.
        arguments = ["pip", "compile", str(wanted), "--python", sys.executable, "--only-binary", ":all:"]
        arguments += ["--no-header", "--no-annotate", "--excludes", str(left_out), "--output-file", str(locked)]
        arguments += ["--no-deps"] if no_deps else []
        if last is not None:
            arguments += ["--exclude-newer", (last + GRACE).strftime("%Y-%m-%dT%H:%M:%SZ")]
            for name in sorted(set(exempt)):
                arguments += ["--exclude-newer-package", f"{name}=false"]
        uv(arguments)
        return locked.read_text()


def _running_torch() -> tuple[list[str], tuple[str, ...]]:
    """Requirements that bring the running build of torch, and what is to be linked instead of installed."""
    version = importlib.metadata.version("torch")
    triton = installed("triton")
    pinned = [f"torch=={version}", f"triton=={triton}" if triton else "triton"]
    try:
        uv(["pip", "compile", "--no-deps", "--only-binary", ":all:", "--python", sys.executable, "-"], stdin=pinned[0])
        return pinned, ()
    except UvFailed:
        linked = tuple(name for name in ("torch", *sorted(_torch_pins())) if installed(name))
        needed = [one for one in _requirements("torch") if canonicalize_name(one.name) not in linked]
        others = [f"{one.name}{one.specifier}" for one in needed]
        return (others if "triton" in linked else [*others, pinned[1]]), linked


@functools.cache
def _torch_pins() -> frozenset[str]:
    """Packages that the running torch pins exactly (CUDA libraries, triton): they come with it, whatever the date."""
    found: set[str] = set()
    pending = ["torch"]
    while pending:
        for requirement in _requirements(pending.pop(), every_extra=True):
            name = canonicalize_name(requirement.name)
            if re.match(r"==[^*]+$", str(requirement.specifier)) and name not in found:
                found.add(name)
                pending.append(name)
    return frozenset(found)


@functools.cache
def _tools() -> tuple[str, ...]:
    pending, found = [name for name in TOOLS if installed(name)], dict[str, str]()
    while pending:
        name = pending.pop()
        if name in found or name in HARNESS or not installed(name):
            continue
        found[name] = str(installed(name))
        pending += [canonicalize_name(requirement.name) for requirement in _requirements(name)]
    return tuple(f"{name}=={version}" for name, version in sorted(found.items()))


def _requirements(name: str, *, every_extra: bool = False) -> list[Requirement]:
    try:
        declared = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [one for one in declared if one.marker is None or every_extra or one.marker.evaluate({"extra": ""})]


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, default=list).encode()).hexdigest()[:12]
