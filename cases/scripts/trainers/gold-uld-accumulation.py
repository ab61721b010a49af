"""GOLD's ULD loss under accumulation: the mean of four rows' losses, cut into micro-batches of equal size."""

import tempfile

import datasets
from setup_processes import norm
from setup_tiny import options, tiny, tokenizer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

ROWS = [{"prompt": f"w{2 + i} w3", "completion": f" w{4 + i} w{9 + i}"} for i in range(4)]
PATH = tempfile.mkdtemp()
tokenizer.save_pretrained(PATH)


def found(batch, accumulation):
    args = GOLDConfig(
        **options(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            lmbda=0.0,
            max_length=32,
            max_completion_length=4,
            use_uld_loss=True,
            use_extended_uld=False,
            teacher_tokenizer_name_or_path=PATH,
            logging_strategy="steps",
            logging_steps=1,
            uld_use_hybrid_loss=True,
        )
        | dict(teacher_model_name_or_path=PATH)
    )
    trainer = GOLDTrainer(
        tiny(), tiny(1), args=args, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=tokenizer
    )
    losses, loss_fn = [], trainer.uld_loss_fn

    def watched(*given, **more):
        losses.append(loss_fn(*given, **more))
        watched.last_matched_loss, watched.last_unmatched_loss = loss_fn.last_matched_loss, loss_fn.last_unmatched_loss
        return losses[-1]

    watched.use_extended_uld = False
    trainer.uld_loss_fn = watched
    gradient = norm(trainer)
    log = trainer.state.log_history[0]
    return (
        float(sum(losses).detach()) / accumulation,
        log["loss"],
        gradient,
        log["matched_loss"],
        log.get("off_policy_loss"),
    )


print(
    "| micro-batches | mean of the rows' losses | logged loss | gradient norm | logged matched_loss | off_policy_loss |\n|---|---|---|---|---|---|"
)
norms = []
for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
    row = found(batch, accumulation)
    norms.append(row[2])
    print(f"| {accumulation} of {batch} | " + " | ".join(f"{v:.6g}" for v in row) + " |", flush=True)
raise SystemExit(int(abs(norms[2] / norms[0] - 1) > 1e-3))
