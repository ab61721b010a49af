# TRL 1.16: online DPO with gradient accumulation takes a gradient that is too large by the number of micro-batches
# OnlineDPOTrainer.training_step hands the micro-batch's mean to accelerator.backward and divides only what it returns.
import tempfile

import datasets
import tokenizers
import torch
import transformers

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


from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

STEPS = 4
sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=STEPS, max_steps=1, max_new_tokens=4)
args = OnlineDPOConfig(**options(**sizes))
data = datasets.Dataset.from_list([{"prompt": f"w{2 + i} w3"} for i in range(16)])
trainer = OnlineDPOTrainer(
    tiny(),
    ref_model=tiny(),
    reward_funcs=lambda prompts, completions, **kwargs: [
        float(len(set(str(c)))) + i for i, c in enumerate(completions)
    ],
    args=args,
    train_dataset=data,
    processing_class=tokenizer,
)
handed, backward = [], trainer.accelerator.backward


def recorded(loss, **kwargs):
    handed.append(float(loss.detach()))
    backward(loss, **kwargs)


trainer.accelerator.backward = recorded
trainer.train()
window = handed[-STEPS:]
found, right = sum(window), 0.6931471805599453  # the policy is its own reference: -log sigmoid(0)
print("| loss of window 1, whose gradient is taken | |\n|---|---|")
print(f"| OnlineDPOTrainer, {STEPS} micro-batches | {found:.6g} |\n| mean over the window | {right:.6g} |")
print(f"the gradient is {found / right:.3g} times that of the window")
raise SystemExit(int(abs(found / right - 1) > 1e-2))
