"""A run on the nodes of a Ray cluster: workers are actors, shards are calls of them; what a lost node had not told is run
elsewhere."""

import collections
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from parity.errors import UsageError
from parity.results.header import Header
from parity.running import plan, supervisor
from parity.running.actor import Actor, differs
from parity.running.deck import Deck
from parity.running.events import At, Event, Judged, Lost, ShardDone
from parity.running.plan import MEMORY, Shard
from parity.running.supervisor import Told

PATIENCE = 600.0
"""Seconds for which a run waits for a node with room for a worker."""
LOOK = 5.0
"""Seconds between two looks for more room."""
DEATHS = 3
"""Actors that may die with a shard before it is given up."""
GPU_SHARE = 1 / 16
"""Of a GPU for a worker, at least: each has a CUDA context of its own."""


@dataclass(eq=False)
class Slot:
    """An actor and the shard that it has. `waits`: for its header, or for more of the shard's events; `at` and
    `skip`: as `Shard.resume` and `Shard.skip`, of what was heard."""

    actor: Any
    waits: Any
    ready: bool = False
    shard: Shard | None = None
    seconds: float | None = None
    at: int = 0
    skip: list[tuple[str, str]] = field(default_factory=list)
    streams: list[tuple[str, int]] = field(default_factory=list)

    def deal(self, shard: Shard) -> None:
        """Give the actor a shard."""
        self.shard, self.seconds = shard, None
        self.at, self.skip = shard.resume, [*shard.skip]
        self.streams += [(shard.family, shard.index)] if shard.kind == "drawn" else []
        self.waits = self.actor.run.options(num_returns="streaming", name=shard.name).remote(shard)

    def heard(self, event: Event) -> None:
        """Keep what another actor would have to know."""
        match event:
            case Judged():
                self.skip += [(event.row.case, event.row.implementation)] if event.lost else []
            case At():
                self.at = event.number
            case ShardDone():
                self.seconds = event.seconds

    def rest(self) -> Shard:
        """What another actor has to do of the shard, and has to know."""
        assert self.shard is not None
        return replace(self.shard, resume=self.at, skip=tuple(self.skip))


