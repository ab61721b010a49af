"""Which nodes of a cluster take part in a run, with how many workers; without Ray."""

import json
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from msgspec import to_builtins

from cases.selftest.running import test_resume
from parity.cli.commands import main
from parity.decoding import decode
from parity.errors import UsageError
from parity.results.row import Header
from parity.running import nodes, supervisor
from parity.running.nodes import Nodes
from parity.running.plan import Judged, Options, Shard, ShardDone
from parity.running.provenance import header
from parity.running.state import differs

options = test_resume.options


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
    there = to_builtins(head)
    there["header"] = {k: v for k, v in there["header"].items() if k not in ("plan", "ends")} | change
    (digest,) = there["header"]["asked"]["files"].values()
    if not change:
        there["header"]["asked"]["files"] = {"/elsewhere/ledger.toml": digest}
    told = differs(head, decode(Header, json.dumps(there), "there"), "node a")
    assert says in told if says else not told


@pytest.fixture
def deal(options, head):
    """A function that runs so many cases as a task of Ray does, in a worker that only pretends."""
    settings = {"device": "cpu", "profile": "quick"}
    nodes._watching.cache_clear()
    yield lambda n: nodes.on_node(settings, head, ".", Shard(family="logprobs", kind="drawn", seed=1, count=n))
    nodes._watching.cache_clear()


def test_a_shard_on_a_node_has_its_rows_and_the_next_one_the_same_worker(deal, monkeypatch):
    begun, whole = [], supervisor.Worker.begin
    monkeypatch.setattr(supervisor.Worker, "begin", lambda *args: begun.append(args) or whole(*args))
    for _ in range(2):
        events = deal(3)
        assert sum(isinstance(one, Judged) for one in events) == 12
        assert isinstance(events[-1], ShardDone)
    assert len(begun) == 1


def test_a_node_that_is_another_one_takes_no_part_and_one_that_lost_its_worker_has_a_new_one(deal, monkeypatch):
    monkeypatch.setenv("PLAYED_REFUSES", "node a: trl was 0.1, here it is 1.0")
    with pytest.raises(UsageError, match=r"node a: trl was 0\.1"):
        deal(3)
    monkeypatch.delenv("PLAYED_REFUSES")
    assert isinstance(deal(3)[-1], ShardDone)


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
