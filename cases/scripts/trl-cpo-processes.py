# TRL 1.16: CPO's and ORPO's likelihood term depends on how a window is dealt out to processes
# It is nn.CrossEntropyLoss over the rows of one process, and gradients are averaged over the processes.
import datasets
from setup_processes import compared, shown
from setup_tiny import PAIRS, options, tiny, tokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


def made(kind, config):
    def of_rows(batch):
        args = config(**options(per_device_train_batch_size=batch, max_steps=1))
        data = datasets.Dataset.from_list(PAIRS[:2])
        return kind(tiny(), args=args, train_dataset=data, processing_class=tokenizer)

    return of_rows


shown(compared({"CPO": made(CPOTrainer, CPOConfig), "ORPO": made(ORPOTrainer, ORPOConfig)}))
