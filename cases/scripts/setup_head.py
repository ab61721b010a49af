import copy

import datasets
from setup_tiny import PAIRS, options, tokenizer, torch
from trl import DPOConfig, DPOTrainer

tokenizer.bos_token = "<eos>"


def compared(model):
    """Trains three steps, prints the logged log-probs beside those of the model's own logits; 1 while they differ."""
    names, own = ("logps/chosen", "logps/rejected"), []
    args = DPOConfig(
        **options(per_device_train_batch_size=4, max_steps=3, logging_strategy="steps", logging_steps=1, beta=0.1)
    )
    reference, data = copy.deepcopy(model), datasets.Dataset.from_list(PAIRS)
    trainer = DPOTrainer(model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer)
    compute = trainer.compute_loss

    def watched(model, inputs, *more, **options):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].double()
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        own.append([float(half.mean()) for half in (log_probs * inputs["completion_mask"][:, 1:]).sum(1).chunk(2)])
        return compute(model, inputs, *more, **options)

    trainer.compute_loss = watched
    trainer.train()
    found = [[row[name] for name in names] for row in trainer.state.log_history if names[0] in row]
    print(
        "| step | log-prob of chosen, DPOTrainer | of the model's own logits | of rejected | own |\n|---|---|---|---|---|"
    )
    for step, (a, b) in enumerate(zip(found, own)):
        print(f"| {step + 1} | {a[0]:.5g} | {b[0]:.5g} | {a[1]:.5g} | {b[1]:.5g} |")
    return int(any(abs(x - y) > 1e-3 for a, b in zip(found, own) for x, y in zip(a, b)))
