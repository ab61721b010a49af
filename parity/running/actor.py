"""A worker on a node of a Ray cluster, with the watcher that a run on one machine has; and the header of a run on that node."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from parity import data
from parity.decoding import decode
from parity.errors import UsageError
from parity.process import tell, under_watch
from parity.results.header import Asked, Header
from parity.running import plan, resume, supervisor
from parity.running.child import Ended, call
from parity.running.deck import Deck
from parity.running.events import Event, Judged
from parity.running.plan import Options, Shard
from parity.running.provenance import header

EVERY = 0.2
"""Seconds between two answers, at least."""
STDERR = 2


class Actor:
    """A worker process and its watcher. `told`: what every worker is told; `folder`: where the run was started."""

    def __init__(self, settings: dict[str, Any], asked: dict[str, Any], folder: str, timeouts: tuple[float, float]):
        with contextlib.suppress(
            OSError
        ):  # a node that has no such folder needs none unless the run has a user's files
            os.chdir(folder)
        self.asked, self.deck, self.timeouts = asked, Deck([]), timeouts
        self.settings = settings | {
            "ledger": asked["ledger"] or str(data.ledger_file()),
            "memory": plan.memory(plan.CORES) if settings["device"] == "cpu" else None,
        }
        self._held = contextlib.ExitStack()
        self.watch = self._held.enter_context(supervisor.watching([self.settings], self.deck))

    def about(self, seed: int) -> tuple[str, dict[str, Any]]:
        """The name of this node and the header that a run would have on it; "usage": why it would have none."""
        given = json.dumps([self.asked, self.settings["device"], self.settings["profile"], seed])
        try:
            facts: dict[str, Any] = call("parity.running.actor:describe", [given], stdout=STDERR)
        except Ended as error:
            facts = {"usage": str(error)}
        return f"node {platform.node()}", facts

    def run(self, shard: Shard) -> Iterator[tuple[list[Event], list[str]]]:
        """The events of a shard, the rows of an implementation on a case never apart, and the implementations left out so far."""
        self.deck.left = [shard]
        events: list[Event] = []
        last = time.monotonic()
        for _, event in self.watch.follow(*self.timeouts):
            events.append(event)
            if not isinstance(event, Judged) and time.monotonic() > last + EVERY:
                yield events, self.watch.excluded
                events, last = [], time.monotonic()
        yield events, self.watch.excluded


def describe(text: str) -> int:
    """The other side of `Actor.about`, in a process that may load torch and use the GPU."""
    under_watch()
    raw, device, profile, seed = json.loads(text)
    asked = msgspec.convert(raw, Asked)
    ledger = None if asked.ledger is None else Path(asked.ledger)
    options = Options(families=tuple(asked.families), implementations=tuple(asked.implementations), ledger=ledger)
    try:
        there = header("", device, profile, seed)
        there.header.asked = msgspec.structs.replace(asked, files=options.asked().files)
    except UsageError as error:
        tell(answer={"usage": str(error)})
        return 0
    tell(answer=there.to_json())
    return 0


def differs(head: Header, node: str, facts: dict[str, Any]) -> str:
    """Why a node cannot take part in a run: what is another one there; "" where nothing is."""
    try:
        if "usage" in facts:
            raise UsageError(f"{node}: {facts['usage']}")
        there = decode(Header, json.dumps(facts), node)
        then, now = (header.header.asked for header in (head, there))
        assert isinstance(then, Asked) and isinstance(now, Asked)
        if list(then.files.values()) == list(now.files.values()):  # the shipped ledger's path is each node's own
            now.files = then.files
        there.header.ends = head.header.ends
        resume.same(node, there, head)
    except UsageError as error:
        return str(error)
    return ""
