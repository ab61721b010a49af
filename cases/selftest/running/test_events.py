"""Events between processes: typed, strict JSON, and a line that cannot be read is named."""

import json
import os
import sys

import msgspec
import pytest

from parity import process
from parity.running import supervisor
from parity.running.plan import At, Lost, Shard
from parity.running.shard_queue import ShardQueue


def line_of(event):
    return json.dumps(msgspec.to_builtins(event))


def test_a_number_that_is_not_finite_is_an_error_of_the_worker(monkeypatch):
    monkeypatch.setattr(process, "_told", (1, "aa", os.getpid()))
    with pytest.raises(ValueError, match="JSON compliant"):
        process.tell(value=float("nan"))


WORKER = """
import os, sys, time
sys.path.append({root!r})
from parity.process import WATCHED
channel, nonce, _ = os.environ[WATCHED].split(":")
for event in {events!r}:
    os.write(int(channel), f"{{nonce}} {{os.getpid()}} {{event}}".encode())
time.sleep({sleep})
sys.exit(7)
"""


def told(monkeypatch, events, sleep=0):
    """What the supervisor makes of a worker that writes these lines, signed, and is silent or ends."""
    program = WORKER.format(root=os.getcwd(), events=events, sleep=sleep)
    monkeypatch.setattr(supervisor, "interpreter", lambda target: [sys.executable, "-S", "-c", program])
    shard = Shard(family="logprobs", kind="drawn", count=1, of=1, seed=1)
    return [event for _, event in supervisor.run([{"device": "cpu"}], ShardQueue([shard]), 30.0, 30.0)]


def test_a_worker_that_sends_one_is_ended_at_once_and_given_up_where_it_does_so_again(monkeypatch):
    """Not after the limit of a silent worker; whoever ran is to blame, and here nobody did."""
    events = told(monkeypatch, [line_of(At(1)) + "\n", '{"event"\n', line_of(At(2)) + "\n"], sleep=600)
    assert events == [At(1), At(1), Lost("a worker's event: not readable JSON: Input data was truncated")]


def test_a_worker_that_dies_within_a_line_is_one_that_died(monkeypatch):
    events = told(monkeypatch, [line_of(At(1)) + "\n", '{"event"'])
    assert events[0] == At(1)
    assert isinstance(events[-1], Lost) and "exit code 7" in events[-1].message
