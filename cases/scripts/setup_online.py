import datasets
from setup_tiny import options, tokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


def rewarded(prompts, completions, **kwargs):
    return [float(len(set(str(completion)))) + i for i, completion in enumerate(completions)]


def online(policy, reference, prompts=16, callbacks=(), **more):
    sizes = dict(per_device_train_batch_size=2, max_steps=3, max_new_tokens=4)
    return OnlineDPOTrainer(
        policy,
        ref_model=reference,
        reward_funcs=rewarded,
        args=OnlineDPOConfig(**options(**sizes | more)),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(prompts)]),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


def backward_passes(trainer, watch):
    """Calls `watch(loss)` at each backward pass of the trainer."""
    backward = trainer.accelerator.backward

    def watched(loss, **kwargs):
        watch(loss)
        backward(loss, **kwargs)

    trainer.accelerator.backward = watched
