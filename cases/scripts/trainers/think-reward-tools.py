# TRL 1.16.0: GRPO with tools, or a tokenizer with a response template: think_format_reward is 0 for every answer, and reasoning_accuracy_reward finds no reasoning
# trl/trainer/grpo_trainer.py:_generate parses answers, which moves <think> into reasoning_content; trl/rewards/format_rewards.py looks for it in content. Answers are given here, in the form that the reward asks for
import copy

import datasets
import transformers
from setup_bytes import of_bytes
from setup_tiny import options
from trl import GRPOConfig, GRPOTrainer, chat_template_utils
from trl.rewards import think_format_reward

datasets.disable_progress_bars()
tokenizer = of_bytes(eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left")
tokenizer.add_tokens(["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"])
tokenizer.chat_template = chat_template_utils.qwen3_chat_template
ANSWER = tokenizer("<think>\nTwice two.\n</think>\n\nFour.<|im_end|>")["input_ids"]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def reward(**more):
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Qwen3Config(**size, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer))
    steps = dict(per_device_train_batch_size=2, num_generations=2, max_completion_length=64, max_steps=1)
    args = GRPOConfig(**options(**steps, logging_strategy="steps", logging_steps=1, gradient_checkpointing=False))
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "Two times two?"}]}] * 2)
    given = dict(args=args, train_dataset=data, processing_class=copy.deepcopy(tokenizer))
    trainer = GRPOTrainer(transformers.Qwen3ForCausalLM(config), think_format_reward, **given, **more)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer._generate_single_turn = lambda prompts, *given, **more: ([list(ANSWER) for _ in prompts], None)
    trainer.train()
    return trainer.state.log_history[0]["rewards/think_format_reward/mean"]


plain, tools = reward(), reward(tools=[add])
print("| GRPO | think_format_reward of an answer in its form |\n|---|---|")
print(f"| without tools | {plain} |\n| tools | {tools} |")
raise SystemExit(int(tools != 1.0))
