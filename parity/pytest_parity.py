"""The judge's pytest plugin. Without --parity, --parity-replay or --parity-audit it does nothing and imports no torch."""

import collections
import copy
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STORED, SHOWN = "parity/failing", 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
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
    group.addoption(
        "--parity-definition",
        action="append",
        default=[],
        metavar="NAME",
        help="with --parity-audit: a reference, function, module or its class, that test modules or parameters of tests have "
        "under this name; show the tolerance derived from it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register what was asked for."""
    replayed = [
        i for name in config.getoption("--parity-replay") for i in (_stored(config) if name == "last" else (name,))
    ]
    if config.getoption("--parity-replay") and not replayed:
        raise pytest.UsageError("--parity-replay last: nothing failed in the last run with --parity")
    if config.getoption("--parity") or replayed:
        from parity.judge.assertion import OBSERVERS
        from parity.testing.drawing import REPLAYED

        REPLAYED[:] = replayed
        config.pluginmanager.register(Judged(OBSERVERS, replayed), "parity-judged")
    if config.getoption("--parity-definition") and not config.getoption("--parity-audit"):
        raise pytest.UsageError("--parity-definition: belongs to --parity-audit, which was not given")
    if config.getoption("--parity-audit"):
        config.pluginmanager.register(Audit(config.getoption("--parity-definition")), "parity-audit")


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
        self.replayed, self.ran = replayed, set[str]()
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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the notes of a report, and which tests ran."""
        super().pytest_runtest_logreport(report)
        self.ran.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The judgements with the largest error ÷ allowed."""
        failing = [n["case"] for _, n in self.seen if n["case"] and (n["headroom"] > 1 or n["protocol"])]
        cache = getattr(config, "cache", None)
        if cache and not self.replayed:
            cache.set(STORED, list(dict.fromkeys(failing)))
        for case in self.replayed:
            if not any(f"[{case}]" in nodeid for nodeid in self.ran):
                terminalreporter.write_line(f"--parity-replay: no test has the case {case}", red=True)
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

    def __init__(self, names: list[str]) -> None:
        import torch

        super().__init__()
        self.torch, self.names, self.patch, self.asking = torch, names, pytest.MonkeyPatch(), False
        self.known: list[str] = []  # the names that this test has
        self.runs: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self.close, self.all_close = torch.testing.assert_close, torch.allclose
        torch.testing.assert_close = self._assert_close
        torch.allclose = self._allclose

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        """The definitions that this test's module or its parameters have take notes of their calls."""
        self.patch.undo()
        self.runs.clear()
        self.known.clear()
        params = getattr(getattr(item, "callspec", None), "params", {})
        for name in self.names:
            *path, last = name.split(".")
            owner = functools.reduce(lambda o, n: getattr(o, n, None), path, getattr(item, "module", None))
            found = params.get(name, getattr(owner, last, None))
            self.known += [name] * callable(found)
            if found is not None and hasattr(found, "forward"):
                self.patch.setattr(found, "forward", self._noted(found.forward))
            elif callable(found):
                noted = self._noted(found)
                if getattr(owner, last, None) is found:
                    self.patch.setattr(owner, last, noted)
                for parameter in [n for n, value in params.items() if value is found]:
                    self.patch.setitem(params, parameter, noted)

    def _noted(self, definition: Callable[..., Any]) -> Callable[..., Any]:
        from parity.judge.problem import named

        signature = inspect.signature(definition)
        variadic = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]

        @functools.wraps(definition)
        def call(*args: Any, **kwargs: Any) -> Any:
            out = definition(*args, **kwargs)
            if self.asking:
                return out
            arguments = signature.bind(*args, **kwargs).arguments
            module = arguments.pop("self", getattr(definition, "__self__", None))
            upstream: dict[str, Any] = {}
            for name, value in named(out).items():
                if value.requires_grad:
                    value.register_hook(functools.partial(upstream.__setitem__, name))
            for name in variadic:
                arguments |= arguments.pop(name, {})
            self.runs.append((definition if module is None else module, arguments, named(out), upstream))
            return out

        return call

    def _derived(self, actual: Any, expected: Any) -> Any:
        """(atol, rtol) for what is expected, where a definition returned it, or gave it as a gradient; else None."""
        from parity.judge.assertion import tolerance
        from parity.judge.problem import named

        dtypes = self.torch.bfloat16, self.torch.float16, self.torch.float32
        narrow = next((d for d in dtypes if self._holds(d, actual)), actual.dtype)
        for definition, arguments, outputs, upstream in reversed(self.runs):
            own = dict(getattr(definition, "named_parameters", dict)())
            gradients = {f"grad_{n}": x.grad for n, x in (named(arguments) | own).items() if x.is_leaf}
            for name, known in (outputs | gradients).items():
                if known is None or known.shape != expected.shape or not self.torch.equal(known.to(expected), expected):
                    continue
                above = {n: upstream.get(n, self.torch.zeros_like(x)) for n, x in outputs.items()}
                inputs = self.torch.utils._pytree.tree_map(
                    lambda x: x.detach().to(narrow) if self._holds(narrow, x) else x, arguments
                )
                if own:
                    definition = copy.deepcopy(definition).to(narrow)
                    vars(definition).pop("forward", None)  # one that takes notes, with the weights of the original
                self.asking = True
                try:
                    return tolerance(definition, inputs, cotangent=above if upstream else None)[name]
                finally:
                    self.asking = False
        return None

    def _holds(self, dtype: Any, x: Any) -> bool:
        """Whether a dtype holds all values of a tensor: a kernel's, cast up to be compared."""
        floating = isinstance(x, self.torch.Tensor) and x.is_floating_point()
        return floating and self.torch.equal(x.detach().to(dtype).to(x), x.detach())

    def pytest_unconfigure(self) -> None:
        """Put torch and the definitions back."""
        self.patch.undo()
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

        self._look(actual, expected, passes)

    def _allclose(self, input: Any, other: Any, *tolerances: Any, **options: Any) -> bool:
        agrees = self.all_close(input, other, *tolerances, **options)
        if agrees:
            self._look(input, other, lambda wrong: self.all_close(wrong, other, *tolerances, **options))
        return agrees

    def _look(self, actual: Any, expected: Any, passes: Callable[[Any], bool]) -> None:
        frame = sys._getframe(2)
        where = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame.f_globals["__name__"].startswith("parity."):
            return
        if not isinstance(actual, self.torch.Tensor) or not actual.is_floating_point() or not actual.numel():
            return
        found = {name: change(actual.detach()) for name, change in WRONG.items()}
        found = {name: wrong for name, wrong in found.items() if not self.torch.equal(wrong, actual)}
        lets = [name for name, wrong in found.items() if passes(wrong)]
        try:
            known = self._derived(actual, expected) if isinstance(expected, self.torch.Tensor) else None
        except (ValueError, NotImplementedError) as error:  # what the judge cannot ask of a definition
            known = str(error)
        self.note(where=where, asked=list(found), passes=lets, derived=known, names=list(self.known))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line for each place: how many calls, in how many each mistake would have passed, and the widest derived tolerance."""
        by_place: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        derived: dict[str, list[Any]] = collections.defaultdict(list)
        for _, note in self.seen:
            by_place[note["where"]].update(["calls", *note["passes"]])
            if note["derived"]:
                derived[note["where"]].append(note["derived"])
        terminalreporter.section("parity: what tolerances let pass, in so many of the calls")
        terminalreporter.write_line("calls" + "".join(name.rjust(13) for name in WRONG))
        for where, counts in sorted(by_place.items(), key=lambda pair: -sum(pair[1].values())):
            cells = "".join(str(counts[name] or "").rjust(13) for name in WRONG)
            why = [known for known in derived[where] if isinstance(known, str)]
            holds = f"  none derived: {why[0]}" if why else ""
            if derived[where] and not why:
                holds = "  derived: atol={:.2g}, rtol={:.2g}".format(*map(max, zip(*derived[where], strict=True)))
            terminalreporter.write_line(f"{counts['calls']:>5}{cells}  {where}{holds}")
        for name in self.names:
            if not any(name in note["names"] for _, note in self.seen):
                line = f"--parity-definition: no test with such a tolerance has a function or module {name}"
                terminalreporter.write_line(line, red=True)


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
