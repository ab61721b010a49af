"""A run on a Ray cluster: a shard is a task of Ray, which runs it again elsewhere when its node dies."""

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import to_builtins

from parity import data
from parity.errors import UsageError
from parity.results.row import Asked, Header
from parity.running import plan, supervisor
from parity.running.plan import MEMORY, Event, Judged, Lost, Shard, ShardDone
from parity.running.shard_queue import ShardQueue
from parity.running.supervisor import Told

PATIENCE = 600.0  # seconds for which a run waits for a node with room for a worker
AGAIN = 2  # times that a shard is run again whose node or process of Ray died with it
GPU_SHARE = 1 / 16  # of a GPU for a worker, at least: each has a CUDA context of its own


class Nodes:
    """The nodes of the cluster at an address (HOST:PORT, auto, or local: one that is started here and ended with the
    run). A worker has a core, `MEMORY`, and on CUDA a share of a GPU: GPUs ÷ cores of the node that has most. Raises
    UsageError where Ray is not installed, or nothing answers at the address."""

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
        self.needs: dict[str, float] = {"num_cpus": 1, "memory": MEMORY}
        if device == "cuda":
            shares = [min(1.0, n["GPU"] / n["CPU"]) for n in self._there() if n.get("GPU") and n.get("CPU")]
            share = max([GPU_SHARE, *shares])
            self.needs["num_gpus"] = int(share * 10_000) / 10_000  # so finely Ray counts, and no worker is left over
        self.count = wanted or max(1, self._room())
        self.announcement = f"{self.count} workers on a Ray cluster of {len(self._there())} nodes"

    def run(self, settings: dict[str, Any], shards: ShardQueue, head: Header) -> Iterator[Told]:
        """Deal the shards and yield their events as `supervisor.run` does, those of a shard when it is done. Raises
        UsageError where the header of a run on a node is not this one's, or no node has room for a worker."""
        ray, run_shard = self.ray, self.ray.remote(**self.needs, max_retries=AGAIN, max_calls=0)(on_node)
        running: dict[Any, Shard] = {}
        begun = time.monotonic()
        try:
            while True:
                while len(running) < (self.wanted or max(1, self._room())) and (shard := shards.take()):
                    what = settings, head, os.getcwd(), shards.able(shard)
                    running[run_shard.options(name=shard.name).remote(*what)] = shard
                if not running:
                    return
                if self._room():
                    begun = time.monotonic()
                elif time.monotonic() > begun + PATIENCE:
                    raise UsageError(f"--ray: no node has room for a worker, which needs {self.needs}")
                for one in ray.wait(list(running), timeout=1.0)[0]:
                    shard, seconds = running.pop(one), None
                    try:
                        events = ray.get(one)
                    except ray.exceptions.RayTaskError as error:
                        if isinstance(error.cause, UsageError):
                            raise UsageError(f"--ray: {error.cause}") from None
                        raise
                    except ray.exceptions.RayError as error:
                        events = [Lost(f"{shard.name}: {str(error).strip().splitlines()[-1].strip()}")]
                    for event in events:
                        if isinstance(event, Judged) and event.lost:
                            shards.hold(event.row.implementation, event.lost)
                        seconds = event.seconds if isinstance(event, ShardDone) else None
                        yield shard, event
                    shards.back(shard, seconds)
        finally:
            for one in running:
                ray.cancel(one, force=True)
            if self._begun_here:
                ray.shutdown()

    def _there(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _room(self) -> int:
        """Workers for which the cluster has room."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        needs = {names.get(name, name): need for name, need in self.needs.items()}
        return sum(int(min(free.get(name, 0.0) // need for name, need in needs.items())) for free in self._there())


def on_node(settings: dict[str, Any], head: Header, folder: str, shard: Shard) -> list[Event]:
    """The events of a shard. Raises UsageError where a run on this node would have another header."""
    with contextlib.suppress(OSError):  # a node without this folder needs none, but for a user's files
        os.chdir(folder)
    asked = head.header.asked or Asked()
    own = {"ledger": asked.ledger or str(data.ledger_file()), "head": to_builtins(head)}
    watch = _watching(json.dumps(settings | own), os.environ.get("CUDA_VISIBLE_DEVICES"))
    watch.shards.left = [shard]
    events = [event for _, event in watch.follow()]
    if watch.workers[0].finished:
        watch.end()
        _watching.cache_clear()
    for event in events:
        if isinstance(event, Lost) and event.refused:
            raise UsageError(event.message)
    return events


@functools.cache
def _watching(settings: str, gpu: str | None) -> supervisor.Watch:
    """Of a process of Ray that sees this GPU: a worker, which keeps what it has imported and drawn, and its watcher."""
    told = json.loads(settings)
    told["memory"] = plan.memory(plan.CORES) if told["device"] == "cpu" else None
    return supervisor.Watch(ShardQueue([]), [told])
