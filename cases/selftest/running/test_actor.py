"""Which nodes of a cluster take part in a run, with how many workers; without Ray."""

import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from parity.cli.commands import main
from parity.results.row import Row
from parity.running import actor
from parity.running.actor import Actor, differs
from parity.running.deck import Deck
from parity.running.events import At, Judged, ShardDone, Started
from parity.running.nodes import Nodes
from parity.running.plan import Options, Shard
from parity.running.provenance import header


@pytest.fixture
def head():
    made = header("a", "cpu", "quick", 1)
    made.header.asked, made.header.plan, made.header.ends = Options().asked(), {"a": 1}, True
    return made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"git": "0123"}, "node a: git was 0123, here it is"),
        ({"device_name": "another"}, "node a: device_name was another, here it is"),
        ({"asked": {"files": {"/elsewhere/ledger.toml": "0"}}}, "/elsewhere/ledger.toml has changed since"),
    ],
    ids=["same", "revision", "processor", "ledger"],
)
def test_a_node_takes_part_where_its_header_is_that_of_the_run(head, change, says):
    there = head.to_json()
    there["header"] = {k: v for k, v in there["header"].items() if k not in ("plan", "ends")} | change
    (digest,) = there["header"]["asked"]["files"].values()
    if not change:
        there["header"]["asked"]["files"] = {"/elsewhere/ledger.toml": digest}
    told = differs(head, "node a", there)
    assert says in told if says else not told


def test_a_node_that_cannot_say_takes_no_part(head):
    assert differs(head, "node a", {"usage": "my.py: cannot be read"}) == "node a: my.py: cannot be read"


def test_the_rows_of_an_implementation_on_a_case_are_told_together(monkeypatch):
    """A driver that has heard one of them takes the pair for done when the node dies."""
    row = Judged(
        Row(case="a", family="logprobs", implementation="i", dtype="fp32", device="cpu", settings={}, verdict="agree")
    )
    told = [At(0), row, row, Started("a", "j", {}), row, ShardDone(1)]
    own = Actor.__new__(Actor)
    own.deck, own.timeouts = Deck([]), (1.0, 1.0)
    own.watch = SimpleNamespace(follow=lambda *_: ((None, one) for one in told), excluded=["k"])
    monkeypatch.setattr(actor, "EVERY", -1.0)
    answers = list(own.run(Shard(family="logprobs", kind="drawn", seed=1, count=1)))
    assert [len(events) for events, _ in answers] == [1, 3, 2, 0] and {tuple(out) for _, out in answers} == {("k",)}


@pytest.mark.parametrize(
    ("nodes", "share", "count"),
    [
        ([{"CPU": 128.0, "GPU": 8.0, "memory": 2.0**40}], 0.0625, 128),
        ([{"CPU": 7.0, "GPU": 1.0, "memory": 2.0**40}], 0.1428, 7),
        ([{"CPU": 200.0, "GPU": 1.0, "memory": 2.0**40}, {"CPU": 8.0, "memory": 2.0**40}], 0.0625, 16),
        ([{"CPU": 4.0, "GPU": 8.0, "memory": 9.0 * 2**30}], 1.0, 2),
        ([{"CPU": 4.0, "memory": 2.0**40}], 0.0625, 1),
    ],
    ids=["8 GPUs", "7 cores", "many cores, a node without", "little memory", "no GPU yet"],
)
def test_a_worker_has_a_core_memory_and_a_share_of_a_gpu(monkeypatch, nodes, share, count):
    there = [{"Alive": True, "Resources": one} for one in nodes] + [{"Alive": False, "Resources": nodes[0]}]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, nodes=lambda: there))
    found = Nodes("auto", "cuda", None)
    assert (found.needs["num_gpus"], found.count) == (share, count)
    assert "num_gpus" not in Nodes("auto", "cpu", None).needs


def test_a_cluster_has_no_environments_of_other_releases():
    done = CliRunner().invoke(main, ["run", "--ray", "auto", "--with", "trl==1.0.0"])
    assert done.exit_code == 2 and "--ray and --with cannot be used together" in done.output
