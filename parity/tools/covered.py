"""What a run judged: each implementation with each setting, each trainer with each config field and logged key.

A trainer's rows say which fields its case moved and which keys it logged (`features`); the fields that TRL's configs add to
transformers' are asked of the installed TRL, so that one which no case moves is seen too.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from parity.errors import UsageError
from parity.registry import family
from parity.results.row import Row
from parity.trainers import catalogue
from parity.trainers.specs import TRAINERS
from parity.upstream.trl_configs import own_fields

_SAMPLING = "use_vllm use_transformers_ transformers_ top_k top_p min_p repetition_penalty generation_kwargs"
EXCUSED = {
    **dict.fromkeys(("vllm_", *_SAMPLING.split()), "how completions are sampled: stored ones are trained on"),
    **dict.fromkeys(("log_", "num_completions_to_print", "step_time"), "reporting"),
    "train_": "transformers' own",
    "eval_": "transformers' own",
    "model_init_": "how a model is loaded",
    "dataset_": "how a dataset is read",
    "trust_remote_code": "how a model is loaded",
}
"""Start of a field or key -> why nothing judges it."""
OWN = ("epoch", "step", "learning_rate", "grad_norm", "total_flos", "loss")
"""Keys that transformers logs for every trainer."""


@dataclasses.dataclass(frozen=True)
class Covered:
    """How many cases judged a setting, field or key, how many declined it, and why none did."""

    of: str
    kind: str
    name: str
    judged: int
    declined: int
    why: str = ""

    @property
    def missing(self) -> bool:
        """Whether it was never judged, and nothing excuses that."""
        return not self.judged and self.why not in EXCUSED.values()


@dataclasses.dataclass
class _Count:
    judged: set[str] = dataclasses.field(default_factory=set)
    declined: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def covered(rows: Iterable[Row]) -> list[Covered]:
    """Counts of cases from the rows of a run; never judged and not excused first, then excused, then the least judged."""
    cases: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.settings and "[" not in row.case:
            cases[row.implementation, row.case].append(row)
    counts: dict[tuple[str, str, str], _Count] = collections.defaultdict(_Count)
    for of, kind, name in {one for found in cases.values() for one in _universe(found[0])}:
        counts[of, kind, name]  # even if no case judges it
    for (_, case), found in cases.items():
        for of, kind, name, judges in _met(found):
            count = counts[of, kind, name]
            if judges:
                count.judged.add(case)
            else:
                count.declined[found[0].message] += 1
    return sorted(
        (_told(*key, count) for key, count in counts.items()),
        key=lambda c: (c.judged, not c.missing, c.of, c.kind, c.name),
    )


def _universe(row: Row) -> Iterator[tuple[str, str, str]]:
    """Everything that there is to be judged of a row's implementation or trainer: the fields that TRL's config adds."""
    if catalogue.is_trainer(row.family):
        config = f"{TRAINERS[row.family].removesuffix('Trainer')}Config"
        return ((row.family, "config", name) for name in own_fields(config))
    return ((row.implementation, "setting", name) for name in _settings(row.family))


def _settings(name: str) -> list[str]:
    """The settings of a family of losses; its sizes are in every case."""
    return [n for n in family(name).settings if n not in family(name).shapes]


def _met(found: Sequence[Row]) -> Iterator[tuple[str, str, str, bool]]:
    """(whose, kind, name, whether the case judged it)."""
    of, implementation, features = found[0].family, found[0].implementation, found[0].features
    judged = {row.quantity for row in found if row.judged}
    if not catalogue.is_trainer(of):
        known = _settings(of)
        yield from ((implementation, "setting", n, bool(judged)) for n in found[0].settings if n in known)
        return
    yield from ((of, "config", name, bool(judged)) for name in features.get("config", ()))
    yield from ((of, "logged", name, name in judged) for name in features.get("logged", ()) if name not in OWN)


def _told(of: str, kind: str, name: str, count: _Count) -> Covered:
    why = ""
    if not count.judged:
        why = next((text for start, text in EXCUSED.items() if name.startswith(start)), "")
        if kind == "logged":
            why = why or "no check has a definition of it"
        why = why or max(count.declined, key=count.declined.__getitem__, default="") or "no case of this run moves it"
    return Covered(of, kind, name, len(count.judged), count.declined.total(), why)


def of_file(path: str) -> list[Covered]:
    """The same of a results file.

    Raises:
        UsageError: for a file without rows, besides what reading it raises.
    """
    from parity.results.report.rows import read

    found = covered(read(path)[1])
    if not found:
        raise UsageError(f"{path}: no rows of any case")
    return found
