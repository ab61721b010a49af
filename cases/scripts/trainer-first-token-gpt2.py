# transformers 5.23.0: Trainer divides GPT-2's loss by one token too many per sequence
# it leaves out each first label, which nothing predicts, only where loss_type is found in LOSS_MAPPING; "GPT2LMHeadModel" holds no such name,
# so that loss_type is None, for which the loss function itself falls back to ForCausalLM, and the count does not.
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ids = torch.arange(3, 19).view(4, 4)


def logged(model):
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=1,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(model, args, train_dataset=[dict(input_ids=row, labels=row) for row in ids])
        trainer.train()
    return next(log["loss"] for log in trainer.state.log_history if "loss" in log), trainer._loss_shifts_labels


torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(
    GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
)
llama = LlamaForCausalLM(
    LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
wrong = False
print("| | loss of Trainer | mean over the predicted tokens | ratio |\n|---|---|---|---|")
for model in (llama, gpt2):
    with torch.no_grad():
        right = float(model(input_ids=ids, labels=ids).loss)
    found, shifts = logged(model)
    wrong |= abs(found / right - 1) > 1e-3
    print(f"| {type(model).__name__}, loss_type {model.loss_type} | {found:.5f} | {right:.5f} | {found / right:.4f} |")
raise SystemExit(int(wrong))
