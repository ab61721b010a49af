# TRL 1.7 to 1.13: GMPOTrainer with use_liger_kernel=True trains GRPO's loss
# GRPOTrainer.compute_loss calls compute_liger_loss; GMPOTrainer overrides _compute_loss alone, and nothing warns.
import datasets
import transformers
from setup_grpo import rewarded, torch
from setup_liger_trainer import LIGER, compared
from setup_tiny import options, tiny, tokenizer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer


def trained(**way):
    """Logged loss and gradient norm of three steps whose rollouts are the same: a learning rate of 0."""
    settings = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=32, max_steps=3)
    settings |= dict(logging_strategy="steps", logging_steps=1, learning_rate=0.0)
    torch.manual_seed(0)
    trainer = GMPOTrainer(
        tiny(),
        reward_funcs=rewarded,
        args=GMPOConfig(**options(**settings | way)),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(16)]),
        processing_class=tokenizer,
    )
    torch.manual_seed(0)
    trainer.remove_callback(transformers.PrinterCallback)  # its lines would stand above the table
    trainer.train()
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]


raise SystemExit(compared(trained(**LIGER), trained(), "GMPO"))
