"""SFT with prompt tuning: the sum of the loss has each sequence's first token, what it is divided by has not.

Virtual tokens predict that token; the count is of labels[..., 1:]. With packing or padding_free PEFT drops the position ids and
puts the virtual tokens before the first sequence of a row alone.
"""

import datasets
import peft
import torch
import transformers
from setup_lora import model
from setup_tiny import options, tokenizer
from trl import SFTConfig, SFTTrainer

TEXTS = ("w2 w3 w4 w5 w6", "w7 w8 w9", "w10 w11 w12 w13", "w14 w15 w16 w17 w18 w19")


def losses(**more):
    """The training loss, the mean of -log p over all tokens, and over all but the first of each sequence."""
    args = SFTConfig(**options(per_device_train_batch_size=4, max_steps=1, seed=3, **more))
    args.logging_strategy, args.logging_steps = "steps", 1
    data = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = SFTTrainer(model(), args=args, train_dataset=data, processing_class=tokenizer, peft_config=tuning)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    terms = []
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], 1]])
        with torch.no_grad():
            logits = trainer.model.eval()(input_ids=ids).logits[0, -ids.shape[1] - 1 : -1]
        terms.append(-logits.log_softmax(-1).gather(-1, ids[0][:, None])[:, 0])
    return trainer.state.log_history[0]["loss"], torch.cat(terms).mean(), torch.cat([t[1:] for t in terms]).mean()


print("| prompt tuning | training loss | mean of all tokens | of all but each first |\n|---|---|---|---|")
bad = False
for name, more in {"the defaults": {}, "packing": dict(packing=True, max_length=32)}.items():
    found, whole, rest = map(float, losses(**more))
    bad |= min(abs(found - whole), abs(found - rest)) > 1e-3
    print(f"| {name} | {found:.4f} | {whole:.4f} | {rest:.4f} |")
raise SystemExit(int(bad))
