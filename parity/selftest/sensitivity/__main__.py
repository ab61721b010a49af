"""`python -m parity.selftest.sensitivity`: measure the detection limits, print the tables, draw the picture."""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path

from parity.registry import loss_families, oracle_of, resolved
from parity.running.provenance import resolve_device


def main() -> int:
    """Command line: rows to reports/limits.ndjson, tables to standard output, the picture where --plot says.

    Families measured in processes of their own are put together by --read.
    """
    from parity.process import prepare
    from parity.results.report import measured
    from parity.selftest.sensitivity import plot, table
    from parity.selftest.sensitivity.measure import DTYPES, LOGITS, DetectionLimit, drawn, measure

    parser = argparse.ArgumentParser(prog="python -m parity.selftest.sensitivity", description=__doc__)
    parser.add_argument("--cases", type=int, default=60, help="drawn cases of each family and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", metavar="NAME|FILE.py:NAME")
    parser.add_argument("--rows", type=Path, default=Path("reports/limits.ndjson"))
    parser.add_argument("--plot", type=Path, help="folder for detection-limit-*.svg, docs/measured for the docs")
    parser.add_argument("--read", type=Path, nargs="+", help="rows of earlier runs instead of measuring, all families")
    parser.add_argument("--device", default="cpu", help="where the implementations run: auto, cpu or cuda")
    options = parser.parse_args()
    device = resolve_device(options.device)
    prepare(device, threads=1)
    found = [DetectionLimit(**json.loads(row)) for file in options.read or () for row in file.read_text().splitlines()]
    if not options.read:
        begun = time.process_time()
        for name, dtype in itertools.product(map(resolved, options.family or loss_families()), DTYPES):
            for case in drawn(name, dtype, options.cases, options.seed):
                oracle = oracle_of(case, device)
                for kind in list(LOGITS)[: 1 if dtype == "fp32" else None]:
                    found += measure(name, dtype, kind, oracle)
            print(f"{name} {dtype}: {time.process_time() - begun:.0f} CPU-seconds so far", file=sys.stderr, flush=True)
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        with options.rows.open("w") as file:
            for one in found:
                file.write(json.dumps(dataclasses.asdict(one), default=str) + "\n")
    print(measured.head("Detection limits", "python -m parity.selftest.sensitivity", "detection-limits.md"))
    print(f"{table.markdown(found, options.cases)}\n\n## Beside fixed tolerances\n\n{table.tolerances(found)}")
    if options.plot:
        for label in LOGITS:
            path = options.plot / f"detection-limit-{label.split()[0]}.svg"
            path.write_text(plot.svg(found, label), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
