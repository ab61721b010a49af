"""Random rounding of every operation (Monte Carlo arithmetic): what correct code would be off on the same inputs.

An implementation declares a `Recipe`. A *replica* is the float64 oracle run again with every rounded operation, forward
and backward, perturbed by the unit roundoff of that recipe (Monte Carlo arithmetic, Parker 1997; Denis et al. 2016,
doi:10.1109/ARITH.2016.31). The spread of the replicas is the unit in which the judge measures an error. A family's author
writes the definition and nothing else.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from parity.judge.blocks import ETA, FAINT, NEARLY, on_grid
from parity.judge.identities import Stored, Through, in_front
from parity.judge.long_sums import LANES, MANY, drift, mass_of_maxima
from parity.judge.noise import Noise
from parity.judge.products import SPLIT_FROM, cut, split
from parity.judge.recipe import HALF_SUBNORMAL, LARGEST, NARROW, UNIT_ROUNDOFF, Recipe

_MATMULS = ("mm", "bmm")
_SUMS = ("sum", "mean", "cumsum")
_EXACT = frozenset(
    """view _unsafe_view t transpose permute expand unsqueeze squeeze slice slice_backward select select_backward gather
    index_select index scatter scatter_add where masked_fill minimum maximum clamp clamp_min
    clamp_max neg abs sign clone detach alias _to_copy lift_fresh zeros_like ones_like new_zeros new_ones
    new_empty ones zeros full full_like scalar_tensor empty_like empty amax amin max min cat stack split
    split_with_sizes unbind as_strided index_put embedding embedding_dense_backward sort topk
    nan_to_num flip roll round floor ceil heaviside unfold constant_pad_nd value_selecting_reduction_backward repeat
    expand_copy arange rand tril triu diagonal diagonal_backward histc""".split()
)

_COMPARING = frozenset(
    """gt ge lt le eq ne logical_not logical_and logical_or logical_xor count_nonzero nonzero any all sign sgn floor
    ceil""".split()
)
"""Operations of the forward pass that see as 0 whatever is below float32's range."""
_LOGARITHMS = frozenset(("log", "log2", "log10"))
"""They see an exact zero as 0: of its noise they are -665 or no number. exp(-600) is none."""

ONE_SIDED = 0.5
"""Mean error of an exponential, at most, in u: a library's is off by an ulp, and by more on one side than on the other. On an
H200 torch's was 0.16 u too large for numbers of ±0.02, where exp(r) - r - 1 keeps nothing else; on a CPU 0.01 u too small."""
MANY_TERMS = 1024
"""Terms of a product's sum from which on equal ones drift."""
MANY_PARTS = 16
"""Terms of a sum from which on its partial sums may be many times their size."""


def walk(terms: float) -> float:
    """What a sum of n terms is off by, in u·Σ|x|: max(2, √n/2). Few rows, and a loss of token after token, are summed one term
    after another: the random walk of Higham and Mary (2019), √n·u, halved."""
    return float(max(2.0, terms**0.5 / 2))


