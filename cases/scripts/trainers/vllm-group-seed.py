"""GRPO, RLOO, online DPO, colocated vLLM, `generation_kwargs={"seed": …}`, which TRL names as its example: a group is one text.

Each copy of a prompt is a request of its own, and all have the seed. A server gets one request with n completions, whose
seeds vLLM counts up. `vllm_structured_outputs_regex`: vLLM's log-probs are of the tokens that the pattern allows, the
trainer's of all, and the importance ratio, on by default, multiplies the loss by what the allowed ones have together.
"""

import tempfile

import datasets
import setup_bytes
import setup_tiny
import setup_vllm as v
import torch
import transformers
import trl
import trl.generation.vllm_generation as generation

SIZE = dict(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(eos_token_id=1, bos_token_id=0, pad_token_id=2, initializer_range=0.05)
RUNS = {
    "-": {},
    "seed": dict(generation_kwargs={"seed": 7}),
    "regex": dict(vllm_structured_outputs_regex="[ab]{4}"),
    "regex, no correction": dict(vllm_structured_outputs_regex="[ab]{4}", vllm_importance_sampling_correction=False),
}


def reward(completion_ids, **_):
    return [float(sum(ids) % 8) for ids in completion_ids]  # of equal completions the deviation is 0, not 1e-6


torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))
tokenizer = setup_bytes.of_bytes(eos_token="Ā", pad_token="ă")
rows = datasets.Dataset.from_dict({"prompt": ["count the letters"] * 8})
print("| a step of GRPO, 8 completions of a prompt | distinct | deviation of rewards | ratio | gradient norm |")
print("|---|---|---|---|---|")
norms, kinds = {}, {}
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llm = v.engine(folder)
    generation.LLM = lambda **_: llm
    for name, more in RUNS.items():
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
        drawn = []

        def counted(completion_ids, drawn=drawn, **more):
            drawn.extend(map(tuple, completion_ids))
            return reward(completion_ids, **more)

        args = setup_tiny.options(max_steps=1, per_device_train_batch_size=8, num_generations=8)
        args |= dict(use_vllm=True, vllm_mode="colocate", max_completion_length=8)
        args |= dict(logging_strategy="steps", logging_steps=1, disable_tqdm=False)
        trainer = trl.GRPOTrainer(
            policy,
            counted,
            trl.GRPOConfig(**args | more),
            train_dataset=rows,
            processing_class=tokenizer,
        )
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.train()
        log = next(x for x in trainer.state.log_history if "grad_norm" in x)
        ratio = log.get("sampling/importance_sampling_ratio/mean", float("nan"))
        norms[name], kinds[name] = log["grad_norm"], len(set(drawn))
        print(f"| {name} | {kinds[name]} | {log['reward_std']:.3g} | {ratio:.2g} | {norms[name]:.2g} |", flush=True)
v.end(kinds["seed"] == 1 or norms["regex"] < 0.01 * norms["regex, no correction"])
