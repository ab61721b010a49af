# transformers 5.23.0: gradient_accumulation_steps multiplies the gradients of every model that takes **kwargs and ignores num_items_in_batch
# Trainer divides by the steps only if the forward has no **kwargs; BERT, T5, BART, …ForSequenceClassification, …ForTokenClassification take
# **kwargs (classifiers since 4.54, the others since 5.0) and return a mean of the micro-batch. With several processes the loss is multiplied by their number as well.
import tempfile

import torch
import transformers
from transformers import Trainer, TrainingArguments

sizes = dict(
    vocab_size=40,
    pad_token_id=0,
    num_labels=2,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
    d_model=16,
    d_ff=32,
    d_kv=8,
    num_layers=1,
    num_heads=2,
    dropout_rate=0,
    decoder_start_token_id=0,
)


def step(name, batch, accumulation):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes))
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    ids = torch.randint(3, 40, (4, 6))
    labels = torch.arange(4) % 2 if "Sequence" in name else ids % 2 if "Token" in name else ids
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
        )
        rows = [dict(input_ids=i, attention_mask=torch.ones_like(i), labels=one) for i, one in zip(ids, labels)]
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.train()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return float((after - before).norm()), next(log["loss"] for log in trainer.state.log_history if "loss" in log)


wrong, lines = False, ["| model | gradient norm, logged loss: 4 rows at once | 4 steps of 1 row |", "|---|---|---|"]
for name in (
    "LlamaForCausalLM",
    "Qwen2ForSequenceClassification",
    "LlamaForTokenClassification",
    "BertForSequenceClassification",
    "T5ForConditionalGeneration",
):
    whole, parts = step(name, 4, 1), step(name, 1, 4)
    lines.append(f"| {name} | {whole[0]:.4f}, {whole[1]:.4f} | {parts[0]:.4f}, {parts[1]:.4f} |")
    wrong |= abs(parts[0] / whole[0] - 1) > 1e-3
print("\n".join(lines))
raise SystemExit(int(wrong))
