import datasets
from setup_tiny import options, tokenizer, torch, transformers

LAYERS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")
LIGER = dict(use_liger_kernel=True, liger_kernel_config=dict.fromkeys(LAYERS, False))  # the loss, not the layers


class Keep(transformers.TrainerCallback):
    """The gradient's norm before each optimizer step."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms.append(float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()))


def steps(cls, config, rows, **more):
    """Logged loss and gradient norm of three steps, a list a step."""
    keep = Keep()
    models = more.pop("models", {})
    sizes = dict(per_device_train_batch_size=4, max_steps=3, logging_strategy="steps", logging_steps=1)
    args = config(**options(**sizes | more))
    data = datasets.Dataset.from_list(rows)
    trainer = cls(args=args, train_dataset=data, processing_class=tokenizer, callbacks=[keep], **models)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return list(zip(losses, keep.norms))


def compared(found, right, name):
    """Prints both, and returns 1 while they differ."""
    print(f"| step | loss, Liger | {name} | gradient norm, Liger | {name} |\n|---|---|---|---|---|")
    for step, (a, b) in enumerate(zip(found, right)):
        print(f"| {step + 1} | {a[0]:.5g} | {b[0]:.5g} | {a[1]:.5g} | {b[1]:.5g} |")
    return int(any(abs(x - y) > 1e-2 * abs(y) for a, b in zip(found, right) for x, y in zip(a, b)))
