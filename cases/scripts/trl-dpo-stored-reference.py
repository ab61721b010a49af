# TRL 1.16: DPO takes the reference log-probs that a run with another ld_alpha or max_length has stored with the dataset
# The name of the stored file is made of the dataset and the model's weights alone. With truncation_mode="keep_start" and a
# max_length, a filter over the dataset has the whole config in its closure, which gives the file another name.
import tempfile

import datasets
import torch
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer


def stored(folder, **config):
    """The reference's log-probs of the chosen completions."""
    args = DPOConfig(**options(precompute_ref_log_probs=True, per_device_train_batch_size=4, **config))
    data = datasets.load_from_disk(folder)
    trainer = DPOTrainer(tiny(), ref_model=tiny(1), args=args, train_dataset=data, processing_class=tokenizer)
    next(iter(trainer.get_train_dataloader()))  # before 0.29 they are computed here
    return torch.tensor(trainer.train_dataset["ref_chosen_logps"])


def saved():
    folder = tempfile.mkdtemp()
    datasets.Dataset.from_list(PAIRS).save_to_disk(folder)
    return folder


wrong = []
print("| run before | run | worst error of a reference log-prob |\n|---|---|---|")
for before, now in (({}, {"ld_alpha": 0.4}), ({"max_length": 4, "truncation_mode": "keep_end"}, {})):
    folder, now = saved(), {"max_length": None} | now
    stored(folder, **{"max_length": None} | before)
    off = float((stored(folder, **now) - stored(saved(), **now)).abs().max())
    print(f"| {before or 'the defaults'} | {now} | {off:.3g} |")
    wrong.append(off > 1e-3)
raise SystemExit(int(any(wrong)))
