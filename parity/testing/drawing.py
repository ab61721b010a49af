"""Drawn inputs: a description of tensors and options, and cases of it, each of which its id tells whole.

RMS_NORM = draw(x=tensor("N", "H"), weight=tensor("H", around=1), eps=[1e-6, 1e-5])

@RMS_NORM.parametrize()
def test_rms_norm(case):
    case.assert_parity(my_kernel, rms_norm)
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from parity.judge.assertion import Parity, raise_unless, verdict
from parity.judge.calls import elsewhere
from parity.judge.gates import as_clear
from parity.judge.problem import UPSTREAM
from parity.judge.recipe import DTYPES
from parity.judge.values import integers, normal, uniform

SIZES = (
    *(1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 61, 63, 64, 65, 113, 127, 128, 129, 251, 255, 256, 257, 509, 1021, 1023),
    *(1024, 1025, 2039, 2047, 2048, 2049, 4093, 4095, 4096, 4097, 8191, 8192, 8193),
)
"""1, primes, multiples of 16, 64, 128, 256 and 1,024, and those beside them."""
VALUES = ("plain", "offset", "ties", "wide", "zeros", "tiny", "large", "extreme")
EXTREME, EXTREME_FP16 = 50, 12
"""Powers of two, up and down, of the values "extreme": their squares, and products of two such tensors, are finite in float32."""
OFFSETS = (-120.0, 120.0, -30.0, 30.0)
"""What is added far from 0: exp(-120 + 5) is 0 in float32, exp(30) is finite."""
REPEATS = ("plain", "repeated", "edges")
LAYOUTS = ("contiguous", "sliced", "offset", "transposed", "expanded", "odd")
LARGEST, SMALL, WIDE, TALL, WORK = 1 << 16, 64, 2049, 1025, 1 << 22
"""Entries of a tensor at most; the largest size of a dimension, of the last one of the first tensor, and once of its first, over
whose blocks a kernel sums a weight's gradient; the product of all sizes of such a case."""
IDS, FEW_IDS, WORK_OF_IDS, FOUND = LARGEST - 1, 257, 1 << 18, 1 << 20
"""The size once, beyond int16, of a dimension that bounds an index; of one of a tensor of three dimensions, as of experts, over
which definitions loop; the product of all sizes of such a case; in any, entries of rows that ids take from a table."""
BLOCK = 1024
"""Columns in which the values "large" are smaller, if there are more: the largest of a first block is not that of the row."""
REPLAYED: list[str] = []
"""Ids that a parametrisation has instead of its own cases: those of `--parity-replay`."""
TRIES = 60
"""Smaller cases that are tried before a failure is shown."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a description: `tensor(...)` and `index(...)` make one."""

    dims: tuple[str | int, ...]
    around: float = 0.0
    scale: float = 1.0
    values: tuple[str, ...] = VALUES
    layouts: tuple[str, ...] = LAYOUTS
    below: str | int | None = None
    dtype: str | None = None
    then: Callable[[torch.Tensor], torch.Tensor] | None = None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape in a case."""
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.dims)

    def make(self, name: str, case: Case) -> torch.Tensor:
        """The tensor of a case: values by (seed, name, index), on any device the same, in the case's dtype and layout."""
        shape, style, layout = self.shape(case.sizes), case.values.get(name, "plain"), case.layouts.get(name)
        if self.below is not None:
            bound = case.sizes[self.below] if isinstance(self.below, str) else self.below
            x = integers(case.seed, name, shape, bound)
            if style == "repeated":
                x = torch.full_like(x, bound - 1 if bound >= FEW_IDS else int(integers(case.seed, name, (1,), bound)))
            x = x % 2 * (bound - 1) if style == "edges" else x
            if bound >= FEW_IDS:  # or none of few would pass 8 or 16 bits
                x.view(-1)[-1:] = bound - 1
            return laid((x if self.then is None else self.then(x)).to(case.device), layout)
        x, dtype = normal(case.seed, name, shape), self.dtype or case.dtype
        if style == "extreme":
            far = EXTREME_FP16 if dtype == "fp16" else EXTREME
            x = x * torch.where(uniform(case.seed, name + "e", shape) < 0.5, 2.0**far, 2.0**-far)
        else:
            x = _STYLES[style](x, case.seed, name)
        x = x * self.scale + self.around
        return laid((x if self.then is None else self.then(x)).to(case.device, DTYPES[dtype]), layout)


