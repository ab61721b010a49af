"""The contract of an engine's log-probs: each line of it is asked of the engine, and judged by the definition."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from parity.case.case import hashes
from parity.recording import Recording
from parity.rollouts.judge import Verdict, judge, trainer_of
from parity.rollouts.server import Request, Sampled

LINES = {
    "processed": "log-probs are those of the distribution that was sampled from",
    "drawn": "tokens are as likely as ones drawn from it",
    "raw": "raw log-probs are at temperature 1 over the whole vocabulary",
    "temperature": "the temperature is in them",
    "top-p": "top-p is in them",
    "top-k": "top-k is in them",
    "place": "each belongs to the token at its place",
    "missing": "each sampled token has one, and none is filled in",
    "order": "prompts in another order get their own",
    "batch size": "a prompt alone gets those of its definition too",
    "prefix cache": "prompts that the engine has seen get them too",
    "push": "all weights that TRL pushes arrive",
}
"""Line -> what it promises; the last is asked by `push`, three by `questions`, the others by any recording that can show them."""
SHARED = 64
"""Tokens that all prompts begin with when the cache is asked: whole blocks of it."""
BLAMED = dict.fromkeys(("token before", "token after", "likeliest"), "place")
BLAMED |= {"filled": "missing", "temperature": "temperature"}
"""Words of an explanation -> the line that it breaks."""


def questions(base: Request, sample: Callable[[Request], Sampled]) -> Iterator[tuple[str, Request, Sampled]]:
    """(line, request, answer) of what one request alone cannot show: top-k, another order, each prompt alone, a second time."""
    narrow = dataclasses.replace(base, temperature=1.0, top_p=1.0, top_k=5)
    yield "top-k", narrow, sample(narrow)
    turned = dataclasses.replace(base, prompts=base.prompts[::-1])
    yield "order", turned, sample(turned)
    each = [sample(dataclasses.replace(base, prompts=[p], seed=base.seed + i)) for i, p in enumerate(base.prompts)]
    raw = [a.raw[0] for a in each if a.raw is not None]
    parts = [a.completions[0] for a in each], [a.logps[0] for a in each]
    yield "batch size", base, Sampled(*parts, raw if len(raw) == len(each) else None, each[0].facts)
    shared = (hashes(base.seed, "shared", (SHARED,)) % 50 + 3).astype(int).tolist()
    again = dataclasses.replace(base, prompts=[shared + p for p in base.prompts])
    sample(again)
    yield "prefix cache", again, sample(again)


def lines_of(recording: Recording) -> list[str]:
    """The lines that a recording can show, what it was asked for first."""
    f = recording.facts
    shown = {"raw": recording.raw_logps is not None, "temperature": f["temperature"] != 1, "top-p": f["top_p"] < 1}
    shown |= {"top-k": f["top_k"] > 0, "prefix cache": f.get("asked") == "prefix cache" and f.get("cached_tokens") != 0}
    shown |= {name: f.get("asked") == name for name in ("order", "batch size")} | {"push": "pushed_by" in f}
    return [name for name in LINES if shown.get(name, True)]


def held(recording: Recording, model: str | None, adapter: Path | None, support: str) -> tuple[Verdict, dict[str, str]]:
    """The verdict of a recording against its `trainer_of`, under a definition of `DEFINITIONS`, and what is `broken` in it."""
    trainer, raw = trainer_of(recording, model, adapter), None
    verdict = judge(recording, trainer, support)
    if recording.raw_logps is not None:
        whole = {**recording.facts, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        told = dataclasses.replace(recording, facts=whole, sampler_logps=recording.raw_logps)
        raw = judge(told, trainer, support, explain=False)
    return verdict, broken(recording, verdict, raw)


def broken(recording: Recording, verdict: Verdict, raw: Verdict | None) -> dict[str, str]:
    """Line -> why this recording breaks it. `raw`: the verdict of its raw log-probs as such.

    Weights that a push lost break its line alone. A disagreement that is explained breaks the line of its explanation; another
    one what the recording was asked for, else "processed".
    """
    if why := recording.facts.get("not_pushed"):
        return {"push": f"{recording.name}: {why}"}
    out = {} if raw is None or raw.agrees else {"raw": f"{recording.name}: {raw.fails_by}"}
    absent = int((~recording.sampler_logps.isfinite())[recording.mask].sum())
    if absent:
        out["missing"] = f"{recording.name}: {absent} of {int(recording.mask.sum())} tokens have none"
    if verdict.agrees and verdict.undrawn:
        out["drawn"] = f"{recording.name}: {verdict.undrawn}"
    if not verdict.agrees:
        why = verdict.explanation or verdict.fails_by
        named = [line for words, line in BLAMED.items() if words in str(verdict.explanation)][:1]
        if "is not in them" in why:
            named = named or [name for name in ("top-p", "top-k") if name in lines_of(recording)]
        out |= dict.fromkeys(named or [str(recording.facts.get("asked", "processed"))], f"{recording.name}: {why}")
    return out


def table(judged: Iterable[tuple[Recording, Mapping[str, str]]]) -> dict[str, str]:
    """Line -> "holds", what breaks it, or "not asked", of recordings with what is `broken` in each."""
    shown: dict[str, int] = {}
    faults: dict[str, list[str]] = {}
    for recording, found in judged:
        for name, why in found.items():
            faults.setdefault(name, []).append(why)
        # one that nothing explains, or with other weights, shows no other line
        blind = not found.keys().isdisjoint(("processed", "push"))
        shown |= {name: shown.get(name, 0) + 1 for name in lines_of(recording) if name == "push" or not blind}
    said = {
        n: every[0] + (f"; {len(every) - 1} more recordings" if len(every) > 1 else "") for n, every in faults.items()
    }
    return {n: said.get(n) or (f"holds ({shown[n]} recordings)" if n in shown else "not asked") for n in LINES}
