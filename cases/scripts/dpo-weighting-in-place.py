# TRL 1.16: DPO with use_weighting and loss_type="hinge" raises RuntimeError
# per_sequence_loss *= weights overwrites the output of relu, which its backward pass needs.
import datasets
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl import DPOConfig, DPOTrainer

args = DPOConfig(**options(loss_type=["hinge"], use_weighting=True, per_device_train_batch_size=4, max_steps=1))
trainer = DPOTrainer(
    tiny(), ref_model=tiny(), args=args, train_dataset=datasets.Dataset.from_list(PAIRS), processing_class=tokenizer
)
try:
    print("one step of training:", trainer.train().global_step, "done")
except RuntimeError as error:
    print("one step of training:", type(error).__name__, str(error)[:120])
    raise SystemExit(1)