_STYLES: dict[str, Callable[[torch.Tensor, int, str], torch.Tensor]] = {
    "plain": lambda x, seed, name: x,
    "offset": lambda x, seed, name: x + _by_row(x, OFFSETS, int(integers(seed, name + "o", (1,), len(OFFSETS)))),
    "ties": lambda x, seed, name: (x * 2).round() / 2,
    "wide": lambda x, seed, name: (
        x * 2.0 ** (12 * uniform(seed, name + "w", x.shape[:1]).view(-1, *[1] * (x.dim() - 1)) - 8) if x.dim() else x
    ),
    "zeros": lambda x, seed, name: x * (uniform(seed, name + "z", x.shape) < 0.5) * _by_row(x, (1.0, 0.0), 1),
    "tiny": lambda x, seed, name: x * 2.0**-12,
    "large": lambda x, seed, name: _growing(x * 2.0**6),
}


def _growing(x: torch.Tensor) -> torch.Tensor:
    if x.dim() and x.shape[-1] > BLOCK:
        x[..., :BLOCK] /= 4
    return x


def _by_row(x: torch.Tensor, values: Sequence[float], first: int) -> torch.Tensor:
    """One of `values` for each index of the first dimension, in turn; that of number `first` for a vector and a scalar."""
    rows = torch.arange(x.shape[0]) if x.dim() > 1 else torch.tensor([first])
    return torch.tensor(values, dtype=x.dtype)[rows % len(values)].view([-1, *[1] * (x.dim() - 1)] if x.dim() else [])


