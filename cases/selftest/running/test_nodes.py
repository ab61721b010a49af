"""A run on a Ray cluster has the rows of a run on one machine; a node that dies loses none and doubles none (make test-ray)."""

import threading
import time

import pytest

from cases.selftest.running import test_resume
from cases.selftest.running.test_resume import execute, rows_of
from parity.errors import UsageError
from parity.running import nodes
from parity.running.plan import Options

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray runs this in an environment of its own")

options = test_resume.options
ROOM = {"num_cpus": 1, "memory": nodes.MEMORY, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def head():
    """A cluster with no room."""
    from ray.cluster_utils import Cluster

    quiet = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    made = Cluster(initialize_head=True, head_node_args=ROOM | quiet | {"num_cpus": 0})
    yield made
    made.shutdown()


@pytest.fixture
def cluster(head):
    """Adds so many nodes with room for one worker each; where variables are given, workers only pretend."""

    def started(count, **env):
        own = [head.add_node(**ROOM) for _ in range(count)]
        hook = {"worker_process_setup_hook": "fixtures.played_node.played"} if env else {}
        ray.init(head.address, log_to_driver=False, logging_level="ERROR", runtime_env=hook | {"env_vars": env})
        return head, own

    yield started
    ray.shutdown()
    for node in list(head.worker_nodes):
        head.remove_node(node, allow_graceful=False)


def on_nodes(options, reports, **more):
    """The run on the cluster that is there."""
    return execute(Options(**vars(options) | {"reports": reports, "ray": "auto", "workers": None} | more))


@pytest.mark.parametrize("count", [1, 2])
def test_a_cluster_has_the_rows_of_one_machine(options, tmp_path, cluster, count):
    execute(options)
    cluster(count, PLAYED_DIES=str(tmp_path))
    done = on_nodes(options, tmp_path / "ray")
    assert not done.lost and done.header.end.complete
    assert rows_of(tmp_path / "ray/results.ndjson")[1] == rows_of(options.reports / "results.ndjson")[1]
    assert list(tmp_path.glob("died-*")), "no worker process died"


def test_a_node_with_other_libraries_takes_no_part(options, tmp_path, cluster):
    cluster(1, PLAYED_REFUSES="node a: trl was 0.1, here it is 1.0")
    with pytest.raises(UsageError, match="trl was 0.1"):
        on_nodes(options, tmp_path / "ray")


def test_a_real_run_while_a_node_dies(tmp_path, cluster):
    """Profile quick of three implementations; the second node dies once the first shard is done."""
    asked = Options(profile="quick", families=("logprobs",), implementations=("trl", "fixes"), reports=tmp_path / "one")
    execute(asked)
    there, (_, second) = cluster(2)
    path = tmp_path / "ray/results.ndjson"

    def kill():
        while not path.exists() or path.read_bytes().count(b"\n") < 2:
            time.sleep(0.02)
        there.remove_node(second, allow_graceful=False)

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    done = on_nodes(asked, path.parent)
    killing.join()
    while sum(n["Alive"] for n in ray.nodes()) > 2:  # Ray notices later
        time.sleep(0.1)
    assert not done.lost and done.header.end.complete
    assert rows_of(path)[1] == rows_of(asked.reports / "results.ndjson")[1]
