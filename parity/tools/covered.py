"""What a run judged: each implementation with each setting, each trainer with each config field and logged key.

A trainer's rows say which fields its case moved and which keys it logged (`features`); the fields that TRL's configs add to
transformers' are asked of the installed TRL, so that one which no case moves is seen too.
"""

import collections
from collections.abc import Iterable, Sequence

from parity.errors import UsageError
from parity.registry import family
from parity.results.json_output import CoveredOut
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


class _Count:
    """Cases with one setting, field or key: judged, declined with the reason."""

    def __init__(self) -> None:
        self.judged: set[str] = set()
        self.declined: collections.Counter[str] = collections.Counter()


def covered(rows: Iterable[Row]) -> list[CoveredOut]:
    """Counts of cases from the rows of a run; never judged and not excused first, then excused, then the least judged."""
    cases: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.settings and "[" not in row.case:
            cases[row.implementation, row.case].append(row)
    counts: dict[tuple[str, str, str], _Count] = collections.defaultdict(_Count)
    for (implementation, case), found in cases.items():
        trainer = catalogue.is_trainer(found[0].family)
        _universe(found[0].family if trainer else implementation, found[0].family, counts)
        for of, kind, name, judges in _met(implementation, found, trainer):
            count = counts[of, kind, name]
            if judges:
                count.judged.add(case)
            else:
                count.declined[found[0].message] += 1
    out = [_told(*key, count) for key, count in counts.items() if key[1]]
    return sorted(out, key=lambda c: (c.judged, not missing(c), c.of, c.kind, c.name))


def missing(one: CoveredOut) -> bool:
    """Whether something was never judged, and nothing excuses that."""
    return not one.judged and one.why not in EXCUSED.values()


def _universe(of: str, name: str, counts: dict[tuple[str, str, str], _Count]) -> None:
    """An entry for everything that there is to be judged."""
    if (of, "", "") in counts:
        return
    counts[of, "", ""] = _Count()  # seen
    kind, names = ("config", _fields(name)) if catalogue.is_trainer(name) else ("setting", _settings(name))
    for one in names:
        counts[of, kind, one] = counts.get((of, kind, one)) or _Count()


def _settings(name: str) -> list[str]:
    """The settings of a family of losses; its sizes are in every case."""
    return [n for n in family(name).settings if n not in family(name).shapes]


def _fields(trainer: str) -> tuple[str, ...]:
    """The fields that TRL's config of a trainer adds to transformers'; none where it is not installed."""
    return own_fields(f"{TRAINERS[trainer].removesuffix('Trainer')}Config")


def _met(implementation: str, found: Sequence[Row], trainer: bool) -> Iterable[tuple[str, str, str, bool]]:
    """(whose, kind, name, whether the case judged it)."""
    judged = any(row.judged for row in found)
    if not trainer:
        known = _settings(found[0].family)
        yield from ((implementation, "setting", n, judged) for n in found[0].settings if n in known)
        return
    of, features = found[0].family, found[0].features
    yield from ((of, "config", name, judged) for name in features.get("config", ()))
    quantities = {row.quantity for row in found if row.judged}
    for name in features.get("logged", ()):
        if name not in OWN:
            yield of, "logged", name, name in quantities


def _told(of: str, kind: str, name: str, count: _Count) -> CoveredOut:
    judged, declined = len(count.judged), count.declined.total()
    why = ""
    if not judged:
        why = next((text for start, text in EXCUSED.items() if name.startswith(start)), "")
        reason = "" if kind == "logged" else max(count.declined, key=count.declined.__getitem__, default="")
        why = (
            why or reason or ("no check has a definition of it" if kind == "logged" else "no case of this run moves it")
        )
    return CoveredOut(of=of, kind=kind, name=name, judged=judged, declined=declined, why=why)


def of_file(path: str) -> list[CoveredOut]:
    """The same of a results file.

    Raises:
        UsageError: for a file without rows, besides what reading it raises.
    """
    from parity.results.report.rows import read

    found = covered(read(path)[1])
    if not found:
        raise UsageError(f"{path}: no rows of any case")
    return found
