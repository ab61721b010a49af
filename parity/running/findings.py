"""New findings of a run: looked at again in a fresh process where the seed is, and minimised, as far as there is time."""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from parity.case.profiles import Profile
from parity.compare.result_rows import replay_line
from parity.decoding import save_json
from parity.results.report import wording
from parity.results.report.findings import other_path
from parity.results.row import Part, Row
from parity.running.plan import Options, Shard, Signature, Sought, signature_of
from parity.sampling.find import case_of

AGAIN = 3  # cases of a finding that a fresh process is given: one that shows it there is enough


class Findings:
    """The new findings among the rows of a run, which it also marks: what a fresh process does not show is
    `nondeterministic`, what there was no time to minimise says so. `seconds`: for minimising all of them."""

    def __init__(self, rows: list[Row], profile: Profile, workers: int, options: Options):
        self.rows, self.profile, self.workers, self.folder = rows, profile, workers, options.findings
        self.fresh = options.confirm or not profile.derandomised
        self.minimise = options.minimise
        self.seconds = profile.minimise_seconds * workers * self.minimise
        self._told: set[tuple[str, str]] = set()

    def news(self, rows: Iterable[Row]) -> Iterator[str]:
        """A line for the first new finding of an implementation in a family."""
        for row in rows:
            as_released = row.blame == "both" and other_path(row) and (str(row.against), row.family) in self._told
            if row.new and not as_released and (row.implementation, row.family) not in self._told:
                self._told.add((row.implementation, row.family))
                where = f" · {wording.settings(row.settings)}" * row.family.endswith("-trainer")
                yield f"NEW {row.implementation}: {row.cls or row.verdict} in {wording.size(row)}{where} · {row.replay}"

    def freeze(self, row: Row) -> None:
        """The case of a minimised row as a file, which its replay then names: the worker may have another disk."""
        case, path = case_of(row), self.folder / f"{row.case}.json"
        assert case is not None
        save_json(path, {"case": case.to_json(), "implementation": row.implementation})
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        row.replay = replay_line(str(shown), row.implementation)

    def sought(self, shards: Sequence[Shard], before: Mapping[str, Part], left: float = math.inf) -> list[Shard]:
        """A shard for each new finding, in the order in which the plan would come to them in one process; without those of
        `before`, the parts that are done. `left`: seconds until the run's limit. What fails in the same case of an
        implementation is one finding."""
        places = {shard.name: number for number, shard in enumerate(shards)}
        drawn = {shard.name for shard in shards if shard.kind in ("drawn", "besides")}
        there = [row for row in self.rows if row.new and row.verdict != "timed-out" and row.shard in places]
        found = collections.defaultdict[Signature, list[Row]](list)
        for row in sorted(there, key=lambda row: places[str(row.shard)]):
            found[signature_of(row)].append(row)
        out: list[Shard] = []
        seconds, covered = min(self.seconds, left * self.workers), set[Signature]()
        for signature, rows in found.items():
            if signature in covered:
                continue
            rows = [row for row in rows if row.shard in drawn] or rows
            lead = rows[0]
            in_lead = {
                signature_of(row) for row in there if (row.implementation, row.case) == (signature[0], lead.case)
            }
            same = [one for one in found if one in in_lead and one != signature]
            covered.update(same)
            within = len(out) < self.profile.findings
            minimise = lead.shard in drawn and within and seconds > 0
            if lead.shard in drawn and not minimise and self.minimise:
                lead.minimised = False
            found_in = [case_of(row) for row in rows[: AGAIN if self.fresh else 1]]
            cases = [case.to_json() for case in found_in if case is not None]
            if not cases or not within or not (minimise or self.fresh):
                continue
            sought = Sought(
                implementation=signature[0],
                subjects=[signature[1:], *(one[1:] for one in same)],
                gate=lead.gate,
                cases=cases,
                fresh=self.fresh,
                seconds=min(self.profile.shrink_seconds, left, seconds) if minimise else 0.0,
            )
            seconds -= sought.seconds
            out.append(Shard(family=lead.family, kind="finding", seed=shards[0].seed, count=1, sought=sought))
        for shard in out:
            if shard.name in before and (shown := before[shard.name].shown) is not None:
                self.confirmed(shard, shown)
        return [shard for shard in out if shard.name not in before]

    def confirmed(self, shard: Shard, shown: Sequence[tuple[str, str | None]]) -> list[Row]:
        """A fresh process has looked at a finding again, and seen this of it: the rows that stay."""
        assert shard.sought is not None
        note = f"a fresh process does not show it in {len(shard.sought.cases)} of its cases"
        who, stay = shard.sought.implementation, []
        for row in self.rows:
            mine = row.new and (row.implementation, row.family) == (who, shard.family)
            subject = row.subject, row.cls
            if not mine or subject not in shard.sought.subjects:
                continue
            if subject in shown:
                stay.append(row)
                continue
            row.verdict, row.cls = "nondeterministic", None
            row.message = "; ".join(filter(None, [note, row.message]))
        return stay
