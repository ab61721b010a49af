"""Random rounding for definitions of any kind: every operation has a rule, is taken apart into ones that have, or is refused."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parity.judge.identities import in_front
from parity.judge.long_sums import MANY
from parity.judge.monte_carlo import MonteCarlo, rounds_nothing
from parity.judge.recipe import DTYPES, NARROW, UNIT_ROUNDOFF
from parity.judge.stages import kept_dtype, of_dtype, own_dtype, stored

aten = torch.ops.aten
VARIANCE = torch.ops.prims.var.default

ELEMENTWISE = frozenset(
    """add sub rsub mul div sqrt reciprocal remainder fmod square addcmul addcdiv lerp hypot frac leaky_relu
    leaky_relu_backward""".split()
)
"""Results that IEEE 754 rounds correctly, or a few of them: half a unit in the last place."""
INEXACT = frozenset(
    """exp exp2 expm1 log log2 log1p log10 tanh sigmoid erf erfc erfinv sin cos tan atan atan2 sinh cosh asin
    acos asinh acosh atanh pow rsqrt lgamma digamma""".split()
)
"""Functions of a mathematical library, off by up to 2 units in the last place on CPUs and GPUs (measured: 1.0 to 1.9)."""
NO_DIGIT = 2.0**18
"""From here on, in size, exp(s - L) with a stored log-sum-exp L has no right digit in float32: no correct kernel takes it."""
LARGEST = 1024.0
"""From here on, in size, an exponential of float64 is 0 or infinite."""
POLYNOMIAL = 4.0
"""Units by which an erf is off wherever it is taken from a polynomial, as in the float32 GELU of a CPU without AVX-512: with it
x·Φ(x) is off by up to 8.3 units of x/2 on -6 to 6 (measured)."""
PARTS = frozenset(
    """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _softmax
    _softmax_backward_data _safe_softmax gelu gelu_backward silu silu_backward var var_mean std std_mean
    linalg_vector_norm log_sigmoid_forward log_sigmoid_backward softplus softplus_backward nll_loss_forward
    nll_loss_backward addmm baddbmm addmv sigmoid_backward tanh_backward mish mish_backward _fused_rms_norm
    _fused_rms_norm_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward elu elu_backward glu
    glu_backward huber_loss huber_loss_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits xlogy logit logit_backward
    logaddexp""".split()
)
"""Operations that round as their parts do: a norm, a softmax or a GELU cancels, and its result's own ulp says nothing of it."""
SOFTMAX = ("_softmax", "_safe_softmax")
"""Those of them that attention is made of."""
EXACT = frozenset(
    """fill zero copy index_copy masked_scatter select_scatter slice_scatter diagonal_scatter as_strided_scatter take
    masked_select cummax cummin max min median kthvalue mode sgn relu threshold_backward hardtanh hardtanh_backward
    fmax fmin copysign trunc diag_embed view_copy split_copy _reshape_alias lift new_full empty_strided
    new_empty_strided argmax argmin broadcast_in_dim collapse_view view_of replication_pad1d reflection_pad1d
    _unsafe_index upsample_nearest2d fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams""".split()
)
"""Operations that move, choose or compare, beside those that `MonteCarlo` knows."""
INDEXED = frozenset("scatter_add index_add embedding_dense_backward index_put _unsafe_index_put".split())
"""Sums of the terms that an index sends to one place."""
PRODUCTS = ("mv", "dot")
"""Those besides mm and bmm."""


