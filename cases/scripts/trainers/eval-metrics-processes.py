"""An evaluation by two processes: accelerate fills the last batch up with rows of the first one. eval_loss leaves them out again, a
trainer's own metrics count them. Three pairs, one a batch: the first one twice."""

import json
import os
import subprocess
import sys
import tempfile

import datasets
import transformers
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

transformers.utils.logging.set_verbosity_error()
datasets.disable_progress_bars()
NAMES = ("eval_rewards/margins", "eval_logps/chosen", "eval_loss")


def evaluated():
    data = datasets.Dataset.from_list(PAIRS[1:])
    args, models = DPOConfig(**options(per_device_eval_batch_size=1)), dict(model=tiny(), ref_model=tiny(1))
    trainer = DPOTrainer(**models, args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    return {name: float(value) for name, value in trainer.evaluate().items() if name in NAMES}


if "RANK" in os.environ:  # one of the two
    found = evaluated()
    if os.environ["RANK"] == "0":
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)
    os._exit(0)  # gloo's threads may abort an interpreter that ends
path = f"{tempfile.mkdtemp()}/two.json"
launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
command = [sys.executable, *launch, "--local-addr=127.0.0.1", sys.argv[0], path]
done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
if done.returncode:
    raise SystemExit(done.stderr[-2000:])
with open(path) as file:
    two = json.load(file)
one = evaluated()
print("| of three pairs | one process | two |\n|---|---|---|")
for name in NAMES:
    print(f"| {name} | {one[name]:.5f} | {two[name]:.5f} |")
raise SystemExit(int(abs(one["eval_loss"] - two["eval_loss"]) < 1e-5 < abs(one[NAMES[0]] - two[NAMES[0]])))
