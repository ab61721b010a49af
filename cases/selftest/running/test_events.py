"""Events between processes: typed, strict JSON, and a line that cannot be read is named."""

import sys

import pytest

from parity.errors import UsageError
from parity.results.row import Row
from parity.running import supervisor
from parity.running.deck import Deck
from parity.running.events import At, Checked, Confirmed, Judged, Lost, Retired, ShardDone, Started, line_of, read
from parity.running.plan import Shard

ROW = Row(case="c", family="f", implementation="i", dtype="fp32", device="cpu", verdict="agree", settings={"B": 1})
EVENTS = [
    At(3),
    Started("c", "i", {"seed": 1}),
    Judged(ROW),
    Checked("entry", None),
    Confirmed([("loss", None)]),
    ShardDone(3, 0.5),
    Retired("c", "i"),
    Lost("no answer"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_is_one_line_and_comes_back(event):
    line = line_of(event)
    assert line.count("\n") == 1 and line.endswith("\n")
    assert read(line, "w") == event


def test_a_number_that_is_not_finite_is_an_error_of_the_worker():
    with pytest.raises(ValueError, match="JSON compliant"):
        line_of(
            Judged(
                Row(
                    case="c",
                    family="f",
                    implementation="i",
                    dtype="fp32",
                    device="cpu",
                    verdict="agree",
                    value=float("nan"),
                )
            )
        )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "w: not a JSON object"),
        ('{"event": "gone"}', "w: event 'gone' is unknown"),
        ('{"number": 3}', "w: event is mandatory"),
        ('{"event": "at", "number": "3"}', "w: number must be a whole number, got '3'"),
        ('{"event": "judged", "row": {"case": 1}}', "w: row.case must be a text, got 1"),
    ],
)
def test_a_line_that_is_no_event_is_named(line, says):
    with pytest.raises(UsageError) as error:
        read(line, "w")
    assert str(error.value).startswith(says)


WORKER = """
import json, os, sys, time
nonce = json.load(open(sys.argv[1]))["nonce"]
for event in {events!r}:
    sys.stdout.write(f"{{nonce}} {{os.getpid()}} " + event)
    sys.stdout.flush()
time.sleep({sleep})
sys.exit(7)
"""


def told(monkeypatch, events, sleep=0):
    """What the supervisor makes of a worker that writes these lines, signed, and is silent or ends."""
    program = WORKER.format(events=events, sleep=sleep)
    monkeypatch.setattr(supervisor, "interpreter", lambda target: [sys.executable, "-S", "-c", program])
    shard = Shard(family="logprobs", kind="drawn", count=1, of=1, seed=1)
    return [event for _, event in supervisor.run([{"device": "cpu", "threads": 1}], Deck([shard]), 30.0, 30.0)]


def test_a_worker_that_sends_one_is_given_up(monkeypatch):
    """At once: not after the limit of a silent worker."""
    events = told(monkeypatch, [line_of(At(1)), '{"event"\n', line_of(At(2))], sleep=600)
    assert events == [At(1), Lost("a worker's event: not a JSON object: Expecting ':' delimiter at line 2, column 1")]


def test_a_worker_that_dies_within_a_line_is_one_that_died(monkeypatch):
    events = told(monkeypatch, [line_of(At(1)), '{"event"'])
    assert events[0] == At(1)
    assert isinstance(events[-1], Lost) and "exit code 7" in events[-1].message
