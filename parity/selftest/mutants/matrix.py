"""The kill matrix: every mutant on drawn cases until it is caught, and the controls beside it."""

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from parity.case.case import Case
from parity.case.drawing import cases, draws
from parity.case.profiles import PROFILES, SHARDS
from parity.compare.one_case import rows_of
from parity.judging.assess import CaseOracle, confirmed
from parity.protocol.call import execute
from parity.protocol.exceptions import Outcome
from parity.registry import loss_family, oracle_of, resolved
from parity.results.row import DECIDED
from parity.running.shard import repeated
from parity.selftest.mutants import FAMILIES, TRAINERS, Mutant, controls, mutants, originals

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
        yield from draws(strategy, f"{seed}/{name}/{shard}", loss_family(name).drawn[PROFILE] // SHARDS)


def stream_fates(
    name: str, seed: int, budget: int, chosen: Sequence[Mutant], watched: Sequence[Mutant], device: str = "cpu"
) -> list[Fate]:
    """The fate of the `chosen` mutants and of the controls `watched` on the first `budget` cases of one stream."""
    warnings.simplefilter("ignore")
    by_id = {m.implementation.id: m for m in (*chosen, *watched)}
    alive = {id: Fate(name, m.name, m.mistake, seed, 0, 0) for id, m in by_id.items()}
    done: dict[str, Fate] = {}
    for number, case in enumerate(itertools.islice(drawn(name, seed), budget)):
        if number >= CONTROL_CASES and not any(by_id[id].mistake for id in alive):
            break
        controlled = number < CONTROL_CASES or number % CONTROL_SHARE == 0
        oracle = oracle_of(case, device)
        known = [execute(m.implementation, oracle.offered(m.implementation).inputs) for m in originals(name)]
        for id in list(alive):
            if not by_id[id].mistake and not controlled:
                continue
            alive[id] = _judged(oracle, by_id[id], alive[id], known)
            if alive[id].killed:
                done[id] = alive.pop(id)
    return [done.get(id) or alive[id] for id in by_id]


def _judged(oracle: CaseOracle, mutant: Mutant, fate: Fate, known: Sequence[Outcome]) -> Fate:
    """The fate after one more case, by the code path of a run; what the mutant leaves behind is put back.

    A run goes on to classify a disagreement and to repeat it; a mutant is dead before that. One whose results are to
    the last bit those of a correct implementation, `known`, is not judged again, unless it is this case's turn for the
    repeated calls and relations: the judge sees nothing but the results.
    """
    case, implementation = oracle.inputs.case, mutant.implementation
    oracle = oracle.offered(implementation)
    thorough = repeated(implementation, case, PROFILES[PROFILE].thorough)
    fate = dataclasses.replace(fate, cases=fate.cases + 1)
    if mutant.mistake and mutant.pure:
        outcome = execute(implementation, oracle.inputs)
        same = any(outcome.same_as(other) for other in known)
        if outcome.verdict == "ran" and not same:
            for quantity, j in confirmed(oracle, implementation, outcome).items():
                if not j.agrees:
                    return _dead(fate, case, j.gate, quantity, j.message)
        if not outcome.leaks and not thorough and outcome.verdict in ("ran", "unsupported"):
            return dataclasses.replace(fate, judged=fate.judged + len(outcome.quantities))
    for row in rows_of(oracle, implementation, thorough):
        fate = dataclasses.replace(fate, judged=fate.judged + (row.verdict in DECIDED))
        if row.failing:
            return _dead(fate, case, row.gate or row.verdict, row.quantity or "", row.message)
    return fate


def _dead(fate: Fate, case: Case, gate: str, quantity: str, message: str) -> Fate:
    return dataclasses.replace(
        fate, gate=gate, quantity=quantity, dtype=case.dtype, message=message, case=case.to_json()
    )


def _task(name: str, seed: int, budget: int, device: str) -> list[Fate]:
    from parity.process import prepare

    prepare(device, 1)
    if name in TRAINERS:
        from parity.selftest.mutants.trainers import fates

        return fates(name, seed, budget, device)
    name = resolved(name)
    return stream_fates(name, seed, budget, mutants(name), controls(name), device)


def kill_matrix(
    seeds: Iterable[int],
    budget: int | None = None,
    families: Iterable[str] = FAMILIES,
    workers: int = 1,
    device: str = "cpu",
) -> Iterator[list[Fate]]:
    """The fates of every mutant and control, a list for each seed and family as it is done.

    A stream ends after `budget` cases, or after as many as a run of profile pr draws. The cases of a trainer are listed,
    not drawn: one stream, of the first seed, is all there is to see.
    """
    chosen, streams = tuple(families), tuple(seeds)
    limit = {name: 10**9 if name in TRAINERS else loss_family(resolved(name)).drawn[PROFILE] for name in chosen}
    tasks = [
        (name, seed, min(budget or 10**9, limit[name]), device)
        for number, seed in enumerate(streams)
        for name in chosen
        if name not in TRAINERS or number == 0
    ]
    if workers == 1:
        yield from (_task(*task) for task in tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, max_tasks_per_child=1) as pool:
        jobs = [pool.submit(_task, *task) for task in tasks]
        yield from (job.result() for job in concurrent.futures.as_completed(jobs))