class AnyOperation(MonteCarlo):
    """`MonteCarlo` for definitions of any kind, `width` replicas at once under `torch.vmap`.

    Elementwise arithmetic is off by half a unit in the last place, a library function by up to 2, a product by
    max(2, √K/2)·u·(|A|·|B|), a sum that an index makes, or a cumulative one, by max(2, √n/2)·u·Σ|x|; what an index sends to one
    place is added in float32, term after term. Composite operations are taken apart by torch's decompositions. Raises
    NotImplementedError for an operation without a rule, by name, with the remedy.
    """

    drifts = True

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._opname
        if self.quiet or name in EXACT:
            return func(*args, **kwargs)
        if name[-1] == "_" and name[-2] != "_":
            return self._in_place(func, name[:-1], args, kwargs)
        if name in INDEXED:
            return self._indexed(func, name, args, kwargs)
        if name in ("sort", "topk"):
            return self._in_any_order(func, args, kwargs)
        if func in REWRITTEN:
            with self._entered():
                out = REWRITTEN[func](*args, **kwargs)
            return self._running(out, *args[:2]) if func is VARIANCE else out
        if name in PARTS:
            taken_apart = _decomposition(func)
            with self._entered():
                out = taken_apart(*args, **kwargs)
            return self.rounded(self._kept_sum(out, *args[:2]), self.softmax) if name in SOFTMAX else out
        if name in PRODUCTS or name == "cumsum":
            terms = args[0].shape[-1] if name in PRODUCTS else func(torch.ones_like(args[0]), *args[1:], **kwargs)
            return self._within(func(*args, **kwargs), func(*_absolute(args), **kwargs), terms)
        if name == "convolution":
            size = func(*_absolute(args), **kwargs)
            return self._folded(func(*args, **kwargs), size, args[1][0].numel(), self._in_groups(args[8]))
        if name == "convolution_backward":
            return self._convolution_backward(func, args, kwargs)
        if name in ("prod", "cumprod"):
            out = func(*args, **kwargs)
            terms = args[0].shape[args[1]] if len(args) > 1 else args[0].numel() // self.width
            return self._within(out, out.abs() * (max(self.u, self.u_sum) / self.u_sum), terms)
        if not (rounds_nothing(name) or name in ELEMENTWISE or name in INEXACT or name in OWN_RULE):
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
                with self._entered():
                    return func.decompose(*args, **kwargs)
            return _not_a_number(func, func(*args, **kwargs))
        if name in ("sum", "mean") and (alone := func(*args, **kwargs)).numel() == args[0].numel():
            return alone  # of one term each
        out = super().operation(func, args, kwargs)
        if name in INEXACT and is_floating(out) and not _integer_power(name, args):
            near_zero = POLYNOMIAL if name == "erf" else 0.0
            units = 2 * out.abs() + near_zero
            if name in ("exp", "sigmoid"):
                units = units + self._as_power_of_two(out, args[0], name)
            return self.scattered(out, self.u_sum * units)
        if name in ("bmm", "mm") and UNIT_ROUNDOFF[self.elementwise] > NARROW:
            return self.rounded(out)
        return out

    def _as_power_of_two(self, out: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        """Units by which eˣ, or 1/(1 + e⁻ˣ), is off besides in half of the replicas: a GPU's fast exponential, which Triton's
        `exp` and `sigmoid` are, is 2^(x·log₂e), and half a unit of that product is a factor exp(±u·|x|) (measured on an H200:
        16 units from -20 to 0)."""
        size = x.to(out.dtype).abs().clamp(max=LARGEST).nan_to_num(0.0)
        return size * out.abs() * (1 - out if name == "sigmoid" else 1.0) * (self.noise.each(out) > 0)

    def _kept_sum(self, out: torch.Tensor, z: torch.Tensor, dim: int) -> torch.Tensor:
        """`out` = softmax of z; in half of the replicas exp(z - log Σ exp z), as attention computes it backward.

        What a flash kernel keeps of its forward pass is the log-sum-exp L in float32: half a unit of L each for storing and
        subtracting it is a factor exp(±u·2|L|) common to the row, as of a log-softmax (`MonteCarlo.log_softmax`), up to
        |L| = 2¹⁸, beyond which rows masked by a large number are.
        """
        if not out.dim():
            return out
        whole = z.logsumexp(dim, keepdim=True).abs()
        whole = torch.where(whole < NO_DIGIT, whole, 0.0)
        scale = 2 * self.u_sum * whole * self._shifted(whole)
        return out * (self.scattered(whole, scale) - whole).exp()

    def _running(self, out: torch.Tensor, x: torch.Tensor, dims: list[int]) -> torch.Tensor:
        """`out` = variance of x, also as Welford's Σ(x_k - m_{k-1})·(x_k - m_k)/n, which torch's norms take.

        The running mean m_k = m_{k-1} + (x_k - m_{k-1})/k is off by about u·|mean|·√k/3, a different amount in each term, which
        leaves u·|mean|·√variance/2 (root mean square) of their mean.
        """
        mean = x.mean(dims).abs()
        return self.scattered(out, self.u_sum * mean * out.clamp(min=0.0).sqrt())

    def _within(self, out: torch.Tensor, size: torch.Tensor, terms: torch.Tensor | float) -> torch.Tensor:
        """A sum of products, `size` that of absolute values: off by max(2, √terms/2)·u·size, then rounded; integers are exact."""
        if not out.is_floating_point():
            return out
        walk = (torch.as_tensor(terms, dtype=out.dtype, device=out.device).sqrt() / 2).clamp(min=2.0)
        return self.rounded(self.scattered(out, size * walk * self.u_sum))

    def _in_place(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """x.op_(…) as x.op(…), copied: what is written in place is rounded too."""
        overload = getattr(getattr(aten, name, None), func._overloadname, None)
        if overload is None or name in EXACT or (rounds_nothing(name) and name not in INDEXED):
            return func(*args, **kwargs)
        return args[0].copy_(self.operation(overload, args, kwargs))

    def _in_any_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A sort or top-k in which equal floating-point numbers come in an order of each replica, unless it is stable."""
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        x, dim = args[0], given.get("dim", -1)
        if not is_floating(x) or not x.numel() or not x.dim() or given.get("stable"):
            return func(*args, **kwargs)
        ordered, n = x.sort(dim).values, x.shape[dim]
        if not bool((ordered.narrow(dim, 1, n - 1) == ordered.narrow(dim, 0, n - 1)).any()):
            return func(*args, **kwargs)
        order = self.noise.like(x).argsort(dim)
        values, index = func(x.gather(dim, order), *args[1:], **kwargs)
        return values, order.gather(dim, index)

    def _indexed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        adds = "index_put" not in name or (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
        out = func(*args, **kwargs)
        if not adds or not out.is_floating_point():
            return out
        terms = func(*(torch.ones_like(a) if is_floating(a) else a for a in args), **kwargs)
        size = func(*_absolute(args), **kwargs)
        if terms.numel() and float(terms.amax()) > MANY:  # added in turn, in float32
            by = self.noise.stretch(out.new_empty(self.width)) / 2
            rows = all(len(a) == self.width for a in (out, *filter(is_floating, args)) if a.dim())
            scaled = lambda a: by.view(-1, *[1] * (a.dim() - 1)) if rows and a.dim() else by[0]  # noqa: E731
            turn = func(*((a * scaled(a)).float() if is_floating(a) else a for a in args), **kwargs).double() / scaled(
                out
            )
            out = torch.where(torch.isfinite(turn), turn, out)
        return self._within(out, size, terms)

    def _convolution_backward(self, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        grad, weight, grouped = args[0], args[2], self._in_groups(args[9])
        found, sizes = func(*args, **kwargs), func(*_absolute(args), **kwargs)
        per_channel = grad.numel() / grad.shape[1]
        terms = (grad.shape[1] * weight[0, 0].numel() / (self.width if grouped else 1), per_channel, per_channel)
        return tuple(
            None if o is None else self._folded(o, size, n, grouped and i == 0)
            for i, (o, size, n) in enumerate(zip(found, sizes, terms, strict=True))
        )

    def _in_groups(self, groups: int) -> bool:
        """Whether vmap made the replicas groups of channels, as it does where input and weight are both replicated."""
        return groups % self.width == 0

    def _folded(self, out: torch.Tensor, size: torch.Tensor, terms: float, channels: bool) -> torch.Tensor:
        """`_within` with the replicas in front, which vmap folds into a convolution's channels, or into its first dimension."""
        dim = int(channels)
        parts = [x.unflatten(dim, (self.width, -1)).movedim(dim, 0).contiguous() for x in (out, size)]
        return self._within(parts[0], parts[1], terms).movedim(0, dim).flatten(dim, dim + 1)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)


REWRITTEN: dict[Any, Callable[..., Any]] = {
    torch.ops.prims.sum.default: lambda x, dims, **kwargs: x.sum(dims),
    torch.ops.prims.convert_element_type.default: lambda x, dtype: x if dtype.is_floating_point else x.to(dtype),
    VARIANCE: lambda x, dims, correction=1, **kwargs: _variance(x, dims, correction),
}
"""Operations of torch's decompositions in terms of others."""


def _variance(x: torch.Tensor, dims: list[int], correction: float) -> torch.Tensor:
    away = x - x.mean(dims, keepdim=True)
    return away.square().sum(dims) / (x.numel() // max(away.sum(dims).numel(), 1) - correction)


OWN_RULE = frozenset("mm bmm sum mean _log_softmax _log_softmax_backward_data logsumexp".split())
"""Operations that `MonteCarlo` has a rule for."""


def _not_a_number(func: Any, out: Any) -> Any:
    """A result without floating-point numbers, which no rounding touches."""
    if any(torch.is_tensor(x) and (x.is_floating_point() or x.is_complex()) for x in _flat((out,))):
        raise NotImplementedError(
            f"the definition uses {func}, for which no rounding rule is known: write it in elementary operations "
            "(+, ·, /, exp, log, sums, matrix products) of real numbers"
        )
    return out


def _decomposition(func: Any) -> Callable[..., Any]:
    from torch._decomp import decomposition_table  # half a second: loaded with the first composite operation

    if func not in decomposition_table:
        raise NotImplementedError(f"the definition uses {func}, which torch cannot take apart: write it out")
    found: Callable[..., Any] = decomposition_table[func]
    return found


def _flat(args: Any) -> Iterator[Any]:
    for a in args:
        if isinstance(a, list | tuple):
            yield from _flat(a)
        else:
            yield a


def is_floating(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _absolute(args: Any) -> list[Any]:
    return [a.abs() if is_floating(a) else a for a in args]


def _integer_power(name: str, args: Any) -> bool:
    return name == "pow" and isinstance(args[1], int | float) and float(args[1]).is_integer() and abs(args[1]) <= 4


def _wide(x: Any) -> Any:
    return x.double() if is_floating(x) else x


class Double(TorchFunctionMode):
    """Within it a cast to float32 goes to float64, and so does a tensor of the definition's own where torch mixes no dtypes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        args = [torch.float64 if a is torch.float32 else a for a in args]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            given, name = [*args, *kwargs.values()], func.__name__
            writes = "out" in kwargs or name == "__setitem__" or (name[-1] == "_" and name[-2] != "_")
            mixed = len({x.dtype for x in given if is_floating(x)}) > 1
            if writes or isinstance(error, NotImplementedError) or not mixed:
                raise
            args, kwargs = [_wide(a) for a in args], {k: _wide(v) for k, v in kwargs.items()}
            return func(*args, **kwargs)


_NARROW = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_CASTS = {
    torch.Tensor.to: None,
    torch.Tensor.type: None,
    torch.Tensor.type_as: None,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
}
_AS_FIRST = (torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.reshape_as)
_DTYPE = torch.Tensor.dtype.__get__


class Definition(Double):
    """Within it a definition's own casts to 16 bits say where it stores: float64 in an exact run, rounded in a replica.

    Its tensors are float64, and tell it that they have the dtype that torch would give them, or `own`, the coarsest one of
    the inputs, where that is not known: what it casts to `x.dtype` is stored.
    """

    def __init__(self, own: torch.dtype):
        super().__init__()
        self.own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DTYPE:
            found = func(*args)
            return self._dtype(args[0]) if found == torch.float64 and not _of_torch() else found
        given, kwargs = args[1:], kwargs or {}
        asked = [a for a in (*given, *kwargs.values()) if isinstance(a, torch.dtype)]
        if func in _CASTS and args[0].is_floating_point():
            like = [self._dtype(a) for a in given if is_floating(a)]
            dtype = next(iter((*asked, *like)), _CASTS[func])
            if dtype in _NARROW:
                narrow = _stored_unless_held(args[0].double(), _NARROW[dtype])
                return of_dtype(narrow.view_as(narrow) if narrow is args[0] else narrow, dtype)
        else:
            args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
            kwargs = {k: torch.float64 if isinstance(v, torch.dtype) and v in _NARROW else v for k, v in kwargs.items()}
            dtype = next(iter(asked), None)
        out = super().__torch_function__(func, types, args, kwargs)
        if func in _CASTS and out is args[0] and dtype not in (None, self._dtype(out)):
            out = out.clone()  # as a cast makes one
        return self._named(out, func, dtype, [a for a in _flat((args, *kwargs.values())) if is_floating(a)])

    def _dtype(self, x: torch.Tensor) -> torch.dtype:
        return own_dtype(x) or (self.own if x.dtype == torch.float64 else x.dtype)

    def _kept(self, x: torch.Tensor) -> torch.dtype:
        return kept_dtype(x) or self._dtype(x)

    def _named(self, out: Any, func: Any, dtype: torch.dtype | None, operands: list[torch.Tensor]) -> Any:
        """`out`, whose floating-point tensors have the dtype that was asked for, or that of the operands' promotion."""
        new = [x for x in _flat((out,)) if is_floating(x) and not any(x is a for a in operands)]
        leading = operands[:1] if func in _AS_FIRST else [a for a in operands if a.dim()] or operands
        for x in new:
            own, kept = (
                functools.reduce(_promoted, map(of, leading)) if leading else torch.float32
                for of in (self._dtype, self._kept)
            )
            of_dtype(x, dtype or own, kept if leading else dtype)
        return out


_promoted = functools.cache(torch.promote_types)  # an operation that modes see


def _of_torch() -> bool:
    """Whether torch's or the judge's own code reads a dtype, and not a definition."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "parity.judge."))


def _stored_unless_held(x: torch.Tensor, name: str) -> torch.Tensor:
    """x stored in a dtype; what that dtype holds, as an input of it, stays as it is."""
    if (out := stored(x, name)) is x:
        return x
    return torch.where(in_front(lambda x: x.to(DTYPES[name]).double() == x, x), x, out)


class Largest(TorchDispatchMode):
    """Entries of the largest floating-point result of the operations within, also of those inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.entries = max(self.entries, *(x.numel() for x in _flat((out,)) if is_floating(x)), 0)
        return out


@contextlib.contextmanager
def as_definition(own: torch.dtype = torch.float32) -> Iterator[None]:
    """Runs what is inside in float64: constants, casts to float32, attention by its parts; `own`: the dtype of the inputs.

    A replica's float32 products are IEEE's, also where the process lets its own use tf32, which a recipe declares.
    """
    before = torch.get_default_dtype()
    switches = [(b, b.fp32_precision) for b in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
    torch.set_default_dtype(torch.float64)
    try:
        for backend, _ in switches:
            backend.fp32_precision = "ieee"
        with Definition(own), sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        torch.set_default_dtype(before)
        for backend, precision in switches:
            backend.fp32_precision = precision


class OwnConstants(TorchFunctionMode):
    """Within `torch.vmap`, gives each of `count` replicas its own result where an operation meets constants alone.

    vmap computes such a result (of a frozen reference, of advantages) once for all of them: every replica would then have
    the same rounding error there, and their spread would not show it.
    """

    def __init__(self, count: int):
        super().__init__()
        self.every = torch.ones(count, dtype=torch.bool)
        """What vmap goes over besides the weights: where it is true, a constant is taken, which is everywhere."""
        self.each: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.each is None or not _plain(out):
            return out
        made = out.untyped_storage().data_ptr()
        if all(
            x.untyped_storage().data_ptr() == made for x in filter(_plain, _flat(args))
        ):  # none, or a view of the only one
            return out
        return func(*(self._given(a) for a in args), **kwargs)

    def _given(self, x: Any) -> Any:
        if _plain(x) and self.each is not None:
            return torch.where(self.each.to(x.device), x, x)
        return type(x)(self._given(y) for y in x) if type(x) in (list, tuple) else x


def _plain(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers that all replicas share."""
    return isinstance(x, torch.Tensor) and not torch._C._functorch.is_batchedtensor(x) and x.is_floating_point()
