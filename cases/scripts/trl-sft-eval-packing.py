# TRL 1.16: with eval_packing and without packing, SFT's evaluation lets a sequence attend to the one before it in its row
# Packed rows need the collator's position ids, which it makes where the training data is packed.
import datasets
import torch
from setup_tiny import options, tiny, tokenizer
from trl import SFTConfig, SFTTrainer

rows = [{"text": text} for text in ("w2 w3 w4 w5 w6", "w7 w8 w9", "w10 w11 w12 w13", "w14 w15 w16 w17 w18 w19")]
data = datasets.Dataset.from_list(rows)


def model():
    out = tiny()
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.mul_(8)
    return out


def evaluated(**packing):
    args = SFTConfig(**options(max_length=32, per_device_eval_batch_size=4, **packing))
    trainer = SFTTrainer(model(), args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    return trainer.evaluate()["eval_loss"]


terms, exact = [], model().double()
for row in rows:
    ids = torch.tensor(tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id])
    terms.append(torch.log_softmax(exact(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None]))
right = -float(torch.cat(terms).mean())
found = evaluated(eval_packing=True)
print("| evaluation loss | |\n|---|---|")
print(f"| float64, each sequence alone | {right:.6g} |\n| eval_packing=True | {found:.6g} |")
print(f"| packing=True | {evaluated(packing=True):.6g} |")
raise SystemExit(int(abs(found - right) > 1e-3))
