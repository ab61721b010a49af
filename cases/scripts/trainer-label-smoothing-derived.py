# transformers 5.23.0: label_smoothing_factor under FSDP2, or with a class derived from a model's: each token's target is the token itself
# transformers/trainer.py:Trainer.compute_loss shifts the labels only where the class's name stands in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES: fully_shard makes LlamaForCausalLM a FSDPLlamaForCausalLM
import os

import torch
import transformers
from accelerate import state
from accelerate.utils import DistributedType
from setup_tiny import options, tiny

ROWS = [dict(input_ids=list(range(2 + i, 10 + i)), labels=list(range(2 + i, 10 + i))) for i in range(4)]
SMOOTH = 0.1


class Derived(transformers.LlamaForCausalLM):
    pass


def right():
    """The loss of the smoothed targets of the next tokens."""
    ids = torch.tensor([row["input_ids"] for row in ROWS])
    logits = tiny().eval()(input_ids=ids).logits[:, :-1].detach()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=SMOOTH))


def run(kind, **more):
    """Class, and loss of a step."""
    model = tiny()
    if kind == "a derived class":
        model.__class__ = Derived
    wanted = dict(per_device_train_batch_size=4, max_steps=1, logging_strategy="steps", logging_steps=1)
    args = transformers.TrainingArguments(**options(**wanted, label_smoothing_factor=SMOOTH, **more))
    trainer = transformers.Trainer(model, args, train_dataset=ROWS)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return type(trainer.model).__name__, trainer.state.log_history[0]["loss"]


def on_a_cpu(self, *args, **kwargs):
    """Accelerate leaves FSDP aside on a CPU; what follows is its own code and torch's."""
    created(self, *args, **kwargs)
    plugin = kwargs.get("fsdp_plugin")
    if plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


found = {kind: run(kind) for kind in ("the model's class", "a derived class")}
created, state.AcceleratorState.__init__ = state.AcceleratorState.__init__, on_a_cpu
alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(alone, ACCELERATE_USE_CPU="true")
state.AcceleratorState._reset_state(True)
found["FSDP2"] = run("FSDP2", fsdp=True, fsdp_config={"version": 2})
print("| label_smoothing_factor 0.1 | class | loss | right |\n|---|---|---|---|")
for kind, (name, loss) in found.items():
    print(f"| {kind} | {name} | {loss:.5f} | {right():.5f} |")
off = max(abs(loss - right()) for _, loss in found.values())
print(flush=True)
os._exit(int(off > 1e-3))  # gloo's threads may abort an interpreter that ends
