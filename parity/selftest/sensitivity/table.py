"""Limits as a table: what one case and what a run catches with 99 % probability, beside fixed tolerances."""

import collections
import math
from collections.abc import Iterable, Sequence

from parity.compare.pooled_slope import POOL_FLOOR, POOL_MINIMUM, POOL_SIGMAS, mean_slope
from parity.registry import loss_family
from parity.results.report import measured
from parity.selftest.sensitivity.measure import DTYPES, GATES, JUDGES, NEVER, DetectionLimit, label_of

CERTAIN = 0.99
Key = tuple[str, str, str, str]


def groups(found: Iterable[DetectionLimit]) -> dict[Key, list[DetectionLimit]]:
    """By (family, error, dtype, kind of logits), in the order in which they were measured."""
    out: dict[Key, list[DetectionLimit]] = collections.defaultdict(list)
    for one in found:
        out[one.family, one.target, one.dtype, one.logits].append(one)
    return dict(sorted(out.items(), key=lambda item: (item[0][0], item[0][1])))


def limits(found: Sequence[DetectionLimit], label: str) -> list[float]:
    """The limits of one judge, ascending, without the cases whose correct values it faults."""
    return sorted(one.limits[label] for one in found if one.limits[label] > 0.0)


def alarms(found: Sequence[DetectionLimit], label: str) -> float:
    """Share of cases whose correct values the judge faults."""
    return sum(one.limits[label] == 0.0 for one in found) / len(found)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; `NEVER` of none."""
    return values[max(1, math.ceil(share * len(values) - 1e-9)) - 1] if values else NEVER


def cases_of_a_run(found: Sequence[DetectionLimit], drawn: int) -> int:
    """Cases of this family and dtype that show the error, in a run of profile pr."""
    return max(1, round(loss_family(found[0].family).drawn["pr"] / len(DTYPES) * len(found) / drawn))


def by_a_run(found: Sequence[DetectionLimit], drawn: int) -> float:
    """The ε that at least one case of a run catches with 99 % probability: (1 - F(ε))ⁿ ≤ 1 %."""
    count = cases_of_a_run(found, drawn)
    return quantile(limits(found, GATES), 1 - (1 - CERTAIN) ** (1 / count))


def pooled(found: Sequence[DetectionLimit], drawn: int) -> float:
    """The scale error that the pooled slope of a run catches: max(8·standard error, floor) plus the honest mean."""
    out = NEVER
    for name in {n for one in found for n in one.slopes}:
        slopes = [one.slopes[name] for one in found if name in one.slopes]
        count = round(cases_of_a_run(found, drawn) * len(slopes) / len(found))
        if len(slopes) < 2 or count < POOL_MINIMUM:
            continue
        floor = POOL_FLOOR[found[0].dtype]
        mean, error = mean_slope(slopes, floor)
        error *= (len(slopes) / count) ** 0.5
        out = min(out, max(POOL_SIGMAS * error, floor) + abs(mean))
    return out


def amount(value: float) -> str:
    """An ε as the table prints it."""
    return "beyond 1" if value == NEVER else measured.short(value)


def share(values: Sequence[float], at: float) -> str:
    """The share of cases caught at an ε."""
    return f"{100 * sum(v <= at for v in values) / max(len(values), 1):.0f} %"


HEADINGS = ("family", "error on", "dtype", "cases", "half of the cases", "99 % of them", "a pr run", "pooled slope")


def markdown(found: Iterable[DetectionLimit], drawn: int) -> str:
    """The limits of the gates, a row for each group."""
    rows = []
    for (family, target, dtype, logits), group in groups(found).items():
        values = limits(group, GATES)
        cells = [family, target, dtype if dtype == "fp32" else f"{dtype}, {logits}", str(len(group))]
        cells += [amount(quantile(values, 0.5)), amount(quantile(values, CERTAIN)) + _unreached(values)]
        rows.append([*cells, amount(by_a_run(group, drawn)), _pooled(group, drawn)])
    return "\n".join(measured.table(HEADINGS, rows))


def _pooled(group: Sequence[DetectionLimit], drawn: int) -> str:
    """The pooled slope, where the error is a scale of what is pooled and a run pools enough of it."""
    of = loss_family(group[0].family)
    scale = group[0].target == "gradients" or (of.outputs[0] not in of.scalars and group[0].target == label_of(of.name))
    value = pooled(group, drawn) if scale else NEVER
    return "" if value == NEVER else amount(value)


def _unreached(values: Sequence[float]) -> str:
    """How many cases catch 1 %, where not even an error of 100 % is caught in 99 of 100."""
    return f" ({share(values, 0.01)} at 0.01)" if quantile(values, CERTAIN) == NEVER else ""


def tolerances(found: Iterable[DetectionLimit]) -> str:
    """The same cases by every judge: correct values faulted; of the other cases the median limit, and caught at 1 %."""
    rows = []
    for (family, target, dtype, logits), group in groups(found).items():
        cells = [family, target, dtype if dtype == "fp32" else f"{dtype}, {logits}"]
        for label in JUDGES:
            values = limits(group, label)
            shown = f"{amount(quantile(values, 0.5))} · {share(values, 0.01)}" if values else "nothing left"
            faulted = "" if label == GATES else f"{100 * alarms(group, label):.0f} % · "  # such cases are not measured
            cells.append(faulted + shown)
        rows.append(cells)
    return "\n".join(measured.table(["family", "error on", "dtype", *JUDGES], rows))
