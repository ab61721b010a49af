"""Who gets which shard when: what shows a mistake soonest, time shared out where it is limited, findings at the end."""

import random
import time

from parity.running.plan import Shard
from parity.running.shard_queue import THRICE, ShardQueue


def shard(family, start, count=50, kind="drawn", **fields):
    return Shard(family=family, kind=kind, seed=1, start=start, count=count, of=100, **fields)


def emptied(queue, seconds=lambda shard: None):
    out = []
    while one := queue.take():
        out.append((one.family, one.start))
        queue.back(one, seconds(one))
    return out


def test_what_shows_a_mistake_soonest_is_first():
    """Cheap frozen cases, between them the first draws; checks of every trainer, what is fitted to a user's function, draws, what
    comes besides, further checks."""
    order = [
        shard("policy", 0, 3, "frozen"),
        shard("policy", 0, 8),
        shard("logprobs", 0, 3, "frozen"),
        shard("logprobs", 0, 8),
        shard("dpo", 0, 4, "checks"),
        shard("policy", 0, 1, "besides", implementations=("mine.py:loss",), own=True),
        shard("policy", 8),
        shard("logprobs", 8),
        shard("policy", 58),
        shard("policy", 0, 1, "besides", implementations=("a",)),
        shard("dpo", 4, 4, "checks"),
    ]
    for seed in range(20):
        dealt = ShardQueue(random.Random(seed).sample(order, len(order))).left
        assert [(s.kind, s.own) for s in dealt] == [(s.kind, s.own) for s in order]
        assert [s.start for s in dealt] == [s.start for s in order]
        assert [s.family for s in dealt if s.kind == "frozen"] == ["policy", "logprobs"]


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


def test_where_time_is_limited_what_is_fitted_to_a_user_s_function_comes_before_its_draws():
    frozen, mine = (
        shard("policy", 0, 3, "frozen"),
        shard("policy", 0, 1, "besides", implementations=("mine.py:loss",), own=True),
    )
    other = shard("policy", 0, 1, "besides", implementations=("a",))
    queue = ShardQueue([frozen, shard("policy", 0), shard("policy", 8), other, mine], deadline=time.time() + 60)
    kinds = [queue.take().kind for _ in range(5)]
    assert kinds == ["frozen", "besides", "drawn", "drawn", "besides"]


def test_where_time_is_limited_a_family_keeps_the_order_that_it_was_given():
    shards = [shard("dpo", start, count, "checks") for start, count in ((0, 1), (4, 2), (8, 4))]
    assert [start for _, start in emptied(ShardQueue(shards, time.time() + 60))] == [0, 4, 8]


def test_after_the_deadline_only_frozen_cases_and_findings():
    finding = shard("policy", 9, 1, "finding")
    queue = ShardQueue([shard("policy", 0), shard("dpo", 0, 3, "frozen")], deadline=1.0, more=lambda: [finding])
    assert emptied(queue) == [("dpo", 0), ("policy", 9)]


def test_a_worker_goes_on_with_what_it_has_drawn():
    shards = [shard("policy", start, index=index) for index in (0, 1) for start in (0, 50)]
    queue = ShardQueue(shards)
    assert [queue.take().index for _ in range(2)] == [0, 1]
    queue = ShardQueue(shards)
    assert [queue.take([("policy", 1)]).index for _ in range(2)] == [1, 1]


def test_what_costs_three_workers_is_left_out_but_of_its_own_findings():
    """Else a fresh process would show nothing of them, and they would count as nondeterministic."""
    queue, drawn = ShardQueue([]), shard("policy", 0, exclude=("elsewhere",))
    for times, excluded in ((1, ["elsewhere"]), (1, ["elsewhere"]), (1, ["costly", "elsewhere"])):
        queue.hold("costly", times)
        assert [*queue.able(drawn).exclude] == excluded
    queue.hold("asleep", THRICE)
    assert [*queue.able(drawn).exclude] == ["asleep", "costly", "elsewhere"]
    assert not queue.able(shard("policy", 9, 1, "finding")).exclude
