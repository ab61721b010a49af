"""CPU time counts for the innermost block of each kind, and for nothing twice."""

from parity.judge import timings
from parity.judge.timings import spent, within


def test_an_inner_block_is_left_out_of_the_outer_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timings.time, "process_time", lambda: now[0])
    spent()
    monkeypatch.setattr(timings, "_since", [0.0])

    def work(seconds):
        now[0] += seconds

    @within("phase", "gates")
    def gates(depth):
        work(1.0)
        if depth:
            gates(depth - 1)

    with within("implementation", "mine"), within("stage", "first call"):
        work(2.0)
        with within("phase", "forward"):
            work(4.0)
        gates(1)
    work(8.0)
    assert spent() == {
        "phase": {"other": 10.0, "forward": 4.0, "gates": 2.0},
        "stage": {"first call": 8.0, "other": 8.0},
        "implementation": {"mine": 8.0, "other": 8.0},
    }
    assert not any(spent()["phase"].values())


def test_an_exception_ends_a_block():
    try:
        with within("phase", "forward"):
            raise KeyError
    except KeyError:
        pass
    assert timings._at["phase"] == timings.OTHER
