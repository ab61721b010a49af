# TRL 1.16: SFT's evaluate() of a dict of datasets packs them twice: Trainer.evaluate calls self.evaluate for each of them, which
# prepares the prepared ones again. A row of several sequences then passes for one, whose tokens attend to each other
import datasets
import transformers
from setup_tiny import options, tiny, tokenizer, torch
from trl import SFTConfig, SFTTrainer

transformers.utils.logging.set_verbosity_error()
TEXTS = ("w2 w3 w4 w5 w6", "w7 w8 w9", "w10 w11 w12 w13", "w14 w15 w16 w17 w18 w19")
data = datasets.Dataset.from_list([{"text": text} for text in TEXTS])


def model():
    out = tiny()
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.mul_(8)
    return out


terms, exact = [], model().double().eval()
for text in TEXTS:
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    terms.append(exact(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]))
right = -float(torch.cat(terms).detach().mean())
args = SFTConfig(**options(packing=True, max_length=32))
trainer = SFTTrainer(model(), args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
trainer.remove_callback(transformers.PrinterCallback)
found = {
    "evaluate()": trainer.evaluate()["eval_loss"],
    "evaluate(data)": trainer.evaluate(data)["eval_loss"],
    'evaluate({"a": data})': trainer.evaluate({"a": data})["eval_a_loss"],
}
print("| evaluation | loss | each sequence alone, float64 |\n|---|---|---|")
for name, loss in found.items():
    print(f"| {name} | {loss:.5f} | {right:.5f} |")
raise SystemExit(int(any(abs(loss - right) > 1e-3 for loss in found.values())))
