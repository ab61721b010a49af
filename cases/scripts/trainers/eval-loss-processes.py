# transformers 5.23.0: evaluation in several processes, rows that do not fill the last batch: their loss is multiplied by their tokens, and divided by those of the rows that fill the batch up
# transformers/trainer.py:Trainer.prediction_step divides each process's sum by the tokens of all, times their number (average_tokens_across_devices); gather_for_metrics then drops the filling rows' share
import os
import subprocess
import sys

import torch
import transformers
from setup_tiny import options, tiny

LENGTHS = {
    "4 rows, whole batches": [4, 9, 5, 7],
    "5 rows": [24, 4, 4, 4, 3],
    "the same 5 rows, another first": [3, 4, 4, 4, 24],
}


def losses(rows):
    """eval_loss of each dataset; `rows`: those of a batch of one process."""
    torch.manual_seed(0)
    for name, lengths in LENGTHS.items():
        ids = torch.randint(2, 32, (sum(lengths),)).split(lengths)
        data = [dict(input_ids=one, labels=one) for one in ids]
        args = transformers.TrainingArguments(**options(per_device_eval_batch_size=rows))
        trainer = transformers.Trainer(tiny(), args, eval_dataset=data, data_collator=collate)
        trainer.remove_callback(transformers.PrinterCallback)
        yield name, trainer.evaluate()["eval_loss"]


def collate(rows):
    fill = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return dict(input_ids=fill(ids, True, 0), labels=fill(ids, True, -100))


if "RANK" in os.environ:
    for name, found in losses(1):
        if os.environ["RANK"] == "0":
            print(f"LOSS {name}: {found!r}", flush=True)
    os._exit(0)  # gloo's threads may abort an interpreter that ends
launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
command = [sys.executable, *launch, "--local-addr=127.0.0.1", sys.argv[0]]
told = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
two = dict(line[5:].split(": ") for line in told.stdout.splitlines() if line.startswith("LOSS "))
if not two:
    raise SystemExit(told.stderr[-2000:])
print("| eval_loss, batches of two rows | one process | two processes |\n|---|---|---|")
wrong = False
for name, one in losses(2):
    print(f"| {name} | {one:.4f} | {float(two[name]):.4f} |")
    wrong |= abs(float(two[name]) / one - 1) > 1e-3
raise SystemExit(int(wrong))
