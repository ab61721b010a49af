# TRL 1.16: DPO's alpha divergence has its coefficient exchanged with 1 - coefficient
# f-DPO (arXiv 2309.16240, table 1) has (1 - u^-a)/a, u = policy/reference; TRL computes (u^(a-1) - 1)/(a - 1).
import tempfile

import datasets
import tokenizers
import torch
import transformers
from trl import DPOConfig, DPOTrainer

torch.set_num_threads(1)
words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 32)}}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
tokenizer.chat_template = "{{ messages[0].content }}"


def tiny(seed=0):
    torch.manual_seed(seed)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=1, **size)
    )


def options(**more):
    quiet = dict(report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, logging_strategy="no")
    return quiet | dict(output_dir=tempfile.mkdtemp(), learning_rate=0.0, max_grad_norm=1e9) | more


PAIRS = [
    {"prompt": "w2 w3", "chosen": " w4 w5 w6", "rejected": " w7 w8"},
    {"prompt": "w9 w10", "chosen": " w11", "rejected": " w12 w13 w14"},
    {"prompt": "w15", "chosen": " w16 w17", "rejected": " w18"},
    {"prompt": "w20 w21", "chosen": " w22 w23 w24 w25", "rejected": " w26 w27"},
]

A, BETA = 0.3, 0.1
kind = dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=A, beta=BETA)
args = DPOConfig(**options(per_device_train_batch_size=4, max_steps=1, **kind))
policy, reference = tiny(0), tiny(1)
for model in (policy, reference):
    model.lm_head.weight.data *= 3  # log-ratios of a few nats
data = datasets.Dataset.from_list(PAIRS)
trainer = DPOTrainer(policy, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer)
batch = next(iter(trainer.get_train_dataloader()))
with torch.no_grad():
    found = float(trainer.compute_loss(trainer.model, batch))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    counted = batch["completion_mask"][:, 1:] * mask[:, 1:]

    def log_probs(model):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        return (logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * counted).sum(-1)

    u = (log_probs(policy) - log_probs(reference)).exp()
    chosen, rejected = ((1 - u**-A) / A).chunk(2)
    right = float(-torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean())
print(f"| loss at f_alpha_divergence_coef={A} | |\n|---|---|\n| DPOTrainer | {found:.6g} |\n| f-DPO | {right:.6g} |")
raise SystemExit(int(abs(found - right) > 1e-3 * abs(right)))
