"""Events between processes: typed, strict JSON, and a line that cannot be read is named."""

import json
import os
import sys

import msgspec
import pytest

from parity import process
from parity.decoding import decode
from parity.errors import UsageError
from parity.results.row import Row
from parity.running import plan, supervisor
from parity.running.plan import At, Event, Lost, Shard
from parity.running.shard_queue import ShardQueue

ROW = Row(case="c", family="f", implementation="i", dtype="fp32", device="cpu", verdict="agree", settings={"B": 1})
EVENTS = [
    At(3),
    plan.Started("c", "i", {"seed": 1}),
    plan.Judged(ROW),
    plan.Confirmed([("loss", None)]),
    plan.ShardDone(3, 0.5),
    plan.Retired("c", "i"),
    Lost("no answer"),
]


def line_of(event):
    return json.dumps(msgspec.to_builtins(event))


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_comes_back(event):
    assert decode(Event, line_of(event), "w") == event


def test_a_number_that_is_not_finite_is_an_error_of_the_worker(monkeypatch):
    monkeypatch.setattr(process, "_told", (1, "aa", os.getpid()))
    with pytest.raises(ValueError, match="JSON compliant"):
        process.tell(value=float("nan"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "w: not readable JSON"),
        ('{"event": "gone"}', "w: Invalid value 'gone' - at `$.event`"),
        ('{"number": 3}', "w: Object missing required field `event`"),
        ('{"event": "at", "number": "3"}', "w: Expected `int`, got `str` - at `$.number`"),
        ('{"event": "judged", "row": {"case": 1}}', "w: Expected `str`, got `int` - at `$.row.case`"),
    ],
)
def test_a_line_that_is_no_event_is_named(line, says):
    with pytest.raises(UsageError) as error:
        decode(Event, line, "w")
    assert str(error.value).startswith(says)


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
