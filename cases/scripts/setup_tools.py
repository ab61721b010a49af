"""One step of GRPO with a tiny Qwen3, its template, and answers that are given, in the bytes of their texts."""

import copy

import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

datasets.disable_progress_bars()
tokenizer = of_bytes(eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left")
tokenizer.add_tokens(["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"])
tokenizer.chat_template = chat_template_utils.qwen3_chat_template


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def logged(reward, turns, **more):
    """What the step logs: each completion is the texts of `turns`, a tool's answer behind each call."""
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Qwen3Config(**size, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer))
    steps = dict(per_device_train_batch_size=2, num_generations=2, max_completion_length=512, max_steps=1)
    args = GRPOConfig(**options(**steps, logging_strategy="steps", logging_steps=1, gradient_checkpointing=False))
    row = {"prompt": [{"role": "user", "content": "Two and two?"}], "solution": "\\boxed{4}"}
    given = dict(train_dataset=datasets.Dataset.from_list([row] * 2), processing_class=copy.deepcopy(tokenizer))
    trainer = GRPOTrainer(transformers.Qwen3ForCausalLM(config), reward, args=args, **given, **more)
    trainer.remove_callback(transformers.PrinterCallback)
    left = [tokenizer(text + "<|im_end|>")["input_ids"] for text in turns]
    trainer._generate_single_turn = lambda prompts, *a, **k: ([list(left[0]) for _ in prompts], left.pop(0) and None)
    trainer.train()
    return trainer.state.log_history[0]