class Nodes:
    """The nodes of the cluster at an address (HOST:PORT, auto, or local: one that is started here and ended with the run).

    A worker has a core, `MEMORY`, and on CUDA a share of a GPU: GPUs ÷ cores of the node that has most.

    Raises:
        UsageError: where Ray is not installed, or nothing answers at the address.
    """

    def __init__(self, address: str, device: str, wanted: int | None):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UsageError("--ray: Ray is not installed: pip install 'llm-parity[ray]'") from None
        if "://" in address:
            raise UsageError(f"--ray {address}: give HOST:PORT on a node of the cluster, or use ray job submit")
        self.ray, self.wanted, self._begun_here = ray, wanted, not ray.is_initialized()
        if self._begun_here:
            here = {"num_cpus": plan.CORES} if address == "local" else {}
            try:
                ray.init(address, log_to_driver=False, logging_level="ERROR", **here)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(f"--ray {address}: {str(error).strip().splitlines()[0]}") from None
        there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.needs: dict[str, float] = {"num_cpus": 1, "memory": MEMORY}
        if device == "cuda":
            shares = [min(1.0, n["GPU"] / n["CPU"]) for n in there if n.get("GPU") and n.get("CPU")]
            share = max([GPU_SHARE, *shares])
            self.needs["num_gpus"] = int(share * 10_000) / 10_000  # so finely Ray counts, and no worker is left over
        self.count = wanted or max(1, sum(map(self._room, there)))
        self.announcement = f"{self.count} workers on a Ray cluster of {len(there)} node{'s' if len(there) > 1 else ''}"
        self.slots: list[Slot] = []
        self._refused = ""
        self._excluded: set[str] = set()
        self._losses, self._deaths = collections.Counter[str](), collections.Counter[str]()

    def run(
        self,
        settings: dict[str, Any],
        deck: Deck,
        head: Header,
        timeouts: tuple[float, float],
        say: Callable[[str], None] = lambda line: None,
    ) -> Iterator[Told]:
        """Deal the shards and yield their events as `supervisor.run` does. A node whose header is not that of the run has none.

        Raises:
            UsageError: where that is so of every node.
        """
        ray, asked = self.ray, msgspec.to_builtins(head.header.asked)
        actors = ray.remote(Actor).options(**self.needs)

        def new() -> Slot:
            actor = actors.remote(settings, asked, os.getcwd(), timeouts)
            return Slot(actor, actor.about.remote(head.header.seed))

        looked = idle = time.monotonic()
        try:
            self.slots = [new() for _ in range(self.count)]
            while self.slots:
                for slot in self.slots:
                    if slot.ready and slot.shard is None and (shard := deck.take(slot.streams)):
                        slot.deal(replace(shard, exclude=tuple(sorted(self._excluded))))
                if any(slot.ready for slot in self.slots):
                    idle = time.monotonic()
                    if not any(slot.shard for slot in self.slots):
                        return
                if time.monotonic() > idle + PATIENCE:
                    raise UsageError(f"--ray: no node has room for a worker, which needs {self.needs}")
                if self.wanted is None and not self._refused and time.monotonic() > looked + LOOK:
                    looked, all_ready = time.monotonic(), all(slot.ready for slot in self.slots)
                    if deck.left and all_ready and self._room(ray.available_resources()):
                        self.slots.append(new())
                waits = {slot.waits: slot for slot in self.slots if slot.waits is not None}
                for one in ray.wait(list(waits), num_returns=1, timeout=1.0)[0]:
                    slot = waits[one]
                    try:
                        if slot.ready:
                            yield from self._heard(slot, *ray.get(next(one)))
                        elif refused := differs(head, *ray.get(one)):
                            say(f"{refused}: it takes no part")
                            self._drop(slot, refused)
                        else:
                            slot.ready, slot.waits = True, None
                    except StopIteration:
                        assert slot.shard is not None
                        deck.back(slot.shard, slot.seconds)
                        slot.shard = slot.waits = None
                        if slot.seconds is None:  # given up
                            self._drop(slot)
                    except ray.exceptions.RayTaskError:
                        raise
                    except ray.exceptions.RayError as error:
                        why = str(error).strip().splitlines()[-1].strip()
                        self._drop(slot, "" if slot.ready else why)
                        if slot.ready:
                            self.slots.append(new())
                        if slot.shard is not None:
                            yield from self._died(slot, deck, why, say)
            if self._refused:
                raise UsageError(f"--ray: {self._refused}")
        finally:
            for slot in self.slots:
                ray.kill(slot.actor)
            if self._begun_here:
                ray.shutdown()

    def _room(self, free: dict[str, float]) -> int:
        """Workers for which there is room."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        return int(min(free.get(names.get(name, name), 0.0) // need for name, need in self.needs.items()))

    def _heard(self, slot: Slot, events: list[Event], left_out: list[str]) -> Iterator[Told]:
        assert slot.shard is not None
        self._excluded |= {*left_out}
        for event in events:
            slot.heard(event)
            if isinstance(event, Judged) and event.lost:
                name = event.row.implementation
                self._losses[name] += 1
                self._excluded |= {name} if self._losses[name] >= supervisor.THRICE else set()
            yield slot.shard, event

    def _drop(self, slot: Slot, refused: str = "") -> None:
        self.slots.remove(slot)
        self.ray.kill(slot.actor)
        self._refused = refused or self._refused

    def _died(self, slot: Slot, deck: Deck, why: str, say: Callable[[str], None]) -> Iterator[Told]:
        """The rest of the shard of an actor that is no more goes back to the deck."""
        shard = slot.shard
        assert shard is not None
        deck.back(shard)
        self._deaths[shard.name] += 1
        if self._deaths[shard.name] >= DEATHS:
            yield shard, Lost(f"{shard.name}: {DEATHS} actors of Ray died with it: {why}")
            return
        say(f"a worker of the cluster was lost; {shard.name} goes on elsewhere")
        deck.left.insert(0, slot.rest())
