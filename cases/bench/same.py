"""Whether two results files of one seed say the same: what a change that only saves time has to show.

`python -m cases.bench.same BEFORE.ndjson AFTER.ndjson`. Exit code 1 where a row is in one alone, or differs in anything
but the run that it is of: numbers by more than 1e-6 of their size.
"""

import argparse
import collections
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parity.results.report.rows import read
from parity.results.row import Row

TOLERANCE = 1e-6
SHOWN = 10
OF_A_RUN = ("run", "shard", "replay", "imported_from")
"""Fields that another run, another cut of it or another folder changes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    before, after = (read(path)[1] for path in (args.before, args.after))
    found = list(differences(before, after))
    for line in found[:SHOWN]:
        print(line)
    print(f"{len(before):,} and {len(after):,} rows, {len(found):,} differ")
    return 1 if found else 0


def differences(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """A line for each row that is in one alone or differs, with the fields in which it does."""
    mine, theirs = _keyed(before), _keyed(after)
    for key in sorted(mine.keys() | theirs.keys(), key=str):
        name = " ".join(str(part) for part in key if part)
        if key not in mine or key not in theirs:
            yield f"{name}: only {'before' if key in mine else 'after'}"
            continue
        apart = [f for f in mine[key] if f not in OF_A_RUN and not same(mine[key][f], theirs[key][f])]
        if apart:
            values = "; ".join(f"{f} {mine[key][f]!r:.60}, {theirs[key][f]!r:.60}" for f in apart[:3])
            yield f"{name}: {values}"


def _keyed(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by what they are about, in order where several are about the same: the order of shards is nobody's."""
    seen: collections.Counter[tuple[Any, ...]] = collections.Counter()
    out = {}
    for row in rows:
        key = row.case, row.implementation, row.quantity, row.frozen, row.minimised
        out[*key, seen[key]] = msgspec.structs.asdict(row)
        seen[key] += 1
    return out


def same(a: Any, b: Any) -> bool:
    """Equal, numbers to `TOLERANCE` of their size; containers item by item."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float | int) and not isinstance(b, bool):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return bool(a == b)


if __name__ == "__main__":
    sys.exit(main())
