"""The state of the process that all parties share: taken before a call, put back after it, and who left it changed."""

import _thread
import contextlib
import dataclasses
import gc
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from parity.protocol import bindings
from parity.protocol.switches import LEFT, WATCHES, told

Changed = tuple[list[bindings.Change], dict[str, Any]]
"""Names that were rebound, and entries of `WATCHES` with what they are now."""

_kept: dict[str, Changed] = {}
"""What a file or a library patched when it was imported."""
_belongs: dict[str, str] = {}
_broken: list[str] = []
_reference: list[bytes] = []
_called: list[str] = []
"""Who was called since arithmetic was last tried."""
BEGINNING, ENDING = 5e-3, 0.1
"""Seconds after which a thread that a user's function starts counts, and in which one may end by itself."""
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


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything of `WATCHES` and `bindings`, and how many threads of Python there are."""

    states: dict[str, Any]
    names: bindings.Names
    modules: int
    threads: int

    def differing(self) -> Iterator[tuple[str, Any]]:
        """Each entry of `WATCHES` that is not as it was, with what it is now."""
        for name, (get, _) in WATCHES.items():
            if (now := get()) != self.states[name]:
                yield name, now

    def restore(self, whose: str = "") -> list[str]:
        """Put everything back; the names of what was changed. `whose`: the implementation that was called.

        What an import rebound is not named: it stays in force for calls of the same library (`its_own`), and only there.
        Where what cannot be put back was left, the process is `broken`.
        """
        if ".py:" in whose:
            gc.collect(1)  # what a user's objects do when they die is its own doing
        rebound = list(self.names.changes())
        for _, (owner, name, before, _) in rebound:
            bindings.put(owner, name, before)
        imported = bool(whose) and len(sys.modules) != self.modules
        if rebound and imported:
            _kept.setdefault(_key(whose), ([], {}))[0].extend(change for _, change in rebound)
        found = [] if imported else [f"rebound {name}" for name, _ in rebound[:LEFT]]
        for name, now in self.differing():  # one after the other: a mode that is left would see the next reading
            found += told(name, self.states[name], now)
            if put := WATCHES[name][1]:
                put(self.states[name])
            else:
                abandon(f"{whose} left a change that nothing undoes: {name} changed")
        own = ".py:" in whose
        if own:
            time.sleep(BEGINNING)
        if (own or not imported) and self._left_a_thread():  # a library may keep one that its import starts
            abandon(f"{whose} left a thread running, which may change anything")
        _called.append(whose)
        return found

    def _left_a_thread(self) -> bool:
        """Whether more threads run than before, those of `_thread` too."""
        until = time.monotonic() + ENDING
        while _threads() > self.threads:
            if time.monotonic() > until:
                return True
            time.sleep(ENDING / 20)
        return False


def _threads() -> int:
    """How many threads run, without the one with which tqdm watches its bars: torch's compiler has some."""
    return _thread._count() - sum(type(thread).__name__ == "TMonitor" for thread in threading.enumerate())


def take() -> Snapshot:
    if not _reference:
        _reference.append(arithmetic())
    return Snapshot({name: get() for name, (get, _) in WATCHES.items()}, bindings.take(), len(sys.modules), _threads())


def abandon(reason: str) -> None:
    """Nobody else may be judged in this process."""
    _broken.append(reason)


def broken() -> list[str]:
    """Why this process must not judge anybody else any more; empty where all is well. Asked after the calls of each party."""
    if _called and not _as_before():
        abandon(f"operations of torch compute something else since {_called[-1]} was called")
    if _called and (name := bindings.recoded()):
        abandon(f"{name} has other code since {_called[-1]} was called")
    _called.clear()
    return list(_broken)


def _as_before() -> bool:
    try:
        return arithmetic() == _reference[0]
    except Exception:  # an operation that raises since is none that still computes the same
        return False


def _key(whose: str) -> str:
    return _belongs.get(whose, whose)


@contextlib.contextmanager
def importing(file: str) -> Iterator[None]:
    """Around the import of a user's file: what it patches or sets, random states apart, holds in calls of what it defines."""
    before = take()
    try:
        yield
    finally:
        states = {name: now for name, now in before.differing() if WATCHES[name][1] and not name.endswith("RNG")}
        _kept[file] = [change for _, change in before.names.changes()], states
        before.restore()


def belongs(id: str, file: str) -> None:
    """The implementation is defined in this user's file."""
    _belongs[id] = file


def its_own(whose: str) -> Snapshot | None:
    """Put in force what `whose` file or library patched when it was imported; the state then, None where that is nothing.

    The caller restores the one that it had before.
    """
    names, states = _kept.get(_key(whose), ([], {}))
    for owner, name, _, value in names:
        bindings.put(owner, name, value)
    for name, now in states.items():
        WATCHES[name][1](now)  # type: ignore[misc]
    return take() if names or states else None
