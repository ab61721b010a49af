"""One night: proof of life, the long run, the other commands, what changed since the night before, one exit code.

The exit code is the gravest of its parts: 3 before 1 before 4, as for `parity run`. Everything is kept in the reports folder:
results.ndjson, night.json (the steps), issue.md, and one file of sums in history/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity import data
from parity.nightly import steps
from parity.nightly.proof import Proof, proof
from parity.nightly.steps import Step
from parity.process import prepare
from parity.results import memory, notify, trend
from parity.results.memory import Run
from parity.results.report.summary import summarise
from parity.rollouts import vllm_engine
from parity.running import run as running
from parity.running.provenance import resolve_device

SHARE_OF_RUN = 0.7
"""Share of the time that the long run may take; what it leaves goes to the other commands."""
SHARE_OF_CUDA = 0.2
"""Share of the rest that the tests of cases/cuda may take on a GPU box."""
HEARTBEAT = "heartbeat.json"
UNSLOTH = "2026.10.9"
"""Release of unsloth-zoo that a night judges, in an environment of its own: it does not install beside the newest TRL."""


@dataclasses.dataclass(frozen=True)
class Night:
    """What to do, and where. `max_time` in seconds on the clock; `others`: (name, words of `parity`, share of the rest)."""

    max_time: float = 6 * 3600.0
    profile: str = "nightly"
    seed: int | None = None
    device: str = "auto"
    families: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    ledger: Path | None = None
    reports: Path = Path("reports")
    others: tuple[tuple[str, tuple[str, ...], float], ...] = (
        ("history", ("history",), 0.4),
        ("mutants", ("mutants",), 0.3),
        ("upstream", ("upstream", "--all"), 0.1),
        ("unsloth", ("run", "--with", f"unsloth-zoo=={UNSLOTH}", "--implementation", "unsloth"), 0.2),
        *([("rollouts", ("rollouts", "live"), 0.2)] if vllm_engine.distribution() else []),
    )


def run(night: Night, say: Callable[[str], None], progress: Any) -> tuple[int, trend.Change | None]:
    """The night from proof to page; the exit code, and what changed since the run before (None: it never began)."""
    begun = time.monotonic()
    device = resolve_device(night.device)
    seed = secrets.randbits(31) if night.seed is None else night.seed
    say(f"night of {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC · seed {seed} · {device}")
    _beat(night.reports, "proof", None)
    prepare(device, threads=1)
    proofs = proof(device, seed)
    for one in proofs:
        say(str(one))
    if not all(one.holds for one in proofs):
        say("the harness does not see a planted mistake: nothing that it says tonight would mean anything")
        _keep(night.reports, proofs, [], running.NOTHING)
        return running.NOTHING, None

    past = memory.runs(night.reports / "history")
    _beat(night.reports, "run", None)
    left = night.max_time - (time.monotonic() - begun)
    options = running.Options(
        profile=night.profile,
        families=night.families,
        implementations=night.implementations,
        device=night.device,
        seed=seed,
        require=required(past, night.profile, device),
        ledger=night.ledger,
        reports=night.reports,
        max_time=SHARE_OF_RUN * left if night.others else left,
    )
    result = running.execute(options, progress)
    for reason in result.reasons:
        say(reason)

    done: list[Step] = []
    left = night.max_time - (time.monotonic() - begun)
    there = data.cases_dir() / "cuda"
    if device == "cuda" and night.others and there.is_dir():  # faults, real vocabularies, Inductor
        done.append(
            steps.run("cuda", ("-q", str(there)), night.reports / "cuda.log", SHARE_OF_CUDA * left, module="pytest")
        )
        say(f"cuda: {done[-1].verdict}, {done[-1].seconds / 60:.0f} min")
        left -= done[-1].seconds
    for name, words, share in night.others:
        _beat(night.reports, name, None)
        say(f"{name}: at most {share * left / 60:.0f} min")
        folder = ("--reports", str(night.reports / name)) if words[0] in ("run", "upstream") else ()
        done.append(steps.run(name, [*words, *folder], night.reports / f"{name}.log", share * left))
        say(f"{name}: {done[-1].verdict}, {done[-1].seconds / 60:.0f} min")

    summary = summarise(result.header, result.rows)
    code = worst([result.exit_code, *(s.exit_code for s in done if s.exit_code is not None)])
    path = memory.remember(summary, code, night.reports / "history")
    changed = trend.change(memory.read(path), past)
    if changed.missing and code in (running.AGREE, running.NEW, running.STALE):
        code = running.NOTHING
        path = memory.remember(summary, code, night.reports / "history")
        changed = trend.change(memory.read(path), past)
    (night.reports / "issue.md").write_text(notify.body(changed) + "\n".join(_shown(done)) + "\n", encoding="utf-8")
    _keep(night.reports, proofs, done, code)
    _beat(night.reports, "done", code)
    return code, changed


def worst(codes: Sequence[int]) -> int:
    """The exit code of several parts: what was not compared before what is wrong before what is stale."""
    order = (running.NOTHING, running.USAGE, running.NEW, running.STALE)
    others = [c for c in codes if c not in (*order, running.AGREE)]
    return others[0] if others else next((c for c in order if c in codes), running.AGREE)


def required(past: Sequence[Run], profile: str, device: str) -> tuple[str, ...]:
    """What the last green run of this profile and device compared, to be held to it tonight."""
    green = [r for r in past if r.green and (r.profile, r.device) == (profile, device)]
    if not green:
        return ()
    counts: dict[tuple[str, str], int] = {}
    for (implementation, _, where), cases in green[-1].compared.items():
        counts[implementation, where] = counts.get((implementation, where), 0) + cases
    return tuple(f"{i}:{d}" for (i, d), n in sorted(counts.items()) if n >= running.MINIMUM_REQUIRED)


def _beat(reports: Path, state: str, code: int | None) -> None:
    """Says that the night is alive: `parity notify --stale` reads it where a night died without a word."""
    reports.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    draft = reports / f".{HEARTBEAT}"
    draft.write_text(json.dumps({"time": now, "state": state, "exit_code": code, "pid": os.getpid()}) + "\n")
    draft.replace(reports / HEARTBEAT)


def _keep(reports: Path, proofs: Sequence[Proof], done: Sequence[Step], code: int) -> None:
    reports.mkdir(parents=True, exist_ok=True)
    told = {
        "proofs": [dataclasses.asdict(p) for p in proofs],
        "steps": [dataclasses.asdict(s) | {"verdict": s.verdict} for s in done],
        "exit_code": code,
    }
    (reports / "night.json").write_text(json.dumps(told, indent=1) + "\n")


def _shown(done: Sequence[Step]) -> list[str]:
    out = ["", "### Other commands of the night", ""] if done else []
    for step in done:
        out.append(f"- `{step.command}`: {step.verdict}, {step.seconds / 60:.0f} min")
        if step.exit_code not in (0, None):
            out += ["", "  ```", *(f"  {line}" for line in step.tail.splitlines()), "  ```", ""]
    return out
