"""Faults of many kinds, planted in a user's implementation: each costs that one a verdict, and nobody else anything."""

import json
import os
import sys
import time

import numpy as np
import pytest
import torch

from cases.selftest.controls.correct import control
from parity.implementations import user
from parity.judge import gates
from parity.protocol import process_state
from parity.registry import NAMES, loss_family, run_case

FAMILY = loss_family("logprobs")
CASE = FAMILY.case(3, "fp32", {"V": 11, "H": 5})
PLAIN = control("control.logprobs.plain")


def right(hidden, weight, ids):
    return torch.log_softmax(hidden @ weight.T, -1).gather(-1, ids[..., None])[..., 0]


class NoWords(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Lies(torch.Tensor):
    """A tensor whose every operation raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("mine")


def raised(error):
    raise error


LEAVES = {
    "JSON without content": lambda h: setattr(json, "dumps", lambda *a, **k: "{}"),
    "another working folder": lambda h: setattr(os, "getcwd", lambda: "/nowhere"),
    "a clock that stands": lambda h: setattr(time, "monotonic", lambda: 0.0),
    "numpy without values": lambda h: setattr(np, "full", lambda shape, *a, **k: np.zeros(shape)),
    "a log-softmax of zeros": lambda h: setattr(torch, "log_softmax", lambda z, *a, **k: torch.zeros_like(z)),
    "a wide gate": lambda h: setattr(gates, "NORM", 1e9),
    "memory of an input freed": lambda h: h.untyped_storage().resize_(0),
    "an error without words": lambda h: raised(NoWords()),
    "an error of unprintable words": lambda h: raised(RuntimeError("\udcff\x00\x1b[2J")),
    "a KeyboardInterrupt": lambda h: raised(KeyboardInterrupt()),
}
RETURNS = {
    "no memory behind it": lambda logps: logps.to("meta"),
    "sparse": lambda logps: logps.to_sparse(),
    "a class of its own": lambda logps: logps.as_subclass(Lies),
    "8 TB": lambda logps: logps[0, 0].expand(10**6, 10**6),
    "complex": lambda logps: logps.to(torch.complex64),
}


def planted(name):
    def own(hidden, weight, ids):
        if name in RETURNS:
            return RETURNS[name](right(hidden, weight, ids))
        LEAVES[name](hidden)
        return right(hidden, weight, ids)

    return user.from_function(own, "own.py:own", [loss_family(n) for n in NAMES])


def in_a_fork(body):
    """What `body` writes, from a process of its own: a fault that is not mended would strike the tests behind it."""
    out, into = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(into, body().encode("utf-8", "replace"))
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="behind a backward pass a process with a GPU has no forks that can have one"
)
@pytest.mark.parametrize("name", [*LEAVES, *RETURNS])
def test_a_fault_costs_its_own_implementation_a_verdict_and_nobody_else_anything(name):
    dumps = json.dumps

    def body():
        own, after = ([r for r in run_case(CASE, [one]) if r.verdict != "agree"] for one in (planted(name), PLAIN))
        printed = os.fstat(1).st_ino > 0 and not sys.stdout.closed
        told = [[r.quantity, r.verdict, r.message, r.blame] for r in own]
        return dumps([told, len(after), printed, process_state.broken()])

    own, after, printed, broken = json.loads(in_a_fork(body) or "[[], -1, false, []]")
    assert own and all(verdict in ("disagree", "crashed") for _, verdict, _, _ in own), own
    assert "harness" not in [blame for *_, blame in own]
    assert after == 0 and printed and not broken
