"""What a run judged: each implementation with each setting, each trainer with each config field and logged key.

A trainer's rows say which fields its case moved and which keys it logged (`features`); the fields that TRL's configs add to
transformers' are asked of the installed TRL, so that one which no case moves is seen too.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

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


Thing = tuple[str, str, str]
"""Whose, kind, name."""


def covered(rows: Iterable[Row]) -> list[Covered]:
    """Counts of cases from the rows of a run; never judged and not excused first, then excused, then the least judged."""
    cases: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.settings and "[" not in row.case:
            cases[row.implementation, row.case].append(row)
    said: dict[Thing, dict[str, str | None]] = collections.defaultdict(
        dict
    )  # case -> why it declined, None if it judged
    for (_, case), found in cases.items():
        there, met = _asked(found)
        for thing in there:
            said[thing]  # even if no case judges it
        for thing, judges in met.items():
            said[thing][case] = None if judges else said[thing].get(case, found[0].message)
    out = [
        _told(thing, [*answers.values()], sum(why is None for why in answers.values()))
        for thing, answers in said.items()
    ]
    return sorted(out, key=lambda c: (c.judged, not c.missing, c.of, c.kind, c.name))


def _asked(found: Sequence[Row]) -> tuple[list[Thing], dict[Thing, bool]]:
    """What is there to be judged of a case's implementation or trainer, and what the case met: whether it judged that."""
    first, judged = found[0], {row.quantity for row in found if row.judged}
    of, features = first.family, first.features
    if not catalogue.is_trainer(of):
        known = [n for n in family(of).settings if n not in family(of).shapes]
        there: list[Thing] = [(first.implementation, "setting", n) for n in known]
        return there, {thing: bool(judged) for thing in there if thing[2] in first.settings}
    met: dict[Thing, bool] = {(of, "config", n): bool(judged) for n in features.get("config", ())}
    met |= {(of, "logged", n): n in judged for n in features.get("logged", ()) if n not in OWN}
    config = f"{TRAINERS[of].removesuffix('Trainer')}Config"
    return [(of, "config", n) for n in own_fields(config)], met


def _told(thing: Thing, answers: Sequence[str | None], judged: int) -> Covered:
    _, kind, name = thing
    excuse = next((text for start, text in EXCUSED.items() if name.startswith(start)), "")
    common = collections.Counter(filter(None, answers)).most_common(1)
    none = "no check has a definition of it" if kind == "logged" else "no case of this run moves it"
    why = "" if judged else excuse or (common[0][0] if common and kind != "logged" else none)
    return Covered(*thing, judged, len(answers) - judged, why)


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
