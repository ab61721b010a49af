"""Which drawn cases a costly implementation gets, which run once more, and which have the repeated calls: by the hash of the
case's id, the same in every run."""

import dataclasses
import zlib
from collections.abc import Iterator

from parity.case.case import Case
from parity.case.family import Family
from parity.families.probes import PROBES
from parity.implementations.implementation import Implementation
from parity.registry import loss_family

SECOND_PASS = 4
"""One in so many plain float32 cases is run with tf32 products too, where there are such."""
VOCABULARIES = (128_256, 151_936, 262_144)
"""Llama 3, Qwen 2.5 and Gemma 3."""
REAL, TOKENS, HIDDEN = 20, 8, 4
"""One in so many cases of at most TOKENS tokens has such a vocabulary too, at most HIDDEN wide: half a GB of replicas."""
PEAKED = 12.0
"""Standard deviation of the logits in half of them: where a few tokens carry the gradient, a sum of a thousand blocks in 16 bits
errs by less than a percent; where all do, by several, and a wrong factor of 1.1 is within that."""


def second_pass(case: Case, device: str, long: bool = False) -> Iterator[Case]:
    """On CUDA a case once more: a share of the plain float32 ones under `torch.set_float32_matmul_precision("high")`, as
    trainers set it, and in `long` profiles a share of the small ones with a real vocabulary.

    Judged with tf32 recipes. A case of its own in results and replays; a finding of it is not minimised.
    """
    fam = loss_family(case.family)
    number = zlib.crc32(f"vocabulary/{case.id}".encode())
    if device == "cuda" and long and "V" in fam.settings and number % REAL == 0:
        s = fam.full_settings(case)
        if case.tensors is None and s.B * s.T <= TOKENS and getattr(s, "context", "plain") != "compile":
            real = {"V": VOCABULARIES[number // REAL % len(VOCABULARIES)], "H": min(s.H, HIDDEN)}
            real |= {"peak": PEAKED} if "peak" in fam.settings and number // REAL // 3 % 2 else {}
            yield dataclasses.replace(case, settings=dict(case.settings) | real)
    known = "context" in loss_family(case.family).settings
    plain = known and case.dtype == "fp32" and case.settings.get("context", "plain") == "plain"
    if device == "cuda" and plain and zlib.crc32(case.id.encode()) % SECOND_PASS == 0:
        yield dataclasses.replace(case, settings=dict(case.settings) | {"context": "tf32"})


def selected(implementation: Implementation, case: Case, cost: int, device: str) -> bool:
    """Whether a drawn case is among those that a costly implementation gets: by the case's id, the same on every run.

    Of the cases near the defaults it gets twice as many: kernels have few parameters, and refuse most of the others.
    """
    if implementation.seeks & case.settings.keys():
        return True
    if implementation.every == 1 and not implementation.interpreted:
        return True
    known = loss_family(case.family)
    every = implementation.every * cost if implementation.every > 1 else 1
    every = -(-every // 2) if _near(known, case) else every
    if implementation.interpreted:
        rows, length = known.sizes(known.full_settings(case))
        every = every + every * rows * (1 + length // 256) // 16 if device == "cpu" else 1  # every block costs
    return zlib.crc32(f"{implementation.id}/{case.id}".encode()) % every == 0


def _near(family: Family, case: Case) -> bool:
    """Whether a case moves no more than a quarter of the settings that decide what is computed (those of its probes)."""
    names = {p.setting for p in PROBES.get(family.name, ()) if not p.stays}
    s = vars(family.full_settings(case))
    return sum(s[name] != family.settings[name].default for name in names) <= len(names) // 4


def repeated(implementation: Implementation, case: Case, one_in: int) -> bool:
    """Whether an implementation gets the repeated calls on a drawn case; costly ones sixteen times as rarely.

    Not by the lowest bits, as `selected`: a CRC is linear, so those of one share decide those of the other.
    """
    one_in = one_in * 16 if implementation.every > 1 else one_in
    return (zlib.crc32(f"thorough/{implementation.id}/{case.id}".encode()) >> 8) % one_in == 0
