# TRL 1.16.0, RewardTrainer, a tokenizer without a padding token (Llama 3, GPT-2): the reward is read at the token before the <eos> that TRL appends; engines that read the last token give other rewards
# trl/trainer/reward_trainer.py:RewardTrainer.__init__ takes eos_token for padding, and transformers' classifiers read the last token that is not pad_token_id
import copy

import datasets
import torch
import transformers
from setup_tiny import PAIRS, options, tokenizer
from trl import RewardConfig, RewardTrainer

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
SIZE = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)


def row(pad):
    """The loss of the trainer, and that of rewards read at the last token and at the one before, in float64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZE, num_labels=1, eos_token_id=1, pad_token_id=None)
    model, own = transformers.LlamaForSequenceClassification(config), copy.deepcopy(tokenizer)
    torch.nn.init.normal_(model.score.weight)
    own.pad_token = pad
    data = datasets.Dataset.from_list(PAIRS)
    args = RewardConfig(**options(max_steps=1, per_device_train_batch_size=len(PAIRS)))
    trainer = RewardTrainer(model, args=args, processing_class=own, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    loss, wide = trainer.train().training_loss, copy.deepcopy(model).double().eval()
    losses = []
    for place in (-1, -2):
        scores = []
        for pair in PAIRS:
            for side in ("chosen", "rejected"):
                ids = torch.tensor([[*tokenizer(pair["prompt"] + pair[side])["input_ids"], 1]])
                with torch.no_grad():
                    scores.append(wide.score(wide.model(input_ids=ids).last_hidden_state)[0, place, 0])
        better, worse = torch.stack(scores).view(-1, 2).T
        losses.append(float(-torch.nn.functional.logsigmoid(better - worse).mean()))
    return loss, *losses


print("| padding token | loss | by rewards at <eos> | by rewards at the token before |\n|---|---|---|---|")
found = {pad: row(pad) for pad in ("<pad>", None)}
for pad, (loss, at_end, before) in found.items():
    print(f"| {pad or 'none: <eos>'} | {loss:.6f} | {at_end:.6f} | {before:.6f} |")
raise SystemExit(int(abs(found[None][0] - found[None][1]) > 1e-3))
