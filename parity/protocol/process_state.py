"""The state of the process that all parties share: taken before a call, put back after it, and who left it changed."""

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

from parity.judge.timings import within
from parity.protocol import bindings
from parity.protocol.switches import WATCHES, Watch

_X = torch.linspace(-1.5, 2.0, 16, dtype=torch.float64).view(4, 4)
_IDS = torch.arange(4).unsqueeze(-1)


def arithmetic() -> bytes:
    """The bits of a small float64 computation of every operation that the definitions are made of, and of a gradient.

    It tells whether arithmetic still is what it was, for whatever is not watched.
    """
    x = _X.detach().requires_grad_()
    z = torch.tanh(x @ x.T)
    total = torch.log_softmax(z, -1).gather(-1, _IDS).exp().mean() + torch.logsumexp(z, -1).sum()
    (gradient,) = torch.autograd.grad(total, x)
    z, total = z.detach(), total.detach()
    p, picked = torch.softmax(z, -1), z.gather(-1, _IDS).squeeze(-1)
    least = torch.min(picked, torch.clamp(picked, 0.8, 1.2))
    rest = torch.sigmoid(picked) + torch.nn.functional.softplus(picked) + least
    roots = torch.bmm(p[None], z[None]).abs().sqrt().sum()
    mixed = torch.where(picked > 1, picked, rest).mean() + torch.log1p(p).sum() + roots
    narrow = z.to(torch.bfloat16).float() + z.to(torch.float16).float()
    product = torch.nn.functional.linear(narrow, narrow).double()
    return torch.cat([total.view(1), mixed.view(1), gradient.flatten(), product.flatten()]).numpy().tobytes()


def differing(before: dict[str, Any]) -> Iterator[tuple[Watch, Any]]:
    """Each entry that is not as it was, with what it is now."""
    for watch in WATCHES:
        now = watch.get()
        if now != before[watch.name] and watch.differences(before[watch.name], now):
            yield watch, now


_kept: dict[str, tuple[list[bindings.Change], list[tuple[Watch, Any]]]] = {}
_belongs: dict[str, str] = {}
_suspended: set[str] = set()
_broken: list[str] = []
_together: list[str] = []
"""Whose calls share the names that were taken before them (`together`), the innermost last."""
_reference: list[bytes] = []
_unprobed: list[str] = []
"""Who was called since arithmetic was last tried."""
LEFT = 10
"""Bindings of one call that are named one by one."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything of `WATCHES` and `bindings`; without `names` within `together`."""

    states: dict[str, Any]
    names: bindings.Names | None
    modules: int

    @within("phase", "process state")
    def restore(self, whose: str = "") -> list[str]:
        """Put everything back; the names of what was changed. `whose`: the implementation that was called.

        What an import rebound is not named: it stays in force for calls of the same library (`its_own`), and only there.
        Where a user's function left what cannot be put back, or an operation computes something else since, the process is
        `broken`.
        """
        users = ".py:" in whose
        if users:
            gc.collect(1)  # what its objects do when they die is its own doing
        found: list[str] = []
        rebound = list(bindings.changes(self.names)) if self.names is not None else []
        for _, (owner, name, before, _) in rebound:
            bindings.put(owner, name, before)
        if rebound and len(sys.modules) != self.modules and whose and whose not in _suspended:
            _kept.setdefault(_key(whose), ([], []))[0].extend(change for _, change in rebound)
        else:
            found += [f"rebound {name}" for name, _ in rebound[:LEFT]]
        for watch, now in differing(self.states):  # one after the other: a mode that is left would see the next reading
            before = self.states[watch.name]
            found += watch.differences(before, now)
            if watch.put is not None:
                watch.put(before)
            elif users:
                _broken.append(f"{whose} left a change that nothing undoes: {watch.name} changed")
        _unprobed.append(whose)
        return found


@within("phase", "process state")
def take() -> Snapshot:
    if not _reference:
        _reference.append(arithmetic())
    names = None if _together else bindings.take()
    return Snapshot({w.name: w.get() for w in WATCHES}, names, len(sys.modules))


@contextlib.contextmanager
def together(whose: str) -> Iterator[None]:
    """Around calls of one party between which nothing else is computed: names that they rebind are put back once, at the end."""
    before = take()
    _together.append(whose)
    try:
        yield
    finally:
        _together.pop()
        before.restore(whose)


def abandon(reason: str) -> None:
    """Nobody else may be judged in this process."""
    _broken.append(reason)


@within("phase", "process state")
def broken() -> list[str]:
    """Why this process must not judge anybody else any more; empty where all is well. Asked after the calls of each party."""
    if _unprobed and not _unchanged():
        _broken.append(f"operations of torch compute something else since {_unprobed[-1]} was called")
    _unprobed.clear()
    return list(_broken)


def _unchanged() -> bool:
    try:
        return arithmetic() == _reference[0]
    except Exception:  # an operation that raises since is none that still computes the same
        return False


def _key(whose: str) -> str:
    return _belongs.get(whose, whose)


@contextlib.contextmanager
def importing(file: str) -> Iterator[None]:
    """Around the import of a user's file: what it patches or sets holds in calls of what it defines, and nowhere else."""
    before = take()
    try:
        yield
    finally:
        names = [change for _, change in bindings.changes(before.names or [])]
        states = [(watch, now) for watch, now in differing(before.states) if watch.kept and watch.put is not None]
        _kept[file] = names, states
        before.restore()


def belongs(id: str, file: str) -> None:
    """The implementation is defined in this user's file."""
    _belongs[id] = file


def its_own(whose: str) -> Snapshot | None:
    """Put in force what `whose` file or library patched when it was imported; the state then, None where that is nothing.

    The caller restores the one that it had before.
    """
    names, states = _kept.get(_key(whose), ([], []))
    names = [] if whose in _suspended else names
    for owner, name, _, value in names:
        bindings.put(owner, name, value)
    for watch, now in states:
        assert watch.put is not None
        watch.put(now)
    return take() if names or states else None


@contextlib.contextmanager
def without(whose: str) -> Iterator[None]:
    """Calls of `whose` without what its first call patched: does the call itself patch it again?"""
    _suspended.add(whose)
    try:
        yield
    finally:
        _suspended.discard(whose)
