"""A worker process, in which implementations run, for one may hang or take the process down: reads a plan, then a shard a
line from its standard input, and tells events (`parity.running.plan`)."""

import contextlib
import ctypes
import faulthandler
import json
import os
import platform
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from parity.decoding import decode
from parity.process import prepare, tell, under_watch
from parity.running import gpu


def main(descriptor: str) -> None:
    """Run shards until there are no more; the plan stands in a file that is open already. Nothing that an implementation leaves
    behind, a thread or an exit handler, runs on behind the last of them."""
    code = 1
    try:
        with open(int(descriptor), "r+b") as file:
            file.seek(0)
            code = _run(json.load(file), file)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(plan: Mapping[str, Any], file: BinaryIO) -> int:
    under_watch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(gpu.WHERE)
    faulthandler.enable(all_threads=False)
    shards = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    pid = os.getpid()
    prepare(plan["device"])
    limit_memory(plan.get("memory"))
    keep_memory()

    from parity.case.case import Frozen
    from parity.case.profiles import PROFILES
    from parity.protocol import faults
    from parity.registry import resolved, select
    from parity.results.ledger import Ledger
    from parity.running.plan import Event, Lost, Shard, ShardDone, frozen_files
    from parity.running.plan import Retired as RetiredEvent
    from parity.running.shard import Retired, Session

    for name in plan.get("families", ()):
        resolved(name)
    if wrong := refusal(plan):
        tell(**msgspec.to_builtins(Lost(wrong, refused=True)))
        return 0
    known = select(plan["implementations"])

    def emit(event: Event) -> None:
        if os.getpid() != pid:
            os._exit(0)
        tell(**msgspec.to_builtins(event))

    ledger = Ledger.known(Path(plan["ledger"]))
    files = frozen_files(ledger)
    session = Session(
        implementations=known,
        profile_name=plan["profile"],
        profile=PROFILES[plan["profile"]],
        dtypes=plan["dtypes"],
        device=plan["device"],
        ledger=ledger,
        emit=emit,
        deadline=plan.get("deadline"),
        frozen={name: Frozen.load(files[name]) for name in plan["frozen"]},
        measuring=plan.get("measuring", False),
    )
    faults.keep_place(file)
    file.close()
    for line in shards:
        shard: Shard = decode(Shard, line, "a shard")
        session.implementations = [i for i in known if i.id not in shard.exclude]
        begun = time.process_time()
        try:
            came = session.run(shard)
        except Retired:
            if faults.lost() and not faults.blocking():  # once more in a process that knows the line
                print(faults.lost(), file=sys.stderr)
                return 1
            emit(RetiredEvent())
            return 0
        emit(ShardDone(came, round(time.process_time() - begun, 3)))
    return 0


def refusal(plan: Mapping[str, Any]) -> str:
    """What forbids a worker on a node of a cluster to take part in the run; "" where nothing does."""
    if "head" not in plan:
        return ""
    from parity.results.row import Asked, Header
    from parity.running.plan import Options
    from parity.running.provenance import header
    from parity.running.state import differs

    head = decode(Header, json.dumps(plan["head"]), "the run's header")
    about, asked = head.header, head.header.asked or Asked()
    there = header("", plan["device"], plan["profile"], about.seed or 0)
    there.header.asked = msgspec.structs.replace(asked, files=Options.of(asked).asked().files)
    return differs(head, there, f"node {platform.node()}")


def limit_memory(limit: int | None) -> None:
    """Hold this process's own memory to `limit` bytes, so that an allocation fails and the machine does not."""
    if limit:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(ValueError, OSError):  # a limit below what is used or above the hard one
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def keep_memory() -> None:
    """Let the C library reuse what is freed (Linux's, up to 256 MiB): given back, every page comes anew and zeroed."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 64 << 20)
        library.mallopt(trim_threshold, 256 << 20)
