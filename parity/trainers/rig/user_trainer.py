"""A user's subclass of a TRL trainer, which every check of that trainer runs instead of TRL's class."""

from __future__ import annotations

from parity.case.inputs import Inputs
from parity.errors import UsageError
from parity.implementations import trl_trainer
from parity.implementations.implementation import Implementation, Outputs
from parity.trainers.catalogue import not_an_adapter
from parity.trainers.check import TRAINERS


def base(kind: type) -> str | None:
    """The class name of the nearest TRL trainer that `kind` extends and that has checks; None if there is none."""
    known = set(TRAINERS.values())
    return next((b.__name__ for b in kind.__mro__ if b.__module__.startswith("trl.") and b.__name__ in known), None)


def implementations(kind: type, id: str) -> list[Implementation]:
    """The trainer's checks on `kind`, FILE.py:NAME; family `policy` too where its loss is GRPOTrainer's.

    Raises:
        UsageError: where `kind` extends no trainer that has checks.
    """
    extended = base(kind)
    if extended is None:
        raise UsageError(
            f"implementation {id!r}: a class must extend one of TRL's trainers {', '.join(TRAINERS.values())}"
        )
    family = next(f for f, name in TRAINERS.items() if name == extended)
    checks = Implementation(
        id=id,
        family=family,
        role="candidate",
        call=not_an_adapter,
        library="trl",
        dtypes=frozenset({"fp32"}),
        user_class=id,
        extends=f"{family}.released",
    )
    return [checks, _loss(kind, id)] if extended == "GRPOTrainer" else [checks]


def _loss(kind: type, id: str) -> Implementation:
    def compute_loss(x: Inputs) -> Outputs:
        return trl_trainer.outputs(x, kind=kind)

    return Implementation(
        id=id,
        family="policy",
        role="candidate",
        call=compute_loss,
        recipe=getattr(kind, "recipe", trl_trainer._recipe),
        library="trl",
        outputs=trl_trainer.METRIC_NAMES,
        contexts=frozenset({"plain", "autocast"}),
        extends="trl.GRPOTrainer",
        sources=(f"{kind.__module__}.{kind.__qualname__}",),
    )
