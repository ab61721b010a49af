"""A user's own trainer, a subclass of one of TRL's: driven instead of the TRL class by every check of that trainer."""

from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.trainers.catalogue import not_an_adapter
from parity.trainers.specs import TRAINERS


def base(kind: type) -> str | None:
    """The class name of the nearest TRL trainer that `kind` extends and that has checks; None if there is none."""
    known = set(TRAINERS.values())
    return next((b.__name__ for b in kind.__mro__ if b.__module__.startswith("trl.") and b.__name__ in known), None)


def implementation(kind: type, id: str) -> Implementation:
    """The trainer's checks on `kind`, FILE.py:NAME.

    Raises:
        UsageError: where `kind` extends no trainer that has checks.
    """
    extended = base(kind)
    if extended is None:
        raise UsageError(
            f"implementation {id!r}: a class must extend one of TRL's trainers {', '.join(TRAINERS.values())}"
        )
    family = next(f for f, name in TRAINERS.items() if name == extended)
    return Implementation(
        id=id,
        family=family,
        role="candidate",
        call=not_an_adapter,
        library="trl",
        dtypes=frozenset({"fp32"}),
        user_class=kind,
        extends=f"{family}.released",
    )
