# TRL 1.16.0: GRPO with tools: accuracy_reward reads the first message, the call of the tool, not the answer behind it: a right answer is 0
# trl/rewards/accuracy_rewards.py takes completion[0]["content"]; the trainer hands over all messages. math_verify is written out: the last \boxed{}, compared as text
import importlib
import re
import sys
import types

made = types.ModuleType("math_verify")
made.parse = lambda text, **_: re.findall(r"\\boxed\{(.*?)\}", text)[-1:]
made.verify = lambda gold, answer, **_: gold == answer
made.LatexExtractionConfig = lambda **_: None
sys.modules |= {"math_verify": made, "latex2sympy2_extended": types.ModuleType("latex2sympy2_extended")}
sys.modules["latex2sympy2_extended"].NormalizationConfig = lambda **_: None
importlib.import_module("trl.import_utils").is_math_verify_available = lambda: True
from setup_tools import add, logged
from trl.rewards import accuracy_reward

CALL, ANSWER = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>', "It is \\boxed{4}."
print("| GRPO with tools, the answer is right | calls a completion | accuracy_reward, right: 1 |\n|---|---|---|")
wrong = False
for name, turns in (("at once", [ANSWER]), ("behind a call", [CALL, ANSWER])):
    log = logged(accuracy_reward, turns, tools=[add])
    mean, calls = log["rewards/accuracy_reward/mean"], log["tools/call_frequency"]
    wrong |= mean != 1.0
    print(f"| {name} | {calls:g} | {mean} |")
raise SystemExit(int(wrong))
