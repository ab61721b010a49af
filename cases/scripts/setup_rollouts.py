import itertools
import queue

LENGTHS = (1, 2, 7, 8)


class Nobody:
    def __getattr__(self, name):
        return lambda *args: None


class Rollouts(Nobody):
    """Four completions of `LENGTHS` tokens, again and again; `made`: number -> completion."""

    def __init__(self, made):
        self.rollout_buffer, self.metrics_queue, self.given = self, queue.Queue(), itertools.cycle(range(4))
        self.made = made

    def qsize(self):
        return 1

    def get(self, timeout):
        return self.made(next(self.given))
