# TRL 1.16.0: GRPO with tools, or a tokenizer with a response template: think_format_reward is 0 for every answer, and reasoning_accuracy_reward finds no reasoning
# trl/trainer/grpo_trainer.py:_generate parses answers, which moves <think> into reasoning_content; trl/rewards/format_rewards.py looks for it in content. Answers are given here, in the form that the reward asks for
from setup_tools import add, logged
from trl.rewards import think_format_reward

ANSWER = "<think>\nTwice two.\n</think>\n\nFour."
plain, tools = (
    logged(think_format_reward, [ANSWER], **more)["rewards/think_format_reward/mean"] for more in ({}, {"tools": [add]})
)
print("| GRPO | think_format_reward of an answer in its form |\n|---|---|")
print(f"| without tools | {plain} |\n| tools | {tools} |")
raise SystemExit(int(tools != 1.0))
