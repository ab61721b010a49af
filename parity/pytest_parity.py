"""The judge's pytest plugin. Without --parity, --parity-replay or --parity-audit it does nothing and imports no torch."""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STORED, SHOWN = "parity/failing", 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """The three options."""
    group = parser.getgroup("parity", "error ÷ allowed of kernels, by parity.testing")
    group.addoption(
        "--parity", action="store_true", help="show error ÷ allowed of every assert_parity, and store what fails"
    )
    group.addoption(
        "--parity-replay",
        action="append",
        default=[],
        metavar="ID",
        help="run drawn cases of these ids alone; 'last': those that failed in the last run with --parity",
    )
    group.addoption(
        "--parity-audit",
        action="store_true",
        help="show what the tolerances of torch.testing.assert_close and torch.allclose let pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register what was asked for."""
    replayed = [
        i for name in config.getoption("--parity-replay") for i in (_stored(config) if name == "last" else (name,))
    ]
    if config.getoption("--parity") or replayed:
        from parity.judge.assertion import OBSERVERS
        from parity.testing.drawing import REPLAYED

        REPLAYED[:] = replayed
        config.pluginmanager.register(Judged(OBSERVERS, replayed), "parity-judged")
    if config.getoption("--parity-audit"):
        config.pluginmanager.register(Audit(), "parity-audit")


def _stored(config: pytest.Config) -> list[str]:
    cache = getattr(config, "cache", None)
    return list(cache.get(STORED, [])) if cache else []


class Recorder:
    """Notes of the test that runs, in its user properties: so they come from workers, and go into JUnit's XML."""

    name = ""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None
        self.seen: list[tuple[str, dict[str, Any]]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Notes belong to this test."""
        self.item = item
        try:
            return (yield)
        finally:
            self.item = None

    def note(self, **what: Any) -> None:
        """Add a note, in JSON."""
        if self.item is not None:
            self.item.user_properties.append((self.name, json.dumps(what, ensure_ascii=False)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the notes of a report, from this process or from a worker."""
        if report.when == "call":
            self.seen += [(report.nodeid, json.loads(str(v))) for n, v in report.user_properties if n == self.name]


class Judged(Recorder):
    """Error ÷ allowed of every judgement."""

    name = "parity"

    def __init__(self, observers: list[Callable[[Any], None]], replayed: list[str]):
        super().__init__()
        self.replayed = replayed
        observers.append(self._judged)

    def _judged(self, parity: Any) -> None:
        tightest = max(parity.quantities.items(), key=lambda pair: pair[1].headroom, default=("", None))
        self.note(
            headroom=float(f"{parity.headroom:.3g}"),
            quantity=tightest[0],
            gate=tightest[1].gate if tightest[1] else "",
            protocol=list(parity.protocol),
            function=parity.function,
            case=parity.case,
        )

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """A replay runs its cases alone."""
        if not self.replayed:
            return
        case = {i: i.callspec.params.get("case", "") if hasattr(i, "callspec") else "" for i in items}
        kept = [i for i in items if str(case[i]) in self.replayed]
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = kept

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The judgements with the largest error ÷ allowed."""
        failing = [n["case"] for _, n in self.seen if n["case"] and (n["headroom"] > 1 or n["protocol"])]
        cache = getattr(config, "cache", None)
        if cache and not self.replayed:
            cache.set(STORED, list(dict.fromkeys(failing)))
        if not self.seen:
            return
        terminalreporter.section("parity: error ÷ allowed")
        ordered = sorted(self.seen, key=lambda pair: (-bool(pair[1]["protocol"]), -pair[1]["headroom"]))
        for nodeid, n in ordered[:SHOWN]:
            about = "; ".join(n["protocol"]) or f"{n['quantity']} ({n['gate']})"
            terminalreporter.write_line(f"{n['headroom']:>9.3g}  {about}  {nodeid}")
        if len(ordered) > SHOWN:
            terminalreporter.write_line(f"and {len(ordered) - SHOWN} judgements with less")
        for case in dict.fromkeys(failing):
            terminalreporter.write_line(f"--parity-replay {case}")


class Audit(Recorder):
    """What each tolerance lets pass: it is asked again with values that are wrong on purpose."""

    name = "parity-audit"

    def __init__(self) -> None:
        import torch

        super().__init__()
        self.torch = torch
        self.close, self.all_close = torch.testing.assert_close, torch.allclose
        torch.testing.assert_close = self._assert_close
        torch.allclose = self._allclose

    def pytest_unconfigure(self) -> None:
        """Put torch back."""
        self.torch.testing.assert_close, self.torch.allclose = self.close, self.all_close

    def _assert_close(self, actual: Any, expected: Any, **options: Any) -> None:
        __tracebackhide__ = True
        self.close(actual, expected, **options)

        def passes(wrong: Any) -> bool:
            try:
                self.close(wrong, expected, **options)
            except AssertionError:
                return False
            return True

        self._look(actual, passes)

    def _allclose(self, input: Any, other: Any, *tolerances: Any, **options: Any) -> bool:
        agrees = self.all_close(input, other, *tolerances, **options)
        if agrees:
            self._look(input, lambda wrong: self.all_close(wrong, other, *tolerances, **options))
        return agrees

    def _look(self, actual: Any, passes: Callable[[Any], bool]) -> None:
        frame = sys._getframe(2)
        where = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        if not isinstance(actual, self.torch.Tensor) or not actual.is_floating_point() or not actual.numel():
            return
        found = {name: change(actual.detach()) for name, change in WRONG.items()}
        found = {name: wrong for name, wrong in found.items() if not self.torch.equal(wrong, actual)}
        lets = [name for name, wrong in found.items() if passes(wrong)]
        self.note(where=where, asked=list(found), passes=lets)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line for each place: how many calls, and in how many each mistake would have passed."""
        by_place: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for _, note in self.seen:
            by_place[note["where"]].update(["calls", *note["passes"]])
        terminalreporter.section("parity: what tolerances let pass, in so many of the calls")
        terminalreporter.write_line("calls" + "".join(name.rjust(13) for name in WRONG))
        for where, counts in sorted(by_place.items(), key=lambda pair: -sum(pair[1].values())):
            cells = "".join(str(counts[name] or "").rjust(13) for name in WRONG)
            terminalreporter.write_line(f"{counts['calls']:>5}{cells}  {where}")


def _zeroed(x: Any, dim: int) -> Any:
    out = x.clone()
    if x.dim():
        out.select(dim, -1).zero_()
    return out


WRONG: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda x: x * 0,
    "1.01 times": lambda x: x * 1.01,
    "wrong row": lambda x: x.roll(1, 0) if x.dim() else x,
    "no last one": lambda x: _zeroed(x, -1),
}
"""Mistakes: all zeros, a factor, each row in the place of the next, the last entry of each row lost."""
