"""Who gets which shard when: the longest first, time shared out where it is limited, findings when all else is done."""

import time

from parity.running.plan import Shard
from parity.running.shard_queue import ShardQueue, expected


def shard(family, start, count=50, kind="drawn", **fields):
    return Shard(family=family, kind=kind, seed=1, start=start, count=count, of=100, **fields)


def emptied(queue, seconds=lambda shard: None):
    out = []
    while one := queue.take():
        out.append((one.family, one.start))
        queue.back(one, seconds(one))
    return out


def test_the_longest_is_first():
    a, b, c, pairs = shard("policy", 0), shard("policy", 50), shard("logprobs", 0), shard("logprobs", 0, 1, "besides")
    assert emptied(ShardQueue([c, a, pairs, b])) == [("policy", 0), ("policy", 50), ("logprobs", 0), ("logprobs", 0)]
    assert expected(a) == 20.0 and expected(c) == 7.5 and expected(pairs) == 10.0


def test_frozen_cases_come_first_and_findings_when_all_is_done():
    frozen, drawn, finding = shard("dpo", 0, 3, "frozen"), shard("policy", 0), shard("policy", 9, 1, "finding")
    queue = ShardQueue([drawn, frozen], more=lambda: [finding])
    first, second = queue.take(), queue.take()
    assert (first, second, queue.take()) == (frozen, drawn, None), "the findings wait for what others still do"
    queue.back(first)
    queue.back(second)
    assert queue.take() == finding and queue.take() is None


def test_limited_time_is_shared_out_and_nothing_starves():
    shards = [shard(family, start) for family in ("policy", "logprobs", "dpo") for start in range(0, 500, 50)]
    queue = ShardQueue(shards, deadline=time.time() + 60)
    first = [family for family, _ in emptied(queue, lambda s: {"policy": 200.0}.get(s.family, 10.0))][:12]
    assert first.count("dpo") > first.count("policy") == 1 < first.count("logprobs"), "it took longer than expected"


def test_where_time_is_limited_a_family_keeps_the_order_that_it_was_given():
    shards = [shard("dpo", start, count, "checks") for start, count in ((0, 1), (4, 2), (8, 4))]
    assert [start for _, start in emptied(ShardQueue(shards, time.time() + 60))] == [0, 4, 8]
    assert [start for _, start in emptied(ShardQueue(shards))] == [8, 4, 0]


def test_after_the_deadline_only_frozen_cases_and_findings():
    finding = shard("policy", 9, 1, "finding")
    queue = ShardQueue([shard("policy", 0), shard("dpo", 0, 3, "frozen")], deadline=1.0, more=lambda: [finding])
    assert emptied(queue) == [("dpo", 0), ("policy", 9)]


def test_a_worker_goes_on_with_what_it_has_drawn():
    shards = [shard("policy", start, index=index) for index in (0, 1) for start in (0, 50)]
    queue = ShardQueue(shards)
    assert [queue.take().index for _ in range(2)] == [0, 0]
    queue = ShardQueue(shards)
    assert queue.take([("policy", 1)]).index == 1
