"""The kill matrix: every mutant on drawn cases until it is caught, and the controls beside it."""

import collections
import dataclasses
import itertools
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cases.selftest.mutants.mutant import Mutant, originals
from cases.selftest.oracles import oracle_of
from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES, SHARDS, cases_drawn
from parity.compare.one_case import rows_of
from parity.judging.assess import CaseOracle, confirmed
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.registry import loss_family
from parity.results.report import measured
from parity.results.row import DECIDED
from parity.sampling.capabilities import repeated

PROFILE = "pr"
DTYPES = ("fp32", "fp16", "bf16")
CONTROL_CASES, CONTROL_SHARE = 24, 8
"""Controls see the first so many cases of a stream, and one in so many of the rest that the mutants need."""


@dataclasses.dataclass(frozen=True)
class Fate:
    """What became of a mutant or a control on one stream.

    Attributes:
        cases: cases of the stream until it was killed, or that it survived.
        judged: quantities, relations and protocol checks judged on them.
        gate: the gate that killed it, "" for a survivor; quantity, dtype, message and case likewise.
    """

    family: str
    name: str
    mistake: str
    seed: int
    cases: int
    judged: int
    gate: str = ""
    quantity: str = ""
    dtype: str = ""
    message: str = ""
    case: dict[str, Any] | None = None

    @property
    def killed(self) -> bool:
        """Whether a gate called it wrong."""
        return bool(self.gate)

    @property
    def right(self) -> bool:
        """Whether the result is right: a mutant was caught, a control was judged and not called wrong."""
        return self.killed if self.mistake else not self.killed and self.judged > 0


def drawn(name: str, seed: int) -> Iterator[Case]:
    """The cases of a family in profile pr, shard by shard, as `parity.running.shard` draws them."""
    strategy = cases(loss_family(name), DTYPES, PROFILE)
    for shard in range(SHARDS):
        yield from draws(strategy, f"{seed}/{name}/{shard}", cases_drawn(name, PROFILE) // SHARDS)


def stream_fates(
    name: str, seed: int, budget: int, chosen: Sequence[Mutant], watched: Sequence[Mutant], device: str = "cpu"
) -> list[Fate]:
    """The fate of the `chosen` mutants and of the controls `watched` on the first `budget` cases of one stream."""
    warnings.simplefilter("ignore")
    by_id = {m.implementation.id: m for m in (*chosen, *watched)}
    fates = {id: Fate(name, m.name, m.mistake, seed, 0, 0) for id, m in by_id.items()}
    for number, case in enumerate(itertools.islice(drawn(name, seed), budget)):
        if number >= CONTROL_CASES and not any(f.mistake and not f.killed for f in fates.values()):
            break
        controlled = number < CONTROL_CASES or number % CONTROL_SHARE == 0
        oracle = oracle_of(case, device)
        known = [execute(m.implementation, oracle.offered(m.implementation).inputs) for m in originals(name)]
        for id, fate in fates.items():
            if not fate.killed and (fate.mistake or controlled):
                fates[id] = _judged(oracle, by_id[id], fate, known)
    return [*fates.values()]


def _judged(oracle: CaseOracle, mutant: Mutant, fate: Fate, known: Sequence[Outcome]) -> Fate:
    """The fate after one more case, by the code path of a run; what the mutant leaves behind is put back.

    A run goes on to classify a disagreement and to repeat it; a mutant is dead before that. One whose results are to
    the last bit those of a correct implementation, `known`, is not judged again, unless it is this case's turn for the
    repeated calls and relations: the judge sees nothing but the results.
    """
    case, implementation = oracle.inputs.case, mutant.implementation
    oracle = oracle.offered(implementation)
    thorough = repeated(implementation, case, PROFILES[PROFILE].thorough, oracle.inputs.device.type)
    fate = dataclasses.replace(fate, cases=fate.cases + 1)
    if mutant.mistake and mutant.pure:
        outcome = execute(implementation, oracle.inputs)
        same = any(outcome.same_as(other) for other in known)
        if outcome.verdict == "ran" and not same:
            for quantity, j in confirmed(oracle, implementation, outcome).items():
                if not j.agrees:
                    return dead(fate, case, j.gate, quantity, j.message)
        if not outcome.leaks and not thorough and outcome.verdict in ("ran", "unsupported"):
            return dataclasses.replace(fate, judged=fate.judged + len(outcome.quantities))
    for row in rows_of(oracle, implementation, thorough):
        fate = dataclasses.replace(fate, judged=fate.judged + (row.verdict in DECIDED))
        if row.failing:
            return dead(fate, case, row.gate or row.verdict, row.quantity or "", row.message)
    return fate


def dead(fate: Fate, case: Case, gate: str, quantity: str, message: str) -> Fate:
    """Killed on a case."""
    told = {"quantity": quantity, "dtype": case.dtype, "message": message, "case": case.to_json()}
    return dataclasses.replace(fate, gate=gate, **told)


HEADINGS = ("family", ">mutants", ">caught", ">cases: median", ">90 %", ">most", ">controls", ">called wrong")


def page(rows: Iterable[dict[str, Any]]) -> str:
    """How many mutants are caught and after how many cases, by family and by gate; what has the wrong fate by name."""
    families: dict[str, list[Fate]] = collections.defaultdict(list)
    for row in rows:
        families[row["family"]].append(Fate(**row))
    fates = [fate for of_family in families.values() for fate in of_family]
    dead = [fate for fate in fates if fate.mistake and fate.killed]
    gates = collections.Counter(fate.gate for fate in dead).most_common()
    wrong = [
        f"{fate.family} {fate.name}, seed {fate.seed}: {fate.mistake or fate.message}"
        for fate in fates
        if not fate.right
    ]
    mutants, controls = sum(bool(f.mistake) for f in fates), sum(not f.mistake for f in fates)
    summary = (
        f"{len(dead):,} of {mutants:,} mutants caught, {mutants - len(dead):,} survived; "
        f"{sum(f.right for f in fates if not f.mistake):,} of {controls:,} controls never called wrong"
    )
    by_family = measured.table(HEADINGS, (_cells(name, families[name]) for name in families))
    by_gate = measured.table(("caught by", ">mutants"), ([gate, f"{count:,}"] for gate, count in gates))
    return "\n".join([*by_family, "", *by_gate, "", *wrong, summary])


def _cells(name: str, fates: Sequence[Fate]) -> list[str]:
    mutants, controls = [f for f in fates if f.mistake], [f for f in fates if not f.mistake]
    cases = sorted(f.cases for f in mutants if f.killed) or [0]
    ends = f"{statistics.median(cases):g}", cases[int(0.9 * (len(cases) - 1))], cases[-1]
    counts = sum(f.killed for f in mutants), *ends, len(controls), sum(f.killed for f in controls)
    return [name, str(len(mutants)), *map(str, counts)]
