"""Which drawn cases an implementation gets, by what it declares to take (nothing is run to find out) and by what it costs."""

import dataclasses
import functools
import itertools
import math
import statistics
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from parity.case.case import Case, covering
from parity.case.family import CALLING, Family
from parity.case.inputs import Inputs
from parity.compare.one_case import skip_reason
from parity.errors import UsageError
from parity.implementations.implementation import Implementation
from parity.protocol.call import SECONDS
from parity.registry import loss_family

BASES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "policy": ({"old": "absent", "beta": 0.04}, {"loss_type": "bnpo"}),  # TRL 0.15, 0.16
    "divergence": (
        {"beta": 0.0},
        {"sparse": "topk", "beta": 0.0},
        {"sparse": "mixed", "beta": 1.0},
        {"teacher": "logits"},
    ),
    "preference": (
        {"method": "cpo"},
        {"method": "cpo", "loss_type": "simpo"},
        {"method": "orpo"},
        {"method": "kto", "loss_type": "kto"},
    ),
}
"""Family -> settings with which an implementation may run that refuses the defaults."""
HEAD = "temperature softcap logit_scale bias"
DECIDING: Mapping[str, Sequence[str]] = {
    "logprobs": f"{HEAD} ignored entropy".split(),
    "policy": f"""{HEAD} head loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl old ratio
        off_policy_mask_threshold sampler entropy_quantile entropy_coef advantages lengths holes accumulation steps_per_generation
        other_tokens max_completion_length mode sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg
        vespo_lambda_neg""".split(),
    "divergence": f"{HEAD} beta teacher_softcap teacher_logit_scale teacher_bias ignored num_items tail".split(),
    "preference": f"""{HEAD} loss_type beta average nll smoothing gamma tau reference kl desirable undesirable ignored""".split(),
}
"""Family -> the settings that decide what is computed; the others are shapes, values, and how the loss is called."""
TOGETHER = 2
"""Settings that go beside others together where neither goes alone, at most."""
TRIED = 3
"""Cases with one of two settings, and values of the other, of which a case with both is made, where no draw has both."""
SECONDS_PER_CASE = 0.5
"""Of a user's function whose calls take longer, a case costs this on average: it gets fewer of them."""
LOGITS, CHUNKS, CHUNK_VOCABULARY = 1 << 14, 64, {"logprobs"}
"""So many logits, or chunks of a call, cost as much as a small case; the families whose `chunk_size` is of the vocabulary."""
_BUILT: dict[Hashable, Inputs] = {}
"""What `_small` built."""
SECOND_PASS = 4
"""One in so many plain float32 cases is run with tf32 products too, where there are such."""
LONG, CHUNK = 256, 16
"""Tokens up to which bfloat16 counts; those of a small chunk."""
BLOCK = 4096
"""Entries of the largest block in which a kernel goes through a row."""
VOCABULARIES = (128_256, 151_936, 262_144)
"""Llama 3, Qwen 2.5 and Gemma 3."""
REAL, TOKENS, HIDDEN = 20, 8, 4
"""One in so many cases of at most TOKENS tokens has such a vocabulary too, at most HIDDEN wide: half a GB of replicas."""
PEAKED = 12.0
"""Standard deviation of the logits in half of them: where a few tokens carry the gradient, a sum of a thousand blocks in 16 bits
errs by less than a percent; where all do, by several, and a wrong factor of 1.1 is within that."""


Nearest: TypeAlias = dict[Hashable, dict[str, Case | None]]
"""What implementations declare to take -> the id of a draw -> the nearest case that they take."""


def refusal(
    implementation: Implementation, case: Case, device: str, settings: SimpleNamespace | None = None
) -> str | None:
    """Why an implementation does not take a case, by what it declares; None where it takes it. `settings`: all of the case."""
    family = loss_family(case.family)
    settings = family.full_settings(case) if settings is None else settings
    reason = skip_reason(family, implementation, case, settings, device, rejected=True)
    if reason is None and (implementation.parameters is not None or implementation.requires):
        return _lacks(implementation, family, case, settings)
    return reason


