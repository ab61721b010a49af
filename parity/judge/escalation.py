"""When a disagreement counts: it is judged again with more replicas, until it agrees or more of them cannot change it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from parity.judge.gates import Judgement

FEW, SURE, LARGE = 4, 0.5, 1 << 14
"""So few replicas come first where each holds `LARGE` entries or more (below, twelve cost as much), and accept what is below
`SURE` of the allowed error: their root mean square is twice too large in three of a thousand (χ² with 4 degrees of freedom), so
that what they accept by half is hardly ever what twelve reject."""
REPLICAS, TWICE, CONFIRMATION = 12, 24, 60
"""Replicas of a first disagreement: enough for what agrees. They underestimate the spread of some entry now and then."""
LAST_WORD, LAST_WORD_LOGITS = 480, 1 << 23
"""The most replicas, as far as that many logits go: where rounding decides which token wins (bf16 logits over a temperature
of 1e-3) an entry is near 0 in nearly every replica and large in a few."""
NEAR, LAST_WORD_NEAR, HELD = 3.0, 1 << 28, 1 << 26
"""A headroom so near to agreement is judged with replicas of that many logits, a minute at most, which hold no more than that
many entries of a quantity: where two tokens' logits round apart in one replica of thirty, sixty of a head of 540,000 entries say
1.6 and 240 say 0.6."""
CERTAIN = 100.0
"""Headroom that no replicas mend where errors are spread like a bell: at 10 already their root mean square would have come
out ten times too small with a probability below 1e-9 (χ² with 12 degrees of freedom). Losses do without this limit."""


def ladder(size: int) -> tuple[int, ...]:
    """How many replicas to judge with, one after the other; `size`: logits, or entries of the head, of one replica.

    None at first: every gate allows what the dtype's own precision demands, and replicas only ever allow more.
    """
    few = (FEW,) if size >= LARGE else ()
    return 0, *few, REPLICAS, TWICE, CONFIRMATION, _last_word(size, LAST_WORD_LOGITS)


def if_near(size: int, entries: int = 1) -> int:
    """How many replicas what nearly agrees with the last of `ladder` is judged with; `entries`: of the quantity in one."""
    return min(_last_word(size, LAST_WORD_NEAR), _last_word(entries, HELD))


def _last_word(size: int, logits: int) -> int:
    return max(CONFIRMATION, min(LAST_WORD, logits // max(size, 1)))


def escalate(
    judge_with: Callable[[int, bool, Collection[str] | None], Mapping[str, Judgement]],
    counts: Sequence[int],
    near: Callable[[Collection[str]], int] | None = None,
    finer: bool = False,
    certain: float = math.inf,
) -> dict[str, Judgement]:
    """The verdict on every quantity: `judge_with(count, finer, names)` for counts that grow while something disagrees.

    Each step judges only the names that are undecided so far (None: all). From `REPLICAS` on the counts end where more
    of them can change nothing: a quantity is open while its headroom is finite and below `certain`, or where its replicas
    overflow. With a finite `certain` the quantities are one result, which one that is not open settles. With `finer`,
    what still disagrees is judged with added replicas that are more precise, because an implementation may be. Where
    something is wrong by less than `NEAR` in the end, all that is wrong is judged with `near(names)` replicas, if those
    are more.
    """
    judged: dict[str, Judgement] = {}
    names: list[str] | None = None
    for count in counts:
        latest = judge_with(count, False, names)
        judged.update(latest)
        names = [name for name, j in latest.items() if not j.headroom <= (SURE if count == FEW else 1.0)]
        if not names:
            break
        if count >= REPLICAS:
            left = [latest[name] for name in names]
            still = [j for j in left if (j.open and j.headroom < certain) or j.overflows]
            if not still or (certain < math.inf and len(still) < len(left)):
                break
    wrong = [name for name, j in judged.items() if not j.agrees]
    if finer and any(judged[name].open and judged[name].headroom < certain for name in wrong):
        judged.update({name: j for name, j in judge_with(counts[-1], True, wrong).items() if j.agrees})
        wrong = [name for name in wrong if not judged[name].agrees]
    nearly = any(judged[name].open and judged[name].headroom < NEAR for name in wrong)
    count = near(wrong) if near is not None and nearly else 0
    if count > counts[-1]:
        judged.update(judge_with(count, False, wrong))
    return judged
