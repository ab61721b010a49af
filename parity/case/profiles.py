"""How much a run does: how many cases it draws, and shares of the costly parts."""

import dataclasses
import math

SHARDS, SHARDS_CUDA = 2, 16
"""Streams in which a family's cases are drawn at least: by the device, so that every machine with it draws the same cases."""
STREAM = 400
"""Cases of a stream, at most: whoever runs the end of it draws what is before."""
SHARD = 50
"""Cases of a stream that a worker runs at a time, about."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """A run's size."""

    # whether the seed is fixed, so that a green tree stays green; where it is not, a new finding counts once a fresh
    # process has shown it too
    derandomised: bool = True
    # multiplies `Implementation.every`: a larger number gives costly implementations a smaller share of cases
    cost: int = 1
    # drawn cases that an implementation gets at least, as far as there are so many that it takes; what its call refuses of its
    # draws, four at most, counts
    least: int = 64
    least_own: int = 128  # the same of a user's function
    thorough: int = 4  # one case in this many gets the repeated calls and exact relations
    shrink_seconds: float = 20.0  # time given to minimising one new finding
    findings: int = 12  # new findings that a run looks at again and minimises; further ones are reported as drawn
    # time for all of them together, on each worker: on a release that is wrong in many ways a run would otherwise spend
    # most of its time on it
    minimise_seconds: float = 60.0
    # whether frozen cases get the repeated calls and exact relations at once, not only where nothing else shows what the
    # ledger knows, and those of whole trainers run; without them the ledger entries that rest on them are not evaluated
    frozen_whole: bool = True
    frozen: bool = True  # whether frozen cases are run at all


PROFILES = {
    "demo": Profile(cost=16, least=10, least_own=10, frozen=False),
    "quick": Profile(
        cost=16, least=2, least_own=16, shrink_seconds=8.0, findings=6, minimise_seconds=16.0, frozen_whole=False
    ),
    "pr": Profile(),
    "nightly": Profile(derandomised=False, shrink_seconds=60.0, findings=40, minimise_seconds=600.0),
    "soak": Profile(derandomised=False, shrink_seconds=60.0, findings=40, minimise_seconds=600.0),
}
CASES = {"demo": 12, "quick": 60, "pr": 400, "nightly": 6000, "soak": 60000}
"""Profile -> cases of a family that it draws, over all shards."""
CASES_OF = {
    "logprobs": {"quick": 40, "pr": 700},
    "policy": {"quick": 40, "pr": 700},
    "preference": {"quick": 30, "pr": 250},
}
"""Families that draw another number."""
LIBRARIES = {"pr": 400}
"""Profile -> so many of these go to the implementations that this package has, at most; a user's function gets all. None of the
ledger's entries shows first in a later one."""


def cases_drawn(family: str, profile: str) -> int:
    return (CASES | CASES_OF.get(family, {}))[profile]


def dealt(profile: str, counts: list[int], own: bool) -> list[int]:
    """How many cases of each stream are given to anybody: all where a user's `own` function is of the family."""
    most = math.inf if own else LIBRARIES.get(profile, math.inf)
    return [math.ceil(min(of, most / len(counts))) for of in counts]


def streams(total: int, device: str) -> list[int]:
    """How many cases each stream of a family draws."""
    parts = max(SHARDS_CUDA if device == "cuda" else SHARDS, -(-total // STREAM))
    return [total // parts + (index < total % parts) for index in range(parts)]