class _Absent(dict[str, None]):
    """Tensors before there are any."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> None:
        return None


def _lacks(implementation: Implementation, family: Family, case: Case, settings: SimpleNamespace) -> str | None:
    """`Implementation.lacks`, by the settings alone if these suffice: a search asks it fifty thousand times."""
    absent = family.needed(Inputs(case, settings, _Absent(), (), {})) - (implementation.parameters or set())
    if implementation.parameters is not None and absent:
        return f"no parameter {', '.join(sorted(absent))}"
    try:
        small = _small(family, case)
    except UsageError as error:  # its settings do not stand together
        return str(error)
    return implementation.lacks(family, dataclasses.replace(small, case=case, settings=settings)) or None


def _small(family: Family, case: Case) -> Inputs:
    """Inputs with the tensors that the case has, of small sizes; built once for all cases that decide alike what is computed."""
    if case.tensors is not None:
        return family.build(case)
    others = {*family.shapes, *CALLING}
    deciding = {n: v for n, v in case.settings.items() if n not in others and not isinstance(v, list)}
    key = frozenset((n, v if isinstance(v, str | bool) else None) for n, v in deciding.items())
    if (family.name, key) not in _BUILT:
        _BUILT[family.name, key] = family.build(family.case(0, "fp32", deciding))
    return _BUILT[family.name, key]


def nearest(implementation: Implementation, case: Case, device: str) -> Case | None:
    """The case with as many of its settings as the implementation takes together, the others at their default or at the first
    of the family's bases that it takes; None where it takes no such case.

    In the case's dtype and sizes, or else in another that it takes, or the default ones. Which settings stay where not all
    can is by a hash of the case's id, so that of many cases each setting stays in some.
    """
    found = _nearest(implementation, case, device)
    return found if found is case or (found is not None and _stands(found, implementation)) else None


def _nearest(implementation: Implementation, case: Case, device: str) -> Case | None:
    """`nearest`, whose inputs nobody has built yet."""
    if refusal(implementation, case, device) is None:
        return case
    family, own = loss_family(case.family), dict(implementation.own_defaults)
    sizes = {n: v for n, v in case.settings.items() if _is_size(family, n, v)}
    plain = [{}, *BASES.get(family.name, ())]
    bases = [{**base, **own} for base in plain if own] + plain
    for dtype in dict.fromkeys((case.dtype, "fp32", "fp16", "bf16")):
        for kept, base in itertools.product((sizes, {}), bases):
            start, settings = family.settled(case.seed, dtype, {**base, **kept})
            if refusal(implementation, start, device, settings) is None:
                return _with_more(implementation, start, case, device)
    return None


def _with_more(implementation: Implementation, found: Case, case: Case, device: str) -> Case:
    """`found` with as many settings of the case as go one by one, or by two where neither goes alone."""
    family = loss_family(case.family)
    names = [n for n, v in case.settings.items() if not _is_size(family, n, v)]
    names.sort(key=lambda name: zlib.crc32(f"{case.id}/{name}".encode()))
    size = 1
    while size <= TOGETHER:
        before = found
        for some in itertools.combinations(names, size):
            wanted = {n: case.settings[n] for n in some}
            if wanted.items() <= found.settings.items():
                continue
            more, settings = family.settled(case.seed, found.dtype, {**found.settings, **wanted})
            if wanted.items() <= more.settings.items() and refusal(implementation, more, device, settings) is None:
                found = more
        size = 1 if found != before else size + 1
    return found


def _is_size(family: Family, name: str, value: Any) -> bool:
    """Whether a setting stays only together with the sizes: one of them, or a number for each sequence."""
    return name in family.shapes or isinstance(value, list)


def _stands(case: Case, implementation: Implementation | None = None) -> bool:
    """Whether it is a case at all (some values stand only beside others) and, built in full, one that is taken."""
    family = loss_family(case.family)
    try:
        inputs = family.build(case)
    except UsageError:
        return False
    return implementation is None or not implementation.lacks(family, inputs)


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one of its settings at the default, then those with one size at 1, half as large, or one less."""
    family = loss_family(case.family)
    full = vars(family.full_settings(case))
    names = sorted(case.settings.keys() - {*family.shapes})
    names.sort(key=lambda name: name != "context")  # first, for a compiled call is slow
    moves = [{name: family.settings[name].default} for name in names]
    for size in family.shapes:
        moves += [{size: n} for n in dict.fromkeys((1, full[size] // 2, full[size] - 1)) if 0 < n < full[size]]
    for move in moves:
        now = {**case.settings, **move}
        for name in [n for n in case.settings if isinstance(now[n], list)]:  # a number for each sequence
            now[name] = [min(n, now.get("T", full["T"])) for n in now[name]][: now.get("B", full["B"])]
        one, _ = family.settled(case.seed, case.dtype, now)
        if one.id != case.id and _stands(one):
            yield one


def shown(case: Case) -> frozenset[Hashable]:
    """The pairs of settings away from their defaults, and the values of those that have choices."""
    family = loss_family(case.family)
    names = sorted(case.settings.keys() - set(family.shapes))
    values = {(n, case.settings[n]) for n in names if family.settings[n].choices is not None}
    return frozenset({*itertools.combinations(names, 2), *values})


def _moved(case: Case) -> frozenset[Hashable]:
    """The settings away from their defaults."""
    return frozenset(case.settings.keys() - set(loss_family(case.family).shapes))


def _shown_of_own(case: Case) -> frozenset[Hashable]:
    """`shown` of a user's function, and sizes, of which the draws of many libraries together hold enough: how many tokens
    there are, also one more than a chunk's, and a long sequence in each dtype by itself and with what decides the loss. And the
    decade of each number that decides it: below one there may be a threshold."""
    family = loss_family(case.family)
    s = vars(family.full_settings(case))
    length = s.get("T", 1)
    tokens = length * s.get("B", 1)
    long = {(name, case.dtype) for name in ("long", *_deciding(case)) if length > LONG}
    few = [n for n, setting in family.settings.items() if setting.few and n in case.settings]
    given = {n: case.settings[n] for n in dict.fromkeys([*_deciding(case), *few])}
    choices = {(n, v) for n, v in given.items() if family.settings[n].choices is not None}
    numbers = {n: v for n, v in given.items() if isinstance(v, int | float) and v and not isinstance(v, bool)}
    decades = {(n, "decade", math.floor(math.log10(abs(v)))) for n, v in numbers.items()}
    beside: set[Hashable] = {(*choice, n) for choice in choices for n in given}
    if case.dtype == "fp32":
        beside |= {(*pair, "fp32") for pair in itertools.combinations(sorted(given), 2)}
    return shown(case) | {("tokens", tokens.bit_length(), tokens % CHUNK == 1)} | long | decades | beside


def _shown_of_kernel(case: Case) -> frozenset[Hashable]:
    """`shown` of a kernel in Triton's interpreter, and a row of more than one of its blocks in each dtype and with what decides
    the loss: such cases are dear, and it would get none."""
    family = loss_family(case.family)
    _, length = family.sizes(family.full_settings(case))
    return shown(case) | {("wide", name) for name in (case.dtype, *_deciding(case)) if length > BLOCK}


def _deciding(case: Case) -> list[str]:
    """The settings of the case that decide what is computed."""
    return [name for name in DECIDING.get(case.family, ()) if name in case.settings]


def besides(
    implementation: Implementation,
    drawn: Sequence[Case],
    gets: Callable[[Case], bool],
    least: int,
    device: str,
    every_pair: bool = True,
    known: Nearest | None = None,
) -> tuple[list[Case], int, Iterator[Case]]:
    """What an implementation gets besides the draws that it takes and is given: draws moved to what it takes (`nearest`). How
    many of them are to be judged at least, and further ones, no more than `least`, for those that its call refuses.

    A covering array over what it takes: each brings two settings together, or a value, that none of its cases has yet; small
    ones for a kernel in Triton's interpreter. Then others, until it has `least` cases: of those that cost as much as ten a tenth
    first, and the rest where there is nothing else. Without `every_pair` no more than `least`, but of a user's function every
    setting once. `known`: found for others.
    """
    found = {} if known is None else known.setdefault(implementation.declared, {})
    own = [case for case in drawn if gets(case) and refusal(implementation, case, device) is None]
    given = {case.id for case in own}
    pool: dict[str, Case] = {}
    for case in drawn:
        if case.id in given:
            continue
        if case.id not in found:
            found[case.id] = _nearest(implementation, case, device)
        near = found[case.id]
        if near is not None and near.id not in given:
            pool[near.id] = near
    for near in _joined(implementation, [*own, *pool.values()], device):
        pool.setdefault(near.id, near)
    seen = _shown_of_kernel if implementation.interpreted and device == "cpu" else shown
    if implementation.is_function:
        seen = _shown_of_own if every_pair else _moved
    met = frozenset[Hashable]().union(*map(seen, own))
    cost = functools.partial(price, implementation, device=device)
    each = cost if implementation.interpreted else lambda case: 1.0  # elsewhere a case more costs more than a large one
    new = [case for case in covering(list(pool.values()), seen, met, each) if _stands(case, implementation)]
    wanted = max(0, least - len(own))
    new = new if every_pair or implementation.is_function else new[:wanted]
    others = sorted(pool.values(), key=lambda case: zlib.crc32(f"dear/{case.id}".encode()) % int(cost(case)) > 0)
    rest = (case for case in others if case not in new and _stands(case, implementation))
    new += itertools.islice(rest, max(0, wanted - len(new)))
    return new, wanted, itertools.islice(rest, least)


def _joined(implementation: Implementation, cases: Sequence[Case], device: str) -> Iterator[Case]:
    """Cases with two settings that none of the cases has together: one of them with a value of the other."""
    if not cases:
        return
    sharp = implementation.is_function  # in float32 a mistake shows that rounding hides elsewhere
    counted = [case for case in cases if case.dtype == "fp32" or not sharp]
    family, together = loss_family(implementation.family), frozenset[Hashable]().union(*map(shown, counted))
    least = sorted(cases, key=lambda case: (sharp and case.dtype != "fp32", len(case.settings)))
    names = sorted({n for case in cases for n, v in case.settings.items() if not _is_size(family, n, v)})
    having = {name: [case for case in least if name in case.settings] for name in names}
    for pair in itertools.combinations(names, 2):
        for a, b in (pair, pair[::-1]) if pair not in together else ():
            for one, other in itertools.product(having[a][:TRIED], having[b][:TRIED]):
                wanted = {**one.settings, b: other.settings[b]}
                near, settings = family.settled(one.seed, one.dtype, wanted)
                if {*pair} <= near.settings.keys() and refusal(implementation, near, device, settings) is None:
                    yield near
                    break


def second_pass(case: Case, device: str, long: bool = False) -> Iterator[Case]:
    """On CUDA a case once more: a share of the plain float32 ones under `torch.set_float32_matmul_precision("high")`, as
    trainers set it, and in `long` profiles a share of the small ones with a real vocabulary. Judged with tf32 recipes. A
    case of its own in results and replays; a finding of it is not minimised."""
    if device != "cuda":
        return
    s, number = loss_family(case.family).full_settings(case), zlib.crc32(f"vocabulary/{case.id}".encode())
    context = getattr(s, "context", None)
    sized = case.tensors is None and {"B", "T", "V", "H"} <= vars(s).keys()
    small = sized and s.B * s.T <= TOKENS and context != "compile"
    if long and small and number % REAL == 0:
        real = {"V": VOCABULARIES[number // REAL % len(VOCABULARIES)], "H": min(s.H, HIDDEN)}
        real |= {"peak": PEAKED} if hasattr(s, "peak") and number // REAL // 3 % 2 else {}
        yield dataclasses.replace(case, settings=dict(case.settings) | real)
    if case.dtype == "fp32" and context == "plain" and zlib.crc32(case.id.encode()) % SECOND_PASS == 0:
        yield dataclasses.replace(case, settings=dict(case.settings) | {"context": "tf32"})


def selected(implementation: Implementation, case: Case, cost: int, device: str) -> bool:
    """Whether a drawn case is among those that a costly implementation gets: by the case's id, the same on every run. Of
    the cases near the defaults it gets twice as many: kernels have few parameters, and refuse most of the others."""
    if implementation.seeks & case.settings.keys() or (implementation.every == 1 and not implementation.interpreted):
        return True
    known = loss_family(case.family)
    every = implementation.every * cost if implementation.every > 1 else 1
    names, s = DECIDING.get(known.name, ()), vars(known.full_settings(case))
    moved = sum(s[name] != known.settings[name].default for name in names)
    every = -(-every // 2) if moved <= len(names) // 4 else every  # near: a quarter of what decides what is computed
    if implementation.interpreted:
        every = int(every * price(implementation, case, device)) if device == "cpu" else 1
    return zlib.crc32(f"{implementation.id}/{case.id}".encode()) % every == 0


def price(implementation: Implementation, case: Case, device: str) -> float:
    """The time of a case in that of a small one: on the CPU logits and chunks cost, in Triton's interpreter every block."""
    if device != "cpu":
        return 1.0
    family = loss_family(case.family)
    s = family.full_settings(case)
    rows, length = family.sizes(s)
    chunk = (s.chunk_size if case.family in CHUNK_VOCABULARY else None) or length
    chunks = -(-length // chunk)
    if implementation.interpreted:
        return 1 + rows * chunks * (1 + chunk // 256) / 16
    return 1 + rows * length / LOGITS + (chunks - 1) / CHUNKS


def left_out(implementation: Implementation, case: Case) -> str:
    """Why a user's slow function does not get a case; nothing where it does. Its share is by the median of its calls so far."""
    every = _one_in(implementation)
    if zlib.crc32(f"slow/{implementation.id}/{case.id}".encode()) % every == 0:
        return ""
    took = statistics.median(SECONDS[implementation.id])
    return f"left out: a call takes {took:.1f} s, so it gets one case in {every}"


def _one_in(implementation: Implementation) -> int:
    calls = SECONDS.get(implementation.id)
    return max(1, round(statistics.median(calls) / SECONDS_PER_CASE)) if calls else 1


def repeated(implementation: Implementation, case: Case, one_in: int, device: str) -> bool:
    """Whether an implementation gets the repeated calls on a drawn case; costly and slow ones sixteen times as rarely, and on a
    case that costs as much as ten ten times as rarely: what they show needs no size.
    Not by the lowest bits, as `selected`: a CRC is linear, so those of one share decide those of the other."""
    one_in = one_in * 16 if implementation.every > 1 or _one_in(implementation) > 1 else one_in
    every = one_in if implementation.interpreted else int(one_in * price(implementation, case, device))
    return (zlib.crc32(f"thorough/{implementation.id}/{case.id}".encode()) >> 8) % every == 0