def _in_turn(terms: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The terms of a sum over some dimensions along the last one: a kernel adds the rows of all sequences to one total."""
    last = terms.movedim(tuple(dims), tuple(range(-len(dims), 0))).flatten(-len(dims))
    return last.unsqueeze(0) if any(d % terms.dim() == 0 for d in dims) else last


class MonteCarlo(TorchDispatchMode):
    """Round every operation of a float64 computation, forward and backward, as a `Recipe` would.

    docs/judging.md, "How a replica rounds", has the rule of each operation. Results that no rounding touches are left
    unchanged. With `own_grids` the grids of the first replicas are not stretched, for what is systematic about the numbers
    that a dtype has (a float32 head, rounded, may be the teacher's; two values nearly alike may lie on both sides of a tie).
    """

    drifts = False
    """Whether sums of the forward pass drift as those of the backward pass do."""

    def __init__(self, recipe: Recipe, dtype: str, seed: int, own_grids: int = 0, width: int | None = 1):
        super().__init__()
        self.own_grids = own_grids
        self.width = width or 1
        self.recipe = recipe.resolve(dtype)
        self.dtype = dtype
        self.noise = Noise(seed, alone=width is None)
        self.backward = False
        self.quiet = False
        self.u_sum = UNIT_ROUNDOFF["fp32"]
        self.take(self.recipe.elementwise, self.recipe.softmax)

    def take(self, elementwise: str, softmax: str) -> None:
        """Round elementwise operations to `elementwise` and a log-softmax to `softmax` from here on."""
        self.elementwise, self.softmax = elementwise, softmax
        self.u = UNIT_ROUNDOFF[elementwise]
        self.largest = LARGEST[elementwise] if elementwise == "fp16" else None
        self.largest_exp = LARGEST[elementwise]

    def __enter__(self) -> Self:
        RUNNING.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        RUNNING.pop()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        below = NEARLY if func._opname in _COMPARING or kwargs.get("dtype") is torch.bool else 0.0
        below = FAINT if func._opname in _LOGARITHMS else below
        if below and not (self.quiet or self.backward):
            args = [_zero_as_such(a, below) for a in args]
        return self.operation(func, args, kwargs)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of one operation as the recipe rounds it."""
        out, name = func(*args, **kwargs), func._opname
        if name == "log_sigmoid_forward" and not self.quiet:  # alone rounds among those of several results
            return self.rounded(out[0]), out[1]
        if self.quiet or rounds_nothing(name) or not torch.is_tensor(out) or not out.is_floating_point():
            return out
        if name in _MATMULS:
            return self.product(out, args[0], args[1])
        if name in _SUMS:
            unit = walk(args[0].numel() / max(out.numel(), 1)) * self.u_sum
            scale = func(args[0].abs(), *args[1:], **kwargs).mul_(unit)
            dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
            if (self.backward or self.drifts) and dims and (n := math.prod(args[0].shape[d] for d in dims)) >= MANY:
                off = self._drift(_in_turn(args[0], dims), -1).reshape(out.shape)
                out = out + (off / n if name == "mean" else off)
            partial = self.u_partial() if self.backward else 0.0
            if partial:  # a bias gradient is summed across chunks as the head's is
                out = torch.where(scale > unit * self.range_partial(), torch.inf, out)
                root = func(args[0].square(), *args[1:], **kwargs).sqrt_()
                scale = scale + self.off_in_parts(root)
                if len(dims) == 1 and (here := self.loses(root, args[0].shape[dims[0]])) is not None:
                    pieces = args[0].chunk(min(self.recipe.partials, args[0].shape[dims[0]]), dims[0])
                    out = out + self.lost(func(piece, *args[1:], **kwargs) for piece in pieces) * here
            return self.rounded(self.scattered(out, scale))
        if name == "_log_softmax":
            return self.rounded(self.log_softmax(out, args[0], args[1]), self.softmax)
        if name == "_log_softmax_backward_data":
            total = args[0].sum(args[2], keepdim=True).abs_()
            flushed = total * ETA  # p·Σg with a p below the smallest normal
            scale = (args[0].abs() + (out - args[0]).abs_()).mul_(self.u_sum) + flushed
            own = self.noise.constant(math.pi, out) > 0  # a log-sum-exp of its own, by autograd
            scale = scale + own * total * self._through_maxima(out, args[1], args[2])
            if args[0].shape[args[2]] >= MANY:
                scale = scale + args[1].exp() * self._drift(args[0].abs(), args[2]).abs()
            if self.recipe.log_sum_exp:
                out = torch.where(self._stored_sum(out), self._through_stored_sum(*args[:3]), out)
            else:
                out = torch.where(own, args[0] - args[1].softmax(args[2]) * args[0].sum(args[2], keepdim=True), out)
            return self.rounded(self.scattered(out, scale), self.softmax)
        if name == "logsumexp":  # the sum of exponentials rounds relatively, so its logarithm by an absolute amount
            keep = bool(args[2]) if len(args) > 2 else kwargs.get("keepdim", False)
            terms = (args[0] - args[0].logsumexp(args[1], keepdim=True)).exp()
            off = self._drift(terms, args[1][0]).sum(args[1], keepdim=keep)
            out = self.scattered(out, self.u_sum * (2 * out.abs() + 1)) + off
            if self.u > NARROW:
                out = out + self.off(out - args[0].amax(args[1], keepdim=keep), self.elementwise)
            return self.rounded(out)
        if name == "tanh" and self.recipe.tanh == "sigmoid":
            return self.rounded(self.noise.shaken(out, torch.full_like(out, 2 * self.u)))
        if name == "exp":  # finite in float64, but not in the recipe's dtype: the ratio of a token that is far off
            beyond = not (out.numel() and out.amax().item() <= self.largest_exp)
            out = torch.where(out > self.largest_exp, torch.inf, out) if beyond else out
            if self.u < NARROW:
                out = out * (1 + ONE_SIDED * self.u * self.noise.constant(math.e, out))
            return self.rounded(out)
        if name in ("mul", "div") and self.elementwise == "fp32" and _is_rounded(args[1]):
            out = out * (1 + self.u * self.noise.constant(args[1], out))
        if name == "pow" and self.elementwise == "fp32":
            out = self._power(out, args[0], args[1])
        return self.rounded(out)

    def _power(self, out: torch.Tensor, base: Any, exponent: Any) -> torch.Tensor:
        """`out` = base**exponent, where float32 rounds a Python number among the two: 0.99**t is off by t·u."""
        if _beyond_float32(base):
            off = self.u * self.noise.constant(base, out) * exponent
        elif _beyond_float32(exponent):
            off = self.u * self.noise.constant(exponent, out) * exponent * base.abs().log()
        else:
            return out
        return torch.where(out.isfinite() & (out != 0), out * off.exp(), out)

    def upstream(
        self, given: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Upstream gradients, that of a loss rounded in each replica as the recipe takes it, without the factor that is last."""
        dtype = self.recipe.cotangent
        with self.unrounded():
            given = {n: g.double() / self.recipe.upstream for n, g in given.items()}
            if UNIT_ROUNDOFF[dtype] <= NARROW:
                return given
            return {n: g if g.dim() else self._grid(g.expand_as(outputs[n]), dtype) for n, g in given.items()}

    def log_softmax(self, out: torch.Tensor, z: torch.Tensor, dim: int) -> torch.Tensor:
        """`out` = log-softmax of z before it is stored."""
        top = out.amax(dim, keepdim=True)
        lse = (z.amax(dim, keepdim=True) - top).nan_to_num_(0.0, 0.0, 0.0).abs_() * self._shifted(out)
        top = top.nan_to_num_(0.0, 0.0, 0.0)
        scale = 2 * self.u_sum * lse
        on_the_way = self.recipe.log_sum or self.softmax
        if UNIT_ROUNDOFF[on_the_way] > NARROW:
            out = out - self.off(-top, on_the_way)
        else:
            scale = scale + UNIT_ROUNDOFF[on_the_way] * (1 + top.abs())
        out = out + (self.scattered(top, scale) - top) - self._drift(out.exp(), dim)
        if self.recipe.log_sum_exp:
            whole = z.amax(dim, keepdim=True) - top
            off = (self._grid(whole, self.recipe.log_sum_exp) - whole).nan_to_num_(0.0, 0.0, 0.0)
            out = torch.where(self._stored_sum(out), self._grid(out - off, self.recipe.log_sum_exp), out)
        return out

    def _through_stored_sum(self, grad: torch.Tensor, logps: torch.Tensor, dim: int) -> torch.Tensor:
        """grad - p·Σgrad, where p, Σgrad and their product are each stored as the log-sum-exp is."""
        dtype = self.recipe.log_sum_exp
        assert dtype is not None
        p, total = self._grid(logps.exp(), dtype), self._grid(grad.sum(dim, keepdim=True), dtype)
        return grad - self._grid(p * total, dtype)

    def _through_maxima(self, out: torch.Tensor, logps: torch.Tensor, dim: int) -> torch.Tensor:
        """What the gradient of a maximum is off by, in Σgrad.

        logsumexp(z) = m + log Σ exp(z - m) for any m: the gradient of m is 1 - Σp = 0, or what rounding leaves of it.
        """
        unit = 2 * self.u_sum + self._drift(logps.exp(), dim).abs()
        if UNIT_ROUNDOFF[self.softmax] > NARROW:  # the sum is stored so, and divides each term
            unit = unit + 2 * UNIT_ROUNDOFF[self.softmax]
        return unit * mass_of_maxima(logps[:1], dim)

    def _stored_sum(self, out: torch.Tensor) -> torch.Tensor:
        """Half of the replicas, the same ones forward and backward, (R, 1, …): those that store a narrow log-sum-exp."""
        return self.noise.constant(math.e, out) > 0

    def off(self, log_sum: torch.Tensor, dtype: str) -> torch.Tensor:
        """By how much log Σ exp(z - max) is off: torch's CPU kernels round the sum and its logarithm to a narrow dtype.

        Equal sums are off alike, and a single possible token is not: the logarithm of 1 is 0 in any dtype.
        """
        stored = self._grid(self._grid(log_sum.exp(), dtype).log(), dtype)
        return torch.where(torch.isfinite(stored) & (log_sum > 0), stored - log_sum, 0.0)

    def _drift(self, terms: torch.Tensor, dim: int) -> torch.Tensor:
        """Of their sum in float32, added in turn in half of the replicas and in 16 lanes in the others."""
        return drift(terms, dim, torch.where(self.noise.each(terms) > 0, 1, LANES), self.noise.stretch(terms))

    def saved_output(self, x: torch.Tensor) -> torch.Tensor:
        """A returned value that a backward pass reads again: as it was stored in half of the replicas."""
        narrow = self.store(x, self.recipe.kept or self.dtype)
        return x if narrow is x else torch.where(self.noise.constant(math.tau, x) > 0, narrow, x)

    def _shifted(self, out: torch.Tensor) -> torch.Tensor:
        """√2 in half of the replicas and 0 in the others, (R, 1, …): two correct algorithms for a log-softmax.

        A kernel stores the log-sum-exp, whose rounding all log-probs of the row share; torch subtracts the largest logit
        first and has no such error. Where a later step is far from linear (a tail 1 - Σp of 1e-7) the smaller error is
        not the milder one.
        """
        return (self.noise.each(out) > 0) * 2**0.5

    def scattered(self, out: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """out + scale·ξ, as it is where either is not finite: what is equal in both is off alike in a replica."""
        shaken = self.noise.shaken(out, scale)
        if _finite(shaken):
            return shaken
        finite = (out.abs() <= _HUGE) & (scale <= _HUGE)
        inside = (x.expand_as(out).masked_fill(~finite, 0.0) for x in (out, scale))
        return torch.where(finite, self.noise.shaken(*inside), out)

    def rounded(self, out: torch.Tensor, dtype: str | None = None) -> torch.Tensor:
        """A result as rounded to `dtype` (none: the recipe's for elementwise operations) on its grid, and off by η·ξ, an exact
        zero by hardly anything."""
        dtype = self.elementwise if dtype is None else dtype
        given = out if _finite(out) else out.clamp(-_HUGE, _HUGE)
        noisy = on_grid(given, dtype, self._stretch(given), self.noise.like(given))
        if self.backward and dtype == "fp16" and UNIT_ROUNDOFF[self.softmax] <= NARROW:
            # a kernel with a float32 log-softmax stores nothing on the way to the logits' gradient: half flush nothing
            tiny = given.abs() < torch.finfo(torch.float16).smallest_normal
            noisy = torch.where(tiny & (self.noise.constant(LARGEST[dtype], out) > 0), given, noisy)
        if given is not out:
            noisy += out - given  # nothing, but for infinities
        return noisy if self.largest is None else _overflowing(noisy, self.largest)

    def _grid(self, x: torch.Tensor, dtype: str, stretch: torch.Tensor | None = None) -> torch.Tensor:
        """x rounded to the bits of `dtype`, subnormals to its quantum, on a grid stretched, at random unless told.

        In a narrow dtype equal values round equally and close ones alike: logits saturated by a softcap tie exactly, a
        nearly flat distribution moves as one, and a thousand equal probabilities of 3.6 quanta all become 4.
        Independent noise never does that.
        """
        return on_grid(x, dtype, self._stretch(x) if stretch is None else stretch)

    def _stretch(self, x: torch.Tensor) -> torch.Tensor:
        """A factor in 1 to 2, one a replica: (R, 1, …)."""
        stretch = self.noise.stretch(x)
        if self.own_grids > 0 and x.dim() > 0:
            stretch = stretch.clone()
            stretch[: None if self.noise.alone else self.own_grids] = 1.0
        return stretch

    def product(
        self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`out` = a·b + `beside`, (…, M, N), as the recipe multiplies, before the result is rounded."""
        matmul = torch.bmm if a.dim() == 3 else torch.mm
        precision = self.recipe.matmul_backward if self.backward else self.recipe.matmul
        if precision != "ieee":
            a, b = (cut(x, precision, self._stretch(x)) for x in (a, b))
            out = matmul(a, b) if beside is None else matmul(a, b) + beside
        real, size = self._in_float32(a, b)
        real = real if beside is None else real + beside
        out = torch.where(torch.isfinite(real), real, out)
        if self.recipe.reduction != "fp32" and a.shape[-1] >= SPLIT_FROM:
            u = UNIT_ROUNDOFF[self.recipe.reduction]
            for part in split(a, b, self.noise.choice((2, 4, 8, 16))):
                out = out + part.mul_(u).mul_(self.noise.like(part))
        bounded = self.backward and self.range_partial() < torch.inf
        beyond = size > self.range_partial() if bounded else None
        out = self.scattered(out, size.mul_(walk(a.shape[-1]) * self.u_sum))
        if beyond is not None:
            out = torch.where(beyond, torch.copysign(torch.full_like(out, torch.inf), out), out)
        if a.shape[-1] == 1 and not self.backward and self.recipe.logits in ("fp16", "bf16"):
            # two short mantissas, summed with nothing: along a row, or a column, h = 2 - 2⁻⁷ rounds every product up
            row, column = self.noise.like(out[..., :1]), self.noise.like(out[..., :1, :])
            out = out + out * (row + column) * UNIT_ROUNDOFF[self.recipe.logits]
        partial = self.u_partial() if self.backward else 0.0
        if partial and self.recipe.partial_terms:
            out = self._added(a, b)
        elif partial:
            root = matmul(a * a, b * b).sqrt_()
            out = self.scattered(out, self.off_in_parts(root))
            if (here := self.loses(root, a.shape[-1])) is not None:
                out = out + self.lost(split(a, b, min(self.recipe.partials, a.shape[-1]))) * here
        return out

    def _in_float32(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a·b and |a|·|b| as float32 sums them here, the operands on a grid stretched at random: equal terms drift alike."""
        matmul = torch.bmm if a.dim() == 3 else torch.mm
        by_a = self.noise.stretch(a) / 2  # below 1: what float32 holds stays finite
        by_b = self.noise.stretch(b) / 2 if b.dim() == 3 else 1.0
        left, right = (a * by_a).float(), (b * by_b).float()
        by = by_a * by_b
        size = matmul(left.abs(), right.abs()).double() / by
        if a.dim() == 3 and a.shape[-1] >= MANY_TERMS:
            # a kernel adds in lanes, or in turn, as those for two rows do: equal terms drift up to twenty times as far
            half = (len(left) + 1) // 2 if len(left) > 1 else self.noise.choice((0, 1))
            out = [torch.bmm(left[:half].contiguous(), right[:half].contiguous())]
            for i, (rows, columns) in enumerate(zip(left[half:], right[half:], strict=True)):
                whole = (i if half else self.noise.choice((0, 1))) % 2
                pieces = [rows] if whole else rows.split(2)
                out.append(torch.cat([torch.mm(piece, columns) for piece in pieces]).unsqueeze(0))
            return torch.cat(out).double() / by, size
        return matmul(left, right).double() / by, size

    def lost(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """By how much a sum is off when its parts are added one by one to a total in the dtype of `accumulate`.

        Of n parts of one sign the last ones meet a total n times their size: no random walk of the parts' own roundings.
        Half of the replicas begin with the last part, as autograd does.
        """
        parts = list(parts)
        rows = len(parts[0]) if parts[0].dim() else 0
        turned = rows // 2 if rows > 1 else rows * self.noise.choice((0, 1))
        total, exact = self._totals(
            torch.cat([last[:turned], first[turned:]]) if turned else first
            for first, last in zip(parts, reversed(parts), strict=True)
        )
        return (total - exact).nan_to_num_(0.0, 0.0, 0.0)

    def loses(self, root: torch.Tensor, terms: int) -> torch.Tensor | None:
        """Where a sum of so many terms loses what `lost` says, 1 or 0, given √Σ terms²; None for nowhere. Few terms do in
        float16 where parts may be subnormal: equal ones are rounded to the same side."""
        if terms >= MANY_PARTS:
            return torch.ones((), device=root.device)
        if terms < 2 or self.recipe.accumulate != "fp16":
            return None
        faint = root < torch.finfo(torch.float16).smallest_normal * self.recipe.partials**0.5
        return faint if bool(faint.any()) else None

    def _totals(self, parts: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the parts, each stored and added to what is stored on one grid; and the sum itself."""
        dtype, stretch, total, exact = self.recipe.accumulate, None, torch.zeros(()), torch.zeros(())
        for part in parts:
            stretch = self._stretch(part) if stretch is None else stretch
            total = self._grid(total + self._grid(part, dtype, stretch), dtype, stretch)
            exact = exact + part
        return total, exact

    def _added(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a·b as partial products of `partial_terms` terms, each rounded and added to what is stored, in any order.

        On one grid: a part below half a unit of the total is lost and adds no rounding, so the error is no random walk.
        """
        pieces = -(-a.shape[-1] // self.recipe.partial_terms)
        parts = torch.stack([p if p.dim() == 3 else p.unsqueeze(0) for p in split(a, b, pieces)])
        order = self.noise.like(parts.new_empty(parts.shape[:2])).argsort(0)
        parts = parts.gather(0, order[..., None, None].expand_as(parts))
        total, _ = self._totals(parts)
        return total if a.dim() == 3 else total[0]

    def u_partial(self) -> float:
        """Relative spread from summing `partials` partial gradients in a narrow dtype."""
        if self.recipe.accumulate == "fp32" or self.recipe.partials <= 1:
            return 0.0
        return UNIT_ROUNDOFF[self.recipe.accumulate] * self.recipe.partials**0.5

    def off_in_parts(self, root: torch.Tensor) -> torch.Tensor:
        """By how much partial gradients stored one by one put their sum off, given √Σ terms²: u·√n of it for n of them,
        and below the normal numbers η·√n, half a quantum each, at most the root itself: a part below η is lost whole."""
        lost = HALF_SUBNORMAL[self.recipe.accumulate] * self.recipe.partials**0.5
        return torch.maximum(root.clamp(max=lost), root * self.u_partial())

    def range_partial(self) -> float:
        """Beyond which a sum of partial gradients, without the upstream gradient, may overflow the dtype that holds it."""
        held = self.u_partial() > 0.0 or self.recipe.upstream < 1.0
        return LARGEST[self.recipe.accumulate] if held else torch.inf

    def stored(self, x: torch.Tensor, forward: str | None, backward: str | None, factor: float = 1.0) -> torch.Tensor:
        """x as if its value had been stored in dtype `forward` and its gradient in dtype `backward`; None: not stored.

        What is stored is x times `factor`, and the gradient with respect to that.
        """
        if forward in (None, "fp32") and backward in (None, "fp32"):
            return x
        return Stored.apply(x, self, forward, backward, factor)

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """x, whose gradient overflows where `accumulate` cannot hold it before the upstream gradient comes to it."""
        largest = self.range_partial()
        if largest == torch.inf:
            return x
        # the sum that makes a bias gradient may have one term
        return Through.apply(x, x.detach(), lambda grad: torch.where(grad.abs() > largest, torch.inf, grad))

    @contextlib.contextmanager
    def unrounded(self) -> Iterator[None]:
        """Operations within are not rounded by themselves. Where no other mode wants to see them, nobody is asked about them."""
        before, self.quiet = self.quiet, True
        alone = all(mode is self for mode in _get_current_dispatch_mode_stack())
        try:
            with torch._C._DisableTorchDispatch() if alone else contextlib.nullcontext():
                yield
        finally:
            self.quiet = before

    def spread(
        self,
        x: torch.Tensor,
        size: Callable[[], torch.Tensor],
        dtype: str,
        along: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x + δ with δ = 2·u·size·ξ, a rounding that the gradient of x does not see, or sees as δ times `along`'s."""
        with self.unrounded():

            def off(value: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
                error = self.scattered(value, 2 * UNIT_ROUNDOFF[dtype] * size) - value
                return error if _finite(error) else error.nan_to_num(0.0, 0.0, 0.0)

            error = in_front(off, x, size())
            if along is None or not x.requires_grad:
                return x + error
            direction = along()
            return x + error * (1 + direction - direction.detach())

    def shifted(self, x: torch.Tensor, size: Callable[[], torch.Tensor]) -> torch.Tensor:
        """x + 2·u·size·ξ in half of the replicas, one ξ a replica: what is equal stays so."""
        with self.unrounded():
            by = in_front(lambda x: self.noise.each(x).clamp(min=0) * (1 - 2 * (self.noise.each(x) > 0)), x)
            return x + (2 * self.u_sum * size().detach() * by).nan_to_num(0.0, 0.0, 0.0)

    def by_index(self, x: torch.Tensor, leaf: torch.Tensor, index: torch.Tensor, factor: float) -> torch.Tensor:
        """x, (R, …), to which factor·leaf[index] was added; in half of the replicas float32 sums the gradient of that by index,
        in turn, beside the rest: of 148,480 equal terms the last ones are rounded to a hundredth."""

        def off(grad: torch.Tensor) -> torch.Tensor:
            with self.unrounded():
                stretch = self.noise.stretch(grad).flatten(1)
                terms, where = (grad.flatten(1) * (factor * stretch)).float(), index.flatten()
                narrow = torch.zeros_like(leaf, dtype=torch.float32).index_add(1, where, terms).double()
                exact = torch.zeros_like(leaf).index_add(1, where, terms.double())
                found = (narrow - exact).nan_to_num_(0.0, 0.0, 0.0) / stretch
                return torch.where(self.noise.each(found) > 0, found, 0.0)

        with self.unrounded():
            return x + Through.apply(leaf, torch.zeros_like(x), off)

    def made_again(self, logps: torch.Tensor, z: torch.Tensor, size: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The log-softmax of z, whose gradient sees p·(1 + δ) for p in half of the replicas; `stages.log_softmax` has δ."""
        with self.unrounded():

            def off(z: torch.Tensor, logs: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
                top = logs.argmax(-1, keepdim=True)
                partition = z.gather(-1, top) - logs.gather(-1, top)
                off = self.scattered(z, size * self.u_sum) - z
                off = off + (self.scattered(partition, 2 * 2**0.5 * self.u_sum * partition.abs()) - partition)
                off = logs.exp() * off.nan_to_num_(0.0, 0.0, 0.0)
                return torch.where(self.noise.each(off) > 0, off, 0.0)

            more = in_front(off, z, logps, size())
            return logps + Through.apply(z, torch.zeros_like(logps), lambda grad: -more * grad.sum(-1, keepdim=True))

    def store(self, x: torch.Tensor, dtype: str | None, factor: float = 1.0) -> torch.Tensor:
        """x perturbed by the unit roundoff of `dtype`, infinite beyond its range; `factor` as in `stored`."""
        if dtype in (None, "fp32", "fp64"):
            return x
        assert dtype is not None
        with self.unrounded():
            given = x if _finite(x) else x.clamp(-_HUGE, _HUGE)
            y = _overflowing(self._grid(given if factor == 1.0 else given * factor, dtype), LARGEST[dtype])
            return y if factor == 1.0 else y.div_(factor)


def rounds_nothing(name: str) -> bool:
    """Whether an operation of this name moves, chooses or compares numbers, or writes in place."""
    return name in _EXACT or name[-1] == "_"


def _zero_as_such(x: Any, below: float) -> Any:
    """x, where it is a tensor, with 0 for what is `below` a bound."""
    return x.masked_fill(x.abs() < below, 0.0) if torch.is_tensor(x) and x.is_floating_point() else x


def _is_rounded(factor: Any) -> bool:
    """Whether float32, or a division by way of the inverse, rounds a Python number: one that is no power of two."""
    return isinstance(factor, float) and abs(math.frexp(factor)[0]) != 0.5


def _beyond_float32(number: Any) -> bool:
    """Whether a Python number has more bits than float32 holds."""
    return isinstance(number, float) and math.isfinite(number) and math.frexp(number)[0] * 2**24 % 1 != 0


def _overflowing(x: torch.Tensor, largest: float) -> torch.Tensor:
    """x, infinite beyond the largest number of its dtype."""
    if not x.numel() or x.abs().amax().item() <= largest:
        return x
    return torch.where(x.abs() > largest, torch.copysign(torch.full_like(x, torch.inf), x), x)


def _finite(x: torch.Tensor) -> bool:
    """Whether every entry certainly is finite: in one pass, and wrong only about a sum that overflows."""
    return math.isfinite(x.sum().item())


_HUGE = 2.0**900
"""Stands for an infinity while finite entries beside it are rounded: beyond the range of every dtype but float64."""

RUNNING: list[MonteCarlo] = []
"""The Monte Carlo modes that are entered, the innermost last."""
