import datasets
from setup_processes import compared, shown
from setup_tiny import options, tiny, tokenizer
from trl.experimental.tpo import TPOConfig, TPOTrainer

ROWS = [
    {"prompt": "w2 w3", "chosen": " w4 w5 w6", "rejected": " w7 w8", "reference": " w4"},
    {"prompt": "w9 w10", "chosen": " w11", "rejected": " w12 w13 w14", "reference": " w15 w16 w17 w18 w19 w20 w21"},
]


def tpo(rows, **more):
    args = TPOConfig(**options(per_device_train_batch_size=rows, max_steps=1, **more))
    return TPOTrainer(tiny(), args=args, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=tokenizer)


shown(compared({"TPOTrainer": tpo, "TPOTrainer, `tpo_alpha` 0": lambda rows: tpo(rows, tpo_alpha=0.0)}))
