"""Loss families, trainers and implementations by name. The one module that knows all three."""

import difflib
import fnmatch
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from parity.case.case import Case
from parity.case.family import Family
from parity.case.inputs import product_dtype
from parity.compare import one_case
from parity.compare.result_rows import Blame
from parity.errors import UsageError
from parity.implementations import user
from parity.implementations.implementation import REGISTRY, Implementation, origin
from parity.judging.assess import CaseOracle
from parity.protocol import process_state
from parity.results.row import Row
from parity.trainers import catalogue
from parity.trainers.catalogue import TrainerFamily, is_trainer

NAMES = ("logprobs", "policy", "divergence", "preference")
MANY = 40
"""More choices than that are not all told."""
LIBRARIES = (
    "trl trl_trainer cce pytorch liger liger_grpo trl_divergence liger_divergence liger_preference trl_preference unsloth fixes"
).split()
_ADDED: dict[str, Family] = {}


def add_family(family: Family) -> Family:
    """Make a family known that is no file of `parity/families`, one in a user's FILE.py for example. A file that is
    loaded again replaces its own family. Raises UsageError when the name belongs to another family or to a trainer."""
    known = _ADDED.get(family.name)
    elsewhere = known and inspect.getfile(known.build) != inspect.getfile(family.build)
    if family.name in NAMES or is_trainer(family.name) or elsewhere:
        raise UsageError(f"family {family.name!r} exists already: choose another name")
    _ADDED[family.name] = family
    return family


def loss_families() -> tuple[str, ...]:
    """The names of the loss families, the trainers' checks left out."""
    return (*NAMES, *_ADDED)


def resolved(name: str) -> str:
    """The name of a family that is named by itself or by FILE.py:NAME, which is then loaded and made known. Raises
    UsageError for a family or file that does not exist, and for a NAME that is no `Family`."""
    if ".py:" not in name:
        return family(name).name
    found = user.loaded(name, process_state.importing)
    if not isinstance(found, Family):
        raise UsageError(f"family {name!r} is a {type(found).__name__}, expected a parity.case.family.Family")
    return add_family(found).name


def family(name: str) -> Family | TrainerFamily:
    """The loss family or the trainer called `name`. Raises UsageError, naming what exists."""
    if is_trainer(name):
        return catalogue.family(name)
    return loss_family(name)


def loss_family(name: str) -> Family:
    """The loss family called `name`. Raises UsageError, naming the families that exist."""
    known = loss_families()
    if name in _ADDED:
        return _ADDED[name]
    if name not in known:
        every = (*known, *catalogue.TRAINERS)
        raise UsageError(f"family {name!r} is unknown, {meant(name, every)}")
    found: Family = importlib.import_module(f"parity.families.{name}").FAMILY
    return found


def load() -> dict[str, Implementation]:
    """Every implementation of the package."""
    for name in LIBRARIES:
        importlib.import_module(f"parity.implementations.{name}")
    return REGISTRY | catalogue.implementations()


def select(ids: Iterable[str]) -> list[Implementation]:
    """The implementations called for: all that are not opt-in, or those named by id, group (`liger`, `trl.GRPOTrainer.*`,
    which has `trl.GRPOTrainer` in it), pattern (`*.Fused*`), or FILE.py:NAME. An id names no other than itself. Raises
    UsageError for an id that matches nothing, naming the choices."""
    ids = list(ids)
    named = [i for i in ids if ".py:" not in i]
    added = [one for i in ids if ".py:" in i for one in from_file(i)]
    known = load()
    chosen: list[Implementation] = []
    for name in named:
        exact = [i for i in known.values() if i.id == name]
        matches = exact or [i for i in known.values() if fnmatch.fnmatchcase(i.id, name) or _below(i.id, name)]
        if not matches:
            raise UsageError(f"implementation {name!r} is unknown, {_instead(name, known)}")
        chosen += matches
    if not named:
        families = {i.family for i in added}
        chosen = [i for i in known.values() if not i.opt_in]
        chosen = [i for i in chosen if i.role == "reference" and i.family in families] if added else chosen
    return [*{(i.id, i.family): i for i in chosen + added}.values()]


