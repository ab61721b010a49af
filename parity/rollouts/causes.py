"""What a difference of log-probs may come from: each cause fitted, named only where it explains the difference down to noise."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parity.judge.hints import FEW, ROUNDING
from parity.rollouts.scoring import FARTHEST, LIMIT, Difference, Rows, Scores, agrees, kept_mass, rms

REDUCED = 0.35
"""Share of the rms that a cause may leave."""
SUPPORTS = (
    *((p, 0, 0.0) for p in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)),
    *((1.0, k, 0.0) for k in (1, 5, 10, 20, 40, 50, 64, 100)),
    *((1.0, 0, m) for m in (0.01, 0.02, 0.05, 0.1, 0.2)),
)
"""Top-p, top-k and min-p that are tried besides those of the run and of the model's generation config, before any is fitted."""
KEPT = "the sampler's are of the tokens that it kept, the trainer's of all"
BOUNDARY = 2.0
"""Units within which rounding decides which tokens top-p or min-p keeps."""


Supports = Sequence[tuple[float, int, float]]  # top-p, top-k and min-p each


def explanations(
    found: Difference,
    rows: Rows,
    temperature: float,
    sampling: Supports | None,
    others: Mapping[str, Callable[[], Tensor]],
    coarser: Iterable[tuple[str, Callable[[], Scores]]],
    confirmed: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """The causes that explain the difference down to noise, the best first; supports that explain it alike are one cause.
    Without one, what `_patterns` proves; else the size of a `coarser` dtype.

    `temperature` is that of the trainer's log-probs, `sampling` what the run and the model's generation config say of a
    sampler's (None: they are not a sampler's). `others`: other computation -> its log-probs (n,), NaN of tokens that it has
    none of; `coarser`: narrower dtypes, each with the model's own scores and its noise; `confirmed`: whether all of it would be
    right in the dtype of this name, which is slow. All are asked only if needed.
    """
    if bool((found.values == 0).all()):
        return ["all log-probs are 0: missing ones were filled"]
    fits = []
    for text, size, logps in _candidates(found, rows, temperature, sampling, others):
        left, before = found.units(logps), rms(found.units(of=logps.isfinite()))
        if len(left) > 1 and agrees(left) and rms(left) <= REDUCED * before:
            fits.append((rms(left), text, size))
    if not fits:
        if patterns := list(_patterns(found, rows)):
            return patterns
        values = found.values[found.values.isfinite()]
        # by a log-softmax alone, which is less than the arithmetic of a model
        rounded = bool((values == values.bfloat16()).all())
        for name, score in coarser:
            other = Difference(found.values, score()).units()
            alike = agrees(other) and rms(other) <= 1 and (name == "bf16" if rounded else rms(other) > 0.1)
            if alike and confirmed(name):
                return [f"no cause that was tried; by size alone as far apart as the arithmetic of {name}"]
        return []
    least, out = min(left for left, *_ in fits), dict[str, list[str]]()
    near = [fit for fit in sorted(fits) if fit[0] <= 2 * max(least, 0.5)]
    alone = [fit for fit in near if not fit[2]]  # a support that keeps nearly all is no cause beside one of one size
    for _, text, detail in alone or near:
        out.setdefault(text, []).append(detail)
    return [f"{text} ({' or '.join(details)})" if details[0] else text for text, details in out.items()]


ENOUGH = 3
"""Tokens that make a pattern."""
BASES = {"base 2": 1 / math.log(2), "base 10": 1 / math.log(10)}
"""Logarithms that are none to base e -> by what factor."""


def _patterns(found: Difference, rows: Rows) -> Iterator[str]:
    """What the log-probs alone prove: a factor, a number at which they are cut, exchanged rows, one value for a row."""
    own, before = found.own, rms(found.units())
    there = ~found.values.isnan() & own.logps.isfinite()
    values, exact, units = (x[there] for x in (found.values, own.logps, found.unit))
    if len(values) < ENOUGH:
        return

    def explains(left: Tensor) -> bool:
        return agrees(left) and rms(left) <= REDUCED * before

    weights = units**-2
    factor = float((values * exact * weights).sum() / (exact.square() * weights).sum())
    shift = ((values - exact) * weights).sum() / weights.sum()  # of nearly equal log-probs one is as good as the other
    if factor > 0 and explains((values / factor - exact) / units) and not agrees((values - shift - exact) / units):
        base = [f": they are to {name}" for name, by in BASES.items() if abs(factor / by - 1) < 0.01]
        yield f"each is {factor:.4g} times what it should be{''.join(base)}"
    least, most = values.amin(), values.amax()
    for end, cut, side in ((least, exact.clamp(min=least), "below"), (most, exact.clamp(max=most), "above")):
        many = int(((values == end) & ((values - exact).abs() > LIMIT * units)).sum())
        if min(many, int((values != end).sum())) >= ENOUGH and explains((values - cut) / units):
            yield f"they are cut at {float(end):.4g}: {many} of {len(values)} should be {side} it"
    tables = [rows.back(x) for x in (found.values, own.logps, found.unit)]
    yield from _rows_exchanged(*tables)
    yield from _one_value(*tables)


def _rows_exchanged(values: Tensor, exact: Tensor, units: Tensor) -> Iterator[str]:
    """Of tables (B, T), NaN where there is none: each row that is off, but for the shortest, has those of another one that is."""
    there = ~values.isnan()
    ours = ((values - exact) / units).masked_fill(~(there & exact.isfinite()), 0.0)
    off = [i for i, row in enumerate(ours) if not agrees(row[row != 0])]
    of = dict[int, int]()
    for i in [i for i in off if int(there[i].sum()) >= ENOUGH]:
        both = there[i] & exact[off].isfinite()
        left = ((values[i] - exact[off]) / units[off]).masked_fill(~both, 0.0)
        far = (left.square().sum(1) / both.sum(1)).sqrt()
        far[(both.sum(1) < ENOUGH) | (left.abs().amax(1) > FARTHEST) | (far > LIMIT)] = math.inf
        if not bool(far.isfinite().any()):
            return
        of[i] = off[int(far.argmin())]
    if len(of) > 1 and len(set(of.values())) == len(of):
        pairs = ", ".join(f"row {i} has those of row {j}" for i, j in list(of.items())[:FEW])
        yield f"whole rows are exchanged: {pairs}{'…' * (len(of) > FEW)}"


def _one_value(values: Tensor, exact: Tensor, units: Tensor) -> Iterator[str]:
    """Of such tables: in each row one value is all that there is."""
    many = (~values.isnan()).sum(1)
    first = values.nanmean(1, keepdim=True)
    same = ((values - first).abs() <= ROUNDING * first.abs()) | values.isnan()
    several = many > 1
    if not bool(same.all()) or int(many.max()) < ENOUGH:
        return
    told = {"mean": (exact.nanmean(1), units.nanmean(1)), "sum": (exact.nansum(1), units.nansum(1))}
    made = (f", its {name}" for name, (x, u) in told.items() if ((first[:, 0] - x).abs() <= LIMIT * u)[several].all())
    yield f"all tokens of a row have one value{next(made, '')}"


def _candidates(
    found: Difference, rows: Rows, tau: float, sampling: Supports | None, others: Mapping[str, Callable[[], Tensor]]
) -> Iterator[tuple[str, str, Tensor]]:
    """(cause, its size if it comes in several, the log-probs (n,) that it makes, NaN where it makes none)."""
    own, ids = found.own, rows.token_ids
    zero = (found.values == 0) & (own.logps < -LIMIT * found.unit)
    if bool(zero.any()):
        text = f"{int(zero.sum())} of {len(zero)} log-probs are 0: missing ones were filled"
        yield text, "", own.logps.masked_fill(zero, 0.0)
    table = rows.back(own.logps)
    for step, side in ((1, "before"), (-1, "after")):
        moved = torch.nn.functional.pad(table, (step, -step), value=math.nan)
        yield f"each log-prob belongs to the token {side} it", "", moved[rows.picked.cpu()]
        yield f"each log-prob belongs to the row {side} it", "", table.roll(step, 0)[rows.picked.cpu()]
    yield "their sign is turned", "", -own.logps
    off = (found.values - own.logps).abs()
    for digits in range(1, 5):
        grid = 10.0**-digits
        multiples = (found.values / grid).nan_to_num()
        if bool(((multiples - multiples.round()).abs() < 0.01).all()):
            near = off <= grid / 2 + LIMIT * found.unit
            yield f"they are rounded to {digits} decimals", "", torch.where(near, found.values.to(own.logps), own.logps)
            break
    for name, ask in others.items():
        yield name, "", ask()
    values = found.values[own.sample]
    if int((~values.isnan()).sum()) <= 2:
        return
    fitted = _minimum(lambda t: float(found.units(own.of_sample(own.logits, ids, t)).square().sum()))
    if abs(math.log(fitted / tau)) > 1e-3:
        raw = " (raw log-probs: none is applied)" if abs(fitted - 1) < 0.02 and tau != 1 else ""
        text = f"temperature {fitted:.4g}{raw} where the trainer's is {tau:.4g}"
        if sampling is None:
            text = f"logits {tau / fitted:.4g} times the model's own: a scale is left out, or the temperature is {fitted:.4g}"
        yield text, "", own.of_sample(own.logits, ids, fitted)
    if sampling is None:
        return
    penalised = _penalties(own, rows, ids, tau)
    for name, (change, none) in PENALTIES.items():
        by = _minimum(lambda x, of=change: float(found.units(penalised(of, x)).square().sum()))  # type: ignore[misc]
        if abs(by - none) > 1e-3:
            yield f"the sampler has a {name} penalty of {by:.4g}", "", penalised(change, by)
    whole = own.of_sample(own.logits, ids, tau)[own.sample]
    tables = (own.logits.double() / tau).log_softmax(-1)
    yield "those of the likeliest token", "", own.spread(tables.amax(-1))
    if (biased := _one_logit(found, tables, whole, ids[own.sample])) is not None:
        token, by, logps = biased
        does = f"adds {by * tau:.4g} to the logit of" if math.isfinite(by) else "bans"
        yield f"the sampler {does} token {token}", "", own.spread(logps)

    def kept_by(supports: Iterable[tuple[float, int, float]]) -> Iterator[tuple[str, str, Tensor]]:
        for top_p, top_k, min_p in supports:
            named = {"top-p": top_p * (top_p < 1), "top-k": top_k, "min-p": min_p}
            kept = [kept_mass(tables, ids[own.sample], *near) for near in _near(top_p, top_k, min_p, own.noise)]
            # a mass of 0: the token is cut
            each = torch.stack([torch.where(mass > 0, whole - mass.log(), -math.inf) for mass in kept])
            best = each.gather(0, (each - values).abs().nan_to_num(math.inf).argmin(0, keepdim=True))[0]
            if any(named.values()) and bool(best.isfinite().all()):
                size = " ".join(f"{name} {value:g}" for name, value in named.items() if value)
                yield KEPT, f"{size}: {float((whole - best).exp().mean()):.2f} of the mass", own.spread(best)

    listed = list(kept_by(dict.fromkeys((*sampling, *SUPPORTS))))
    yield from listed
    if not any(agrees(found.units(logps)) for *_, logps in listed):
        yield from kept_by(_supports(tables, (whole - values).exp(), own.noise))


def _supports(tables: Tensor, mass: Tensor, noise: float) -> Iterator[tuple[float, int, float]]:
    """Top-p, top-k and min-p, each alone, that keep what most tokens say was kept: of log-probs (m, V) a `mass` (m,)."""
    probs = tables.sort(-1, descending=True).values.exp()
    sums, near = probs.cumsum(-1), LIMIT * max(noise, ROUNDING)
    least, most = (
        (sums >= (mass * (1 - near))[:, None]).int().argmax(-1),
        (sums <= (mass * (1 + near))[:, None]).sum(-1),
    )
    told = (least < most) & (mass < 1)  # of the likeliest, this many: more than `least`, at most `most`
    probs, sums, least, most = probs[told], sums[told], least[told, None], most[told, None]
    if not len(probs):
        return
    before = torch.nn.functional.pad(sums, (1, 0)).gather(-1, least)[:, 0], sums.gather(-1, most - 1)[:, 0]
    ratios = torch.nn.functional.pad(probs / probs[:, :1], (0, 1))
    yield _common(*before), 0, 0.0
    yield 1.0, round(_common(least[:, 0].double(), most[:, 0].double())), 0.0
    yield 1.0, 0, _common(ratios.gather(-1, most)[:, 0], ratios.gather(-1, least)[:, 0])


def _common(above: Tensor, upto: Tensor) -> float:
    """The roundest number in most of the intervals (above, upto]."""
    inside = (above < upto[:, None]) & (upto[:, None] <= upto)
    best = inside[inside.sum(1).argmax()]
    low, high = float(above[best].amax()), float(upto[best].amin())
    rounded = (math.floor(high * 10**digits) / 10**digits for digits in range(5))
    return next((x for x in rounded if low < x), high)


def _one_logit(found: Difference, tables: Tensor, whole: Tensor, ids: Tensor) -> tuple[int, float, Tensor] | None:
    """The token, and by how much the sampler's logit of it is another, -inf where it is never sampled; log-probs (m,) that make.

    Where another token was sampled, exp(own - found) - 1 = (exp b - 1)·p of its probability p: least squares."""
    own = found.own
    values, units = found.values[own.sample], found.unit[own.sample]
    there = values.isfinite()
    weight = torch.where(there, units**-2, 0.0)
    y = (whole - values).nan_to_num().clamp(-30, 30).expm1()
    others, of_each = tables.exp().scatter_(1, ids[:, None], 0.0), torch.zeros(tables.shape[1]).to(tables)
    product, size = (weight * y) @ others, weight @ others.square()
    by = (product / size.clamp(min=1e-300)).clamp(min=-1.0)
    left = weight @ y.square() - by * (2 * product - by * size)
    left -= of_each.index_add(0, ids, weight * y.square())  # of these tokens y is another number
    often = of_each.index_add(0, ids, (there & ((values - whole).abs() > LIMIT * units)).double())
    banned = (by < -0.99) & (ids.bincount(minlength=len(by)) == 0)
    left = left.masked_fill(~(banned | (often >= ENOUGH)), math.inf)
    token = int(left.argmin())
    if not math.isfinite(float(left[token])):
        return None
    if bool(banned[token]):
        return token, -math.inf, whole - torch.log1p(-tables[:, token].exp()).clamp(min=-700)
    a = max(float(by[token]), -0.999999)
    b = math.log1p(a)
    shift = torch.where(ids == token, b, 0.0)
    return token, b, whole + shift - torch.log1p(a * tables[:, token].exp()).clamp(min=-700)


Change = Callable[[Tensor, Tensor, float], Tensor]
PENALTIES: dict[str, tuple[Change, float]] = {
    "repetition": (lambda z, n, by: torch.where(z > 0, z / by, z * by), 1.0),
    "presence": (lambda z, n, by: z - by * (n > 0), 0.0),
    "frequency": (lambda z, n, by: z - by * n, 0.0),
    "negative presence": (lambda z, n, by: z + by * (n > 0), 0.0),
    "negative frequency": (lambda z, n, by: z + by * n, 0.0),
}
"""As vLLM has them: of the logits z of tokens that are in the prompt, or n times in the completion before; and no penalty."""


def _penalties(own: Scores, rows: Rows, ids: Tensor, tau: float) -> Callable[[Change, float], Tensor]:
    """A change of the logits of tokens that stand before, and by how much -> the log-probs (n,). The exponentials of the others,
    nearly all of a vocabulary, are summed once."""
    ends = [(row.cpu(), places.tolist()) for row, places in zip(rows.ids, rows.places, strict=True)]
    before = [(row[:at], places[0]) for row, places in ends for at in places]  # and the length of the prompt
    logits, rest, counts = list[Tensor](), list[Tensor](), list[Tensor]()
    for z, n in zip(own.logits.double(), own.sample.tolist(), strict=True):
        tokens, prompt = before[n]
        seen = tokens.unique()
        logits.append(z[seen])
        counts.append((tokens[prompt:] == seen[:, None]).sum(1))
        rest.append((z / tau).index_fill(0, seen, -math.inf).logsumexp(0))
    others, often = (
        torch.nn.utils.rnn.pad_sequence(parts, True, fill) for parts, fill in ((logits, -math.inf), (counts, 0))
    )
    told = ids[own.sample]
    mine = own.logits.double().gather(-1, told[:, None])[:, 0]
    pairs = [(before[n], token) for n, token in zip(own.sample.tolist(), told, strict=True)]
    there = torch.stack([(tokens == token).any() for (tokens, _), token in pairs])
    count = torch.stack([(tokens[prompt:] == token).sum() for (tokens, prompt), token in pairs])

    def penalised(change: Change, by: float) -> Tensor:
        token = torch.where(there, change(mine, count, by), mine)
        total = torch.logaddexp(torch.stack(rest), (change(others, often, by) / tau).logsumexp(-1))
        return own.spread(token / tau - total)

    return penalised


def _near(top_p: float, top_k: int, min_p: float, noise: float) -> list[tuple[float, int, float]]:
    """A support, and those that rounding may make of it."""
    odds = math.log(top_p / (1 - top_p)) if top_p < 1 else math.inf
    by = [x * noise for x in (-BOUNDARY, 0.0, BOUNDARY)]
    return list(dict.fromkeys((1 / (1 + math.exp(-odds - x)), top_k, min(min_p * math.exp(x), 1.0)) for x in by))


def _minimum(of: Callable[[float], float]) -> float:
    """Where `of` is least in 0.05 to 20: a grid, then the golden section."""
    grid = [0.05 * 400 ** (i / 80) for i in range(81)]
    best = min(range(len(grid)), key=lambda i: of(grid[i]))
    low, high = math.log(grid[max(best - 1, 0)]), math.log(grid[min(best + 1, 80)])
    ratio = (5**0.5 - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if of(math.exp(a)) < of(math.exp(b)) else (a, high)
    return math.exp((low + high) / 2)
