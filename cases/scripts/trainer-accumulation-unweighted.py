# transformers 5.23.0, TRL 1.16.0: Trainer, SFT: with gradient_accumulation_steps each micro-batch of Gemma 4, Qwen2.5-VL, Qwen3-VL, GLM-4V and others counts the same, whatever its tokens
# their classes say accepts_loss_kwargs = False, so that transformers/trainer.py:Trainer._get_num_items_in_batch counts nothing, and training_step divides means of micro-batches by the steps
import torch
import transformers
from setup_processes import Keep
from setup_tiny import options

SIZE = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
SIZE |= dict(num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2)
ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))
EYE = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=16)
PLACES = dict(image_token_id=60, video_token_id=61)
KINDS = {
    "Llama": SIZE,
    "Qwen2VL": dict(text_config=SIZE | ROPE, vision_config=EYE, **PLACES),
    "Qwen2_5_VL": dict(text_config=SIZE | ROPE, vision_config=EYE, **PLACES),
    "Qwen3VL": dict(text_config=SIZE | ROPE, vision_config=EYE, **PLACES),
    "Glm4v": dict(text_config=SIZE | ROPE, vision_config=EYE, **PLACES),
}
LENGTHS = (4, 9, 17, 30)


def rows():
    for n in LENGTHS:
        ids = (torch.arange(n) * 7) % 50 + 3
        yield dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def collate(chosen):
    def padded(name, value):
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in chosen], True, value)

    return {name: padded(name, -100 if name == "labels" else 0) for name in chosen[0]}


def step(name, batch, accumulation):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}For{'CausalLM' if name == 'Llama' else 'ConditionalGeneration'}")
    wanted = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1)
    args = transformers.TrainingArguments(**options(logging_strategy="steps", logging_steps=1, **wanted))
    keep = Keep()
    given = dict(train_dataset=list(rows()), data_collator=collate, callbacks=[keep])
    trainer = transformers.Trainer(kind(kind.config_class(**KINDS[name])), args, **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return keep.norms[0], trainer.state.log_history[0]["loss"]


transformers.logging.set_verbosity_error()
print("| model | gradient norm, loss: 4 rows at once | 4 steps of 1 row |\n|---|---|---|")
wrong = False
for name in KINDS:
    whole, parts = step(name, 4, 1), step(name, 1, 4)
    print(f"| {name} | {whole[0]:.4f}, {whole[1]:.4f} | {parts[0]:.4f}, {parts[1]:.4f} |")
    wrong |= abs(parts[0] / whole[0] - 1) > 1e-2
raise SystemExit(int(wrong))
