"""What a process has that all parties share, besides the bindings of modules: in parts that read it and put it back."""

from collections.abc import Iterator
from typing import Any

from parity.world import interpreter, process, tensors
from parity.world.watch import Watch

WATCHES: tuple[Watch, ...] = (tensors.MODES, *process.WATCHES, *interpreter.WATCHES, *tensors.WATCHES)
"""In the order in which they are put back."""


def differing(before: dict[str, Any]) -> Iterator[tuple[Watch, Any]]:
    """Each entry that is not as it was, with what it is now."""
    for watch in WATCHES:
        now = watch.get()
        was = before[watch.name]
        same = now is was or now == was  # a dictionary compares all of itself with itself
        if not same and watch.differences(was, now):
            yield watch, now
