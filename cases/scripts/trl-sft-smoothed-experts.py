# TRL 1.16: with label_smoothing_factor SFT's loss lacks router_aux_loss_coef times the load-balancing loss, which is logged
# It is added where the loss is the fused one; that of smoothed labels is taken from other logits, in a branch of its own.
import datasets
import torch
import transformers
from setup_tiny import experts, options, tokenizer
from trl import SFTConfig, SFTTrainer

IDS = [[2, 3, 4, 5, 6], [7, 8, 9, 10, 1]]


def trained(smoothing):
    logged = dict(logging_strategy="steps", logging_steps=1)
    args = SFTConfig(
        **options(per_device_train_batch_size=2, max_steps=1, **logged),
        router_aux_loss_coef=1.0,
        label_smoothing_factor=smoothing,
    )
    data = datasets.Dataset.from_list([{"input_ids": ids} for ids in IDS])
    trainer = SFTTrainer(experts(), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]


def right(smoothing):
    ids = torch.tensor(IDS)
    out = experts()(ids, output_router_logits=True)
    logps = out.logits[:, :-1].log_softmax(-1)
    own = logps.gather(-1, ids[:, 1:, None])[..., 0]
    return float((-(1 - smoothing) * own - smoothing * logps.mean(-1)).mean() + out.aux_loss)


print("| label_smoothing_factor | loss | right | aux_loss, logged |\n|---|---|---|---|")
bad = False
for smoothing in (0.0, 0.1):
    found = trained(smoothing)
    bad |= abs(found["loss"] - right(smoothing)) > 1e-3
    print(f"| {smoothing} | {found['loss']:.5g} | {right(smoothing):.5g} | {found['aux_loss']:.5g} |")
raise SystemExit(int(bad))