def tensor(
    *dims: str | int,
    around: float = 0.0,
    scale: float = 1.0,
    values: Sequence[str] = VALUES,
    layouts: Sequence[str] = LAYOUTS,
    dtype: str | None = None,
    then: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Tensor:
    """A floating-point tensor of named dimensions.

    Args:
        dims: names of dimensions, or sizes.
        around: what is added to its values, which are bell-shaped around 0.
        scale: their standard deviation.
        values: which of `VALUES` are drawn besides "plain"; ("extreme",) for the ends of the exponent.
        layouts: which of `LAYOUTS` are drawn, "contiguous" always; that alone for a kernel that takes no others.
        dtype: "fp32" where it is in float32 whatever the case's dtype.
        then: (float64 tensor) -> tensor, such as `lambda x: x.log_softmax(-1)`.
    """
    return Tensor(dims, around, scale, _of(values, VALUES), _of(layouts, LAYOUTS), dtype=dtype, then=then)


def index(
    *dims: str | int,
    below: str | int,
    values: Sequence[str] = REPEATS,
    layouts: Sequence[str] = ("contiguous", "sliced"),
    then: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Tensor:
    """An int64 tensor in [0, below), a dimension's name or a number: any, one id everywhere, or both ends alone.
    Of 257 or more the last is always the largest, and the one id.

    `then` changes it as it does a `tensor`, such as `lambda ids: ids.where(ids % 5 > 0, -100)` for targets to ignore.
    """
    return Tensor(dims, values=_of(values, REPEATS), layouts=_of(layouts, LAYOUTS), below=below, then=then)


def _of(given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    if odd := [name for name in given if name not in known]:
        raise ValueError(f"{odd[0]!r} is not among {', '.join(known)}")
    return tuple(dict.fromkeys((known[0], *given)))


def laid(x: torch.Tensor, layout: str | None) -> torch.Tensor:
    """The same values in other memory, whose gaps hold NaN; expanded: the first row again and again.

    "sliced": every second entry of its last dimension; "offset": one entry behind the start of its memory; "transposed":
    its last two dimensions; "odd": dimensions of size 1 have a stride of 3.
    """
    if layout == "sliced" and x.dim():
        return elsewhere(x)
    if layout == "offset":
        long = x.new_full((x.numel() + 1,), math.nan if x.is_floating_point() else -1)
        long[1:] = x.flatten()
        return long[1:].view(x.shape)
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "expanded" and x.dim() and x.shape[0]:
        return x[:1].clone().expand(x.shape)
    if layout == "odd" and x.numel():
        return x.as_strided(x.shape, [3 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)])
    return x


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of a description; `str` is the id, of characters that pytest's -k takes: `Description.case` makes it again."""

    description: Description
    dtype: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    upstream: str = "random"
    grad: str = "all"
    seed: int = 0

    def __str__(self) -> str:
        options = {n: self.description.labels(n)[self.description.options[n].index(v)] for n, v in self.options.items()}
        styles = {n: self.values.get(n, "plain") for n in self.description.tensors}
        styles = {n: s + "+" + self.layouts.get(n, "contiguous") for n, s in styles.items()}
        parts = {**self.sizes, **options, **{n: s for n, s in styles.items() if s != "plain+contiguous"}}
        parts |= {"upstream": self.upstream, "grad": self.grad, "seed": self.seed}
        return "/".join([self.dtype, *(f"{n}:{v}" for n, v in parts.items())])

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As Hypothesis prints it: to be pasted behind the description's name."""
        printer.text(f"case({str(self)!r})")

    @property
    def device(self) -> str:
        """Where its tensors are."""
        return self.description.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def inputs(self) -> dict[str, Any]:
        """Name -> tensor or option."""
        made = {n: t.make(n, self) for n, t in self.description.tensors.items()}
        with torch.device(self.device):
            more = {n: make(self) for n, make in self.description.computed.items()}
        return {**made, **self.options, **more}

    def check_parity(self, function: Any, definition: Any, **more: Any) -> Parity:
        """The record of the judgement on this case; arguments as of `parity.testing.check_parity`."""
        return self._verdict(function, definition, more)[1]()

    def _verdict(self, function: Any, definition: Any, more: Any) -> tuple[Parity, Callable[[], Parity]]:
        leaves = None if self.grad == "all" else () if self.grad == "none" else (self.grad,)
        given = {"grad": leaves, "cotangent": self.upstream, "seed": self.seed} | more
        return verdict(function, definition, self.inputs, **given)

    def assert_parity(self, function: Any, definition: Any, **more: Any) -> None:
        """Raise `ParityError` of the smallest case that fails in the same way, with its id; a crash has the id as a note."""
        __tracebackhide__ = True
        try:
            parity, explained = self._verdict(function, definition, more)
        except Exception as crash:
            crash.add_note(f"case {self}")
            raise
        smallest, hypothesis = self, sys.modules.get("hypothesis")
        if not parity.agrees and not (hypothesis and hypothesis.currently_in_test_context()):  # which shrinks by itself
            smallest, explained = self._smallest(function, definition, more, parity, explained)
        raise_unless(dataclasses.replace(explained(), case=str(smallest)))

    def _smallest(self, function: Any, definition: Any, more: Any, whole: Parity, why: Any) -> tuple[Case, Any]:
        """A simpler case that fails as clearly in the worst quantity, or in a part of the protocol, and what explains it."""
        case, seen, others = self, {str(self)}, self._simpler()
        while (other := next(others, None)) is not None and len(seen) <= TRIES:
            if str(other) not in seen:
                seen.add(str(other))
                with contextlib.suppress(Exception):  # a crash is another failure
                    found, explained = other._verdict(function, definition, more)
                    if _stands_for(found, whole):
                        case, why, others = other, explained, other._simpler()
        return case, why

    def _simpler(self) -> Iterator[Case]:
        for name, size in self.sizes.items():
            low = self.description.sizes[name][0]
            for smaller in dict.fromkeys((max(low, 1), size // 4, size // 2, size - 1)):
                if low <= smaller < size:
                    yield dataclasses.replace(self, sizes={**self.sizes, name: smaller})
        yield dataclasses.replace(self, upstream="random")
        yield dataclasses.replace(self, grad="all")
        for name in self.layouts:
            yield dataclasses.replace(self, layouts={n: v for n, v in self.layouts.items() if n != name})
        for name in self.values:
            yield dataclasses.replace(self, values={n: v for n, v in self.values.items() if n != name})
        for name, value in self.options.items():
            if value != self.description.options[name][0]:
                yield dataclasses.replace(self, options={**self.options, name: self.description.options[name][0]})


def _stands_for(found: Parity, whole: Parity) -> bool:
    """Whether a verdict shows the worst quantity of another as clearly, or a part of the protocol that does not hold there."""
    if not whole.wrong:
        return not found.failing.isdisjoint(whole.failing)
    worst = next(iter(whole.wrong))
    return worst in found.wrong and as_clear(found.wrong[worst].headroom, whole.wrong[worst].headroom)


@dataclasses.dataclass(frozen=True)
class Description:
    """Tensors, options, and the range of each dimension; `draw` makes one."""

    tensors: Mapping[str, Tensor]
    options: Mapping[str, Sequence[Any]]
    computed: Mapping[str, Callable[[Case], Any]]
    sizes: Mapping[str, tuple[int, int]]
    dtypes: Sequence[str]
    seed: int = 0
    device: str | None = None
    tall: str | None = None
    bounds: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    def labels(self, option: str) -> list[str]:
        """The values of an option as ids have them."""
        words = [str(v) if isinstance(v, str | int | float | None) else "" for v in self.options[option]]
        return [word if re.fullmatch(r"[\w.+-]+", word) else f"[{i}]" for i, word in enumerate(words)]

    def cases(self, count: int = 24) -> list[Case]:
        """`count` cases, the same each time; sizes, layouts, and values within each dtype, are dealt like cards."""
        cases: list[Case] = []
        edges = collections.Counter[str]()
        for i in range(count):
            pick = functools.partial(_in_turn, self.seed, i)
            dtype = pick("dtype", self.dtypes)
            # an edge has a random upstream gradient and all gradients; what it would have had is the next case's
            shown = functools.partial(_in_turn, self.seed, i - len(self.dtypes) * edges[dtype])
            cases.append(self._dealt(i, pick, self.seed + i // 24, shown))
            edges[dtype] += self._edge(cases[-1].sizes)
        return cases

    def _edge(self, sizes: Mapping[str, int]) -> bool:
        """Whether a dimension that may be larger has a size of 0 or 1, or one is larger than others ever are."""
        return any(n < 2 <= self.sizes[name][1] or n > self.sizes[name][1] for name, n in sizes.items())

    def parametrize(self, count: int = 24, also: Sequence[str] = ()) -> Any:
        """A decorator for a pytest function with the argument `case`: cases by id, those of `also` first."""
        import pytest

        ids = [id for id in REPLAYED if self._has(id)]
        cases = [*map(self.case, also), *self.cases(count)] if not REPLAYED else map(self.case, ids)
        return pytest.mark.parametrize("case", list(cases), ids=str)

    def _has(self, id: str) -> bool:
        try:
            return str(self.case(id)) == id
        except ValueError:
            return False

    def strategy(self) -> Any:
        """A Hypothesis strategy of the same cases, which shrinks by size, option, layout and values."""
        from hypothesis import strategies as st

        @st.composite
        def cases(draw: Any) -> Case:
            return self._dealt(draw(st.integers(0, 1 << 16)), lambda _, some, each=1: draw(st.sampled_from([*some])))

        return cases()

    def case(self, id: str) -> Case:
        """The case of an id.

        Raises:
            ValueError: for an id that is none of this description's.
        """
        dtype, *parts = id.split("/")
        given = dict(part.partition(":")[::2] for part in parts)
        try:
            styles = {n: given[n].split("+") for n in self.tensors if n in given}
            sizes = {n: int(given[n]) for n in self.sizes}
            words = [(dtype, DTYPES), (given["upstream"], UPSTREAM)]
            for value, layout in styles.values():
                words += [(value, VALUES + REPEATS), (layout, LAYOUTS)]
            odd = [word for word, known in words if word not in known] + [n for n, size in sizes.items() if size < 0]
            if odd:
                raise ValueError(odd[0])
            return Case(
                self,
                dtype,
                sizes,
                {n: v[self.labels(n).index(given[n])] for n, v in self.options.items()},
                {n: s for n, (s, _) in styles.items() if s != "plain"},
                {n: s for n, (_, s) in styles.items() if s != "contiguous"},
                given["upstream"],
                given["grad"],
                int(given["seed"]),
            )
        except (KeyError, ValueError, IndexError) as error:
            raise ValueError(f"{id!r} is no id of this description: {error}") from error

    def _large(self, sizes: Mapping[str, int]) -> bool:
        found = math.prod(n for name, n in sizes.items() if name not in self.bounds) if self.bounds else 0  # of a table
        return found > FOUND or any(math.prod(t.shape(sizes)) > LARGEST for t in self.tensors.values())

    def _dealt(
        self, seed: int, pick: Callable[..., Any], turn: int | None = None, shown: Callable[..., Any] | None = None
    ) -> Case:
        """`pick`: (name of a dimension, its choices, of how many cases in turn each has one) -> one of them; `shown`: of what an
        edge would not show."""
        dtype, each = pick("dtype", self.dtypes), len(self.dtypes)
        ones = {n: 1 for n, (low, high) in self.sizes.items() if low <= 1 < high}
        edges = [ones, *({n: 1} for n in ones), *2 * [{n: 0} for n, (low, _) in self.sizes.items() if low == 0]]
        first, styles, dims = next(((n, t.values, t.dims) for n, t in self.tensors.items()), ("", (), ()))
        values = {n: pick(f"{n} values {dtype}", t.values, each) for n, t in self.tensors.items()}
        last = next((str(d) for d in dims[-1:] if self.sizes.get(str(d), (0, 0))[1] > BLOCK), "")
        beyond: dict[str, int] = {n: s[min(self.dtypes.index(dtype), len(s) - 1)] for n, s in self.bounds.items()}
        beyond |= {self.tall: TALL} if self.tall else {}
        most = [{n: beyond.get(n, high)} for n, (low, high) in self.sizes.items() if low < high > 1]
        if turn is None:
            edges += [{}, *most]
        else:  # of 24 cases two have a size of 0, two one of 1, once beside others above it, and in each dtype one the largest
            turn += self.dtypes.index(dtype)
            edges = edges[::-1][turn % each :: each][: 24 // each - 1]
            room = 24 // each - len(edges)  # where it is short, several are the largest together
            most = [{n: high for one in most[i::room] for n, high in one.items()} for i in range(min(room, len(most)))]
            alike = [s for s in SIZES if all(max(low, 2) <= s <= high for low, high in self.sizes.values())]
            others: list[dict[str, int]] = [{}] * (room - len(most))
            if others and alike and turn % each == 0:
                others[0] = dict.fromkeys(self.sizes, alike[len(alike) // 2])  # a square
            edges += others + most
            edges[1:] = random.Random(turn).sample(edges[1:], len(edges) - 1)
            at = next((i for i, one in enumerate(edges) if one.get(last, 0) > BLOCK), 0)
            if at and "large" in styles and len(styles) == len(edges):  # the widest rows are of values that grow
                to = styles.index("large")
                edges[at], edges[to] = edges[to], edges[at]
        # dealt as the first tensor's values are, if as many: one of 0 beside "plain", which loses least
        edge = pick(f"{first} values {dtype}", edges, each)
        if last and not edge and values[first] == "large":
            edge = {last: self.sizes[last][1]}
        sizes = {}
        for n, (low, high) in self.sizes.items():
            sizes[n] = edge.get(n, pick(n, [s for s in (low, *SIZES, high) if max(low, 2) <= s <= high] or [high]))

        def halve(name: str, least: int, beside: Sequence[str] | None = None, most: int | None = None) -> None:
            """While a tensor is too large with all sizes, or with those `beside` alone; or the product of all is above `most`."""
            while sizes[name] > least:
                of = {n: s if beside is None or n in (name, *beside) else 1 for n, s in sizes.items()}
                if not (self._large(of) if most is None else math.prod(of.values()) > most):
                    return
                sizes[name] = max(least, sizes[name] // 2)

        for name in (n for n in edge if n in beyond):
            halve(name, SMALL, beside=())
        for bound in (n for n in self.bounds if edge.get(n) == beyond[n]):
            rest = sorted((n for n in sizes if n != bound), key=lambda n: -sizes[n])
            for name in rest:
                halve(name, 1, beside=(bound,))
            for name in rest:
                halve(name, 1, most=WORK_OF_IDS)
        for name in sorted(sizes, key=lambda n: (edge.get(n, 0) < 2, -sizes[n]))[1:]:  # the longest stays
            halve(name, 1)
        if self.tall is not None and self.tall in edge:
            halve(self.tall, SMALL, most=WORK)
        floating = [n for n, t in self.tensors.items() if t.below is None]
        layouts = {n: pick(f"{n} layout", t.layouts) for n, t in self.tensors.items()}
        asked = [("random", n) for n in ("all", *floating)] + [(u, "all") for u in UPSTREAM] + [("ones", "none")]
        upstream, grad = asked[0] if self._edge(sizes) else (shown or pick)(f"upstream {dtype}", asked, each)
        return Case(
            self,
            dtype,
            sizes,
            {n: pick(n, v) for n, v in self.options.items()},
            {n: v for n, v in values.items() if v != "plain"},
            {n: v for n, v in layouts.items() if v != "contiguous"},
            upstream,
            grad,
            seed,
        )


def _in_turn(seed: int, number: int, name: str, choices: Sequence[Any], each: int = 1) -> Any:
    """The choice of this number: all come, in an order of their own, before one comes again."""
    round_, place = divmod(number // each, len(choices))
    return random.Random(f"{seed}/{name}/{round_}").sample(choices, len(choices))[place]


def draw(
    sizes: Mapping[str, int | tuple[int, int]] | None = None,
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
    seed: int = 0,
    device: str | None = None,
    **spec: Any,
) -> Description:
    """A description of inputs.

    Args:
        sizes: dimension -> its largest size, or (smallest, largest). Default: up to 64, the last dimension of the first tensor
            and of indices up to 2,049, the first of the first tensor once in each dtype up to 1,025 if a tensor lacks it, whose
            gradient is then a sum over it; from 1, that one from 0 if it has another or is an index, and bounds no index. One
            that bounds an index is once in each dtype 1,025 (257 if a tensor of three dimensions has it), in the first 65,535.
        dtypes: those of the tensors that have none of their own.
        seed: of the cases.
        device: of the tensors; default: the GPU if there is one. The same id has the same values on each.
        spec: input -> `tensor(...)`, `index(...)`, a list of options, or a function (case) -> value, such as
            `lambda case: torch.randn(case.sizes["N"] + 1)`; `case.dtype` is "fp32", "bf16" or "fp16".
    """
    tensors = {n: t for n, t in spec.items() if isinstance(t, Tensor)}
    options = {n: list(v) for n, v in spec.items() if isinstance(v, list | tuple)}
    computed = {n: f for n, f in spec.items() if callable(f)}
    if taken := {"upstream", "grad", "seed"} & set(spec):
        raise ValueError(f"an input has another name than {taken.pop()!r}, which ids use")
    if odd := [n for n in spec if n not in {**tensors, **options, **computed}]:
        raise ValueError(
            f"{odd[0]}={spec[odd[0]]!r}: give tensor(…), index(…), a list of options or a function of the case"
        )
    dims = [d for t in tensors.values() for d in (*t.dims, t.below) if isinstance(d, str)]
    first = next((t.dims for t in tensors.values()), ())
    indices = [t for t in tensors.values() if t.below is not None]
    wide = {*first[-1:], *(t.dims[-1] for t in indices)}
    empty = {*(first[:1] if len(first) > 1 or indices[:1] == [*tensors.values()][:1] else ())} - {
        t.below for t in indices
    }
    ranges: dict[str, tuple[int, int]] = {}
    for name in dict.fromkeys(dims):
        low, high = (0 if name in empty else 1), WIDE if name in wide else SMALL
        given = (sizes or {}).get(name, high)
        ranges[name] = (low, given) if isinstance(given, int) else (given[0], given[1])
    if unknown := set(sizes or ()) - set(ranges):
        raise ValueError(f"sizes={unknown}: the dimensions are {', '.join(ranges)}")
    bounds = {t.below for t in indices} | wide | {*(sizes or {})}
    summed = len(first) > 1 and any(first[0] not in t.dims for t in tensors.values() if t.below is None)
    tall = first[0] if summed and isinstance(first[0], str) and first[0] not in bounds else None
    beyond: dict[str, Sequence[int]] = {}
    for name in (n for n in ranges if n in {t.below for t in indices} - {*(sizes or {})}):
        high, experts = ranges[name][1], any(len(t.dims) > 2 for t in tensors.values() if name in t.dims)
        beyond[name] = [max(high, FEW_IDS)] if experts else [IDS, max(high, TALL)]
    return Description(tensors, options, computed, ranges, tuple(dtypes), seed, device, tall, beyond)
