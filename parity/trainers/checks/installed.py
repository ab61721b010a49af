"""The trainers of the installed TRL, read from its files, and for each the checks that cover it or why none does."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from parity.case.inputs import Setting
from parity.trainers import catalogue
from parity.trainers.check import TRAINERS, CheckCall, CheckResult, check, holds, reported

UNCOVERED = {
    "RewardTrainer": "trains a classification head: no LM head, no log-probs; its loss is a pairwise logistic one",
    "TPOTrainer": "experimental; three completions a prompt",
    "A2POTrainer": "experimental; needs value estimates from several rollouts of one prompt",
    "AsyncDistillationTrainer": "experimental; needs a vLLM server and its weight transfer",
    "GOLDTrainer": "experimental; its loss is judged in family divergence (trl.gold_jsd_loss), its batching is GKD's",
    "IWOPDTrainer": "experimental; ServerDistillationTrainer's loss weighted by importance",
    "SDFTTrainer": "experimental; its loss is judged in family divergence (trl.self_distillation)",
    "SDPOTrainer": "experimental; its loss is judged in family divergence (trl.self_distillation)",
}
"""Class name -> why no trainer check drives it."""

SURVEYED = Version("1.16.0")
"""The release whose trainers `UNCOVERED` is about; a later one with a new trainer is a finding."""


def classes() -> dict[str, str]:
    """Name -> module of every public class of the installed TRL that is called a trainer, without importing any."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(next(iter(spec.submodule_search_locations)))
    out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py"), key=lambda p: ("experimental" in p.parts, p)):
        module = ".".join(("trl", *path.relative_to(root).with_suffix("").parts))
        for name in re.findall(r"^class ([A-Za-z]\w*Trainer)\(", path.read_text(), re.MULTILINE):
            out.setdefault(name, module)
    return out


def covered() -> dict[str, tuple[str, ...]]:
    """Class name -> names of the checks that drive it."""
    found: dict[str, set[str]] = {}
    for one in (c for c in catalogue.load().values() if c.run is not found_all):
        for trainer in one.trainers:
            found.setdefault(TRAINERS[trainer], set()).add(one.name)
    return {name: tuple(sorted(checks)) for name, checks in found.items()}


def described() -> Iterator[tuple[str, str]]:
    """Each trainer of the installed version with its checks, or the reason why it has none."""
    known = covered()
    for name in sorted(classes()):
        if name in known:
            yield name, ", ".join(known[name])
        else:
            yield name, f"no check: {UNCOVERED.get(name, 'nobody has looked at it')}"


@check(
    "found",
    ("sft-trainer",),
    {"package": Setting("trl", "where trainers are looked for", ("trl",))},
    lambda profile, seed: [("sft-trainer", {})] if profile != "quick" else [],
    paths=("released",),
    drives=False,
)
def found_all(call: CheckCall) -> Iterator[CheckResult]:
    """Every trainer of the installed version has a check, or a reason why it has none."""
    known, there = covered(), classes()
    new = [f"{name} ({module})" for name, module in there.items() if name not in known and name not in UNCOVERED]
    message = f"no check drives {', '.join(new)}, and no reason in parity.trainers.checks.installed says why"
    if Version(importlib.metadata.version("trl")) < SURVEYED:  # its trainers that have gone since need no reason
        yield reported("trainers", float(len(there)), message if new else "")
        return
    yield holds("trainers", not new, message, gate="exact", value=float(len(there)))
