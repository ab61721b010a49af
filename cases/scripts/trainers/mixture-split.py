"""get_dataset (`trl sft`, `trl dpo`, … with a mixture of datasets), test_split_size: the split has no seed, and the trainer sets
one later. Each process, and a resumed run, has another: rows that one tests on are trained on by another.

Two processes, as a launcher starts them.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

if len(sys.argv) > 1:
    from trl import DatasetMixtureConfig, get_dataset
    from trl.scripts.utils import DatasetConfig

    given = DatasetConfig(path="json", data_files=sys.argv[1], split="train")
    data = get_dataset(DatasetMixtureConfig(datasets=[given], test_split_size=0.25))
    print(json.dumps({name: sorted(part["row"]) for name, part in data.items()}))
    raise SystemExit(0)
rows = pathlib.Path(tempfile.mkdtemp()) / "rows.jsonl"
rows.write_text("\n".join(json.dumps({"text": "a", "row": i}) for i in range(40)))
parts = []
print("| process | tests on |\n|---|---|")
for number in range(2):
    done = subprocess.run([sys.executable, __file__, rows], capture_output=True, text=True, check=True)
    parts.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"| {number} | {parts[-1]['test']} |")
leaked = {*parts[0]["train"]} & {*parts[1]["test"]}
print(f"\nRows that one trains and the other tests on: {len(leaked)} of {len(parts[1]['test'])}")
raise SystemExit(int(bool(leaked)))
