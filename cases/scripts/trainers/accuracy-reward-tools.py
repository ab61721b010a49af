# TRL 1.16.0: GRPO with tools: accuracy_reward reads the first message, the call of the tool, not the answer behind it: a right answer is 0
# trl/rewards/accuracy_rewards.py takes completion[0]["content"]; the trainer hands over all messages. math_verify is written out: the last \boxed{}, compared as text
import copy
import importlib
import re
import sys
import types

import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

made = types.ModuleType("math_verify")
made.parse = lambda text, **_: re.findall(r"\\boxed\{(.*?)\}", text)[-1:]
made.verify = lambda gold, answer, **_: gold == answer
made.LatexExtractionConfig = lambda **_: None
sys.modules |= {"math_verify": made, "latex2sympy2_extended": types.ModuleType("latex2sympy2_extended")}
sys.modules["latex2sympy2_extended"].NormalizationConfig = lambda **_: None
importlib.import_module("trl.import_utils").is_math_verify_available = lambda: True
from trl.rewards import accuracy_reward

datasets.disable_progress_bars()
tokenizer = of_bytes(eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left")
tokenizer.add_tokens(["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"])
tokenizer.chat_template = chat_template_utils.qwen3_chat_template
CALL = tokenizer('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>')["input_ids"]
ANSWER = tokenizer("It is \\boxed{4}.<|im_end|>")["input_ids"]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def reward(*turns):
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Qwen3Config(**size, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer))
    steps = dict(per_device_train_batch_size=2, num_generations=2, max_completion_length=512, max_steps=1)
    args = GRPOConfig(**options(**steps, logging_strategy="steps", logging_steps=1, gradient_checkpointing=False))
    row = {"prompt": [{"role": "user", "content": "Two and two?"}], "solution": "\\boxed{4}"}
    given = dict(train_dataset=datasets.Dataset.from_list([row] * 2), processing_class=copy.deepcopy(tokenizer))
    trainer = GRPOTrainer(transformers.Qwen3ForCausalLM(config), accuracy_reward, args=args, tools=[add], **given)
    trainer.remove_callback(transformers.PrinterCallback)
    left = list(turns)
    trainer._generate_single_turn = lambda prompts, *a, **k: ([list(left[0]) for _ in prompts], left.pop(0) and None)
    trainer.train()
    log = trainer.state.log_history[0]
    return log["rewards/accuracy_reward/mean"], log["tools/call_frequency"]


print("| GRPO with tools, the answer is right | calls a completion | accuracy_reward, right: 1 |\n|---|---|---|")
wrong = False
for name, turns in (("at once", [ANSWER]), ("behind a call", [CALL, ANSWER])):
    mean, calls = reward(*turns)
    wrong |= mean != 1.0
    print(f"| {name} | {calls:g} | {mean} |")
raise SystemExit(int(wrong))