def _below(id: str, name: str) -> bool:
    """Whether an id is in the group `a.b`, or `a.b.*`, to which `a.b` itself belongs."""
    group = name.removesuffix(".*")
    return id.startswith(f"{group}.") or (id == group and name != group)


def from_file(spec: str) -> list[Implementation]:
    """Load FILE.py:NAME as a candidate: of the family whose required parameters a function has; of its trainer's checks, and of
    family `policy` where it is a GRPOTrainer, if NAME is a subclass of one of TRL's trainers.

    The id is the path from the working directory, so that what a report prints can be replayed. Raises UsageError when the
    file, the name or the family cannot be found.
    """
    found, id = user.loaded(spec, process_state.importing), user.path_id(spec)
    file = str(Path(spec.rpartition(":")[0]).resolve())
    process_state.belongs(found.id if isinstance(found, Implementation) else id, file)
    if isinstance(found, Implementation):
        return [found]
    if isinstance(found, Family):
        raise UsageError(f"implementation {spec!r} is a family: name it with --family, one of its implementations here")
    if inspect.isclass(found):
        from parity.implementations import trl_trainer

        checks = catalogue.of_user(found, id)
        return [checks, trl_trainer.of_subclass(found, id)] if checks.family == "grpo-trainer" else [checks]
    return [user.from_function(found, id, [loss_family(name) for name in loss_families()])]


def _instead(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that is no implementation."""
    if name.endswith(".py"):
        return f"name what to take from the file: {name}:NAME"
    text = meant(name, known)
    return text if text.endswith("?") else f"{text}, or FILE.py:NAME"


def meant(name: str, known: Iterable[str]) -> str:
    """ "did you mean …?", or the choices where nothing is close: of more than `MANY` those that are nearest."""
    known = list(known)
    if close := difflib.get_close_matches(name, known, 1, 0.75):
        return f"did you mean {close[0]}?"
    if len(known) <= MANY:
        return f"choose from {', '.join(known)}"
    return f"choose from {len(known)}, such as {', '.join(difflib.get_close_matches(name, known, 5, 0.0))}"


def facts(case: Case) -> dict[str, Any]:
    """What a ledger scope may name of a case: its settings with their defaults, its features and `products`, the dtype that
    its products have: autocast's, or its own."""
    of = family(case.family)
    settings = of.full_settings(case)
    return vars(settings) | dict(of.features(case)) | {"products": product_dtype(case, settings)}


def run_case(
    case: Case,
    implementations: Iterable[Implementation],
    device: str = "cpu",
    thorough: bool | Callable[[Implementation], bool] = True,
    announce: Callable[[Implementation], Any] = lambda implementation: None,
    most: int | None = None,
    known: Callable[[Row], bool] = lambda row: False,
) -> Iterator[Row]:
    """Rows of a case for each implementation, the reference first: of a loss by `parity.compare.one_case`, of a
    trainer's check by `trainers.catalogue`.

    `thorough` (or what it says of an implementation) adds the repeated calls of the protocol gate and the exact relations
    to a loss; `announce` is called with each implementation before it runs, so that the supervisor knows which one to
    blame if the process dies; `most` limits the replicas of a loss, where that is enough to see again what is known. A
    check of a trainer that fails is run once more unless all that fails is `known`.
    """
    blame = Blame()
    oracle = None if is_trainer(case.family) else CaseOracle.of(loss_family(case.family), case, device, most)
    for implementation in sorted(implementations, key=lambda i: i.role != "reference"):
        if oracle is None and not catalogue.runs(case, implementation):
            continue
        if process_state.broken():  # a fresh process goes on from here: `parity.running.shard.Retired`
            return
        announce(implementation)
        if oracle is None:
            rows = catalogue.rows_of(case, implementation, device, blame.against is not None, known)
        else:
            deep = thorough if isinstance(thorough, bool) else thorough(implementation)
            rows = list(one_case.rows_of(oracle, implementation, deep))
        # behind the calls, which may import it
        file = origin(implementation.library) if implementation.library else None
        for row in map(blame.decide, rows):
            if file:
                row.imported_from = file
            yield row
