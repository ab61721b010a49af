"""New findings of a run: looked at again in a fresh process where the seed is, and minimised, as far as there is time."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.case.profiles import Profile
from parity.decoding import save_json
from parity.results.header import Part
from parity.results.report import wording
from parity.results.row import Row
from parity.running.plan import Shard, Sought, signature_of
from parity.sampling.find import case_of

AGAIN = 3
"""Cases of a finding that a fresh process is given: one that shows it there is enough."""
Signature = tuple[str, str, str | None]


class Findings:
    """The new findings among the rows of a run, which it also marks: what a fresh process does not show is
    `nondeterministic`, what there was no time to minimise says so.
    """

    def __init__(
        self,
        rows: list[Row],
        profile: Profile,
        workers: int,
        max_time: float | None,
        confirm: bool = False,
        folder: Path = Path("reports/findings"),
    ):
        self.rows, self.profile, self.folder = rows, profile, folder
        self.fresh = confirm or not profile.derandomised
        self.seconds = profile.minimise_seconds * workers
        self.reserve = 0.0 if max_time is None else min(profile.minimise_seconds, max_time / 10)
        self._lost: set[int] = set()
        self._told: set[tuple[str, str]] = set()
        self._dealt, self._begun = 0, set[str]()

    def deadline(self, settings: dict[str, Any]) -> float | None:
        """When to stop drawing so that time is left for findings; set for the workers too."""
        if settings["deadline"] is not None:
            settings["deadline"] -= self.reserve
        found: float | None = settings["deadline"]
        return found

    def lost(self, row: Row) -> None:
        """This row's implementation took its process down: it is not asked again."""
        self._lost.add(id(row))

    def news(self, rows: Iterable[Row]) -> Iterator[str]:
        """A line for the first new finding of an implementation in a family."""
        for row in rows:
            if row.new and (row.implementation, row.family) not in self._told:
                self._told.add((row.implementation, row.family))
                yield f"NEW {row.implementation}: {wording.cls(row)} in {wording.size(row)} · {row.replay}"

    def freeze(self, row: Row) -> None:
        """The case of a minimised row as a file: the worker that found it may have another disk."""
        case = case_of(row)
        assert case is not None
        document = {"case": case.to_json(), "implementation": row.implementation}
        save_json(self.folder / f"{row.case}.json", document)

    def sought(self, shards: Sequence[Shard], before: Mapping[str, Part]) -> list[Shard]:
        """A shard for each new finding, in the order in which the plan would come to them in one process; without those of
        `before`, the parts that are done.
        """
        # what fails in the same case of an implementation is one finding
        places = {shard.name: (number, shard) for number, shard in enumerate(shards)}
        found: dict[Signature, list[tuple[int, Shard, Row]]] = collections.defaultdict(list)
        for row in self.rows:
            signature = signature_of(row)
            if not signature or not isinstance(row.shard, str) or row.shard not in places:
                continue
            if row.verdict != "timed-out" and id(row) not in self._lost:
                found[signature].append((*places[row.shard], row))
        out: list[Shard] = []
        seconds, covered = self.seconds, set[Signature]()
        for there in found.values():
            there.sort(key=lambda one: one[0])
        for signature, there in sorted(found.items(), key=lambda item: item[1][0][0]):
            if signature in covered:
                continue
            drawn = [one for one in there if one[1].kind == "drawn"]
            within = len(out) < self.profile.findings
            minimise = bool(drawn) and within and seconds > 0
            lead = (drawn or there)[0][2]
            same = [
                s for s, rows in found.items() if s[0] == signature[0] and any(r.case == lead.case for *_, r in rows)
            ]
            covered.update(same)
            if drawn and not minimise:
                lead.minimised = False
            cases = (
                list(_cases((drawn or there)[: AGAIN if self.fresh else 1]))
                if within and (minimise or self.fresh)
                else []
            )
            if not cases:
                continue
            sought = Sought(
                implementation=signature[0],
                subjects=[signature[1:], *(s[1:] for s in same if s != signature)],
                gate=lead.gate,
                cases=cases,
                fresh=self.fresh,
                seconds=min(self.profile.shrink_seconds, seconds) if minimise else 0.0,
            )
            seconds -= sought.seconds
            out.append(Shard(family=lead.family, kind="finding", seed=shards[0].seed, count=1, sought=sought))
        for shard in out:
            if shard.name in before and before[shard.name].shown is not None:
                self.confirmed(shard, before[shard.name].shown or [])
        out = [shard for shard in out if shard.name not in before]
        self._dealt = len(out)
        return out

    def stage(self, shard: Shard) -> str:
        """`minimising 2 of 7`, or `confirming`, for an event of a finding's shard: how many were begun."""
        self._begun.add(shard.name)
        verb = "minimising" if shard.sought and shard.sought.seconds else "confirming"
        return f"{verb} {len(self._begun)} of {self._dealt}"

    def confirmed(self, shard: Shard, shown: Sequence[tuple[str, str | None]]) -> list[Row]:
        """A fresh process has looked at a finding again, and seen this of it: the rows that stay."""
        assert shard.sought is not None
        note = f"a fresh process does not show it in {len(shard.sought.cases)} of its cases"
        who, stay = shard.sought.implementation, []
        for row in self.rows:
            signature = signature_of(row) if (row.implementation, row.family) == (who, shard.family) else None
            if signature is None or signature[1:] not in shard.sought.subjects:
                continue
            if signature[1:] in shown:
                stay.append(row)
                continue
            row.verdict, row.cls = "nondeterministic", None
            row.message = "; ".join(filter(None, [note, row.message]))
        return stay


def _cases(found: Sequence[tuple[int, Shard, Row]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(stream, its number of cases, case) of rows."""
    for _, shard, row in found:
        case = case_of(row)
        if case is not None:
            yield shard.index, shard.of, case.to_json()
