"""GRPO with tools of which some are async: the results of a turn's calls stand in the conversation with those of the sync tools
first. Where the chat template does not write a result's name (Qwen's), each stands at another call's place.

The loop is TRL's; model, tokenizer and template are stand-ins.
"""

import types

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import start_event_loop_in_daemon


async def weather(city):
    return f"weather of {city}"


def time(city):
    return f"time of {city}"


def shown(calls):
    """The results in the order in which the model reads them."""
    out = []
    _, loop, ready = start_event_loop_in_daemon("tools")
    ready.wait()
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.max_tool_calling_iterations, trainer.max_completion_length = 1, 100
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"time": time}], [{"weather": weather}]
    trainer.async_loop, trainer.tools = loop, [weather, time]
    trainer.use_vllm, trainer._is_vlm, trainer.environment_factories = False, False, None
    trainer.model = types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=1000))
    trainer._get_tool_suffix_ids = lambda messages: out.extend(m["content"] for m in messages) or [1]
    trainer._generate_single_turn = lambda *_, **__: ([[]], None)
    asked = [{"type": "function", "function": {"name": name, "arguments": {"city": city}}} for name, city in calls]
    message = {"role": "assistant", "content": "", "tool_calls": asked}
    trainer._tool_call_loop([[{"role": "user", "content": "?"}]], [[5]], [[6, 7]], [[message]], None, None, {})
    loop.call_soon_threadsafe(loop.stop)
    return out


bad = False
print("| calls | results |\n|---|---|")
for calls in ([("time", "Oslo"), ("weather", "Rome")], [("weather", "Rome"), ("time", "Oslo")]):
    right, found = [f"{name} of {city}" for name, city in calls], shown(calls)
    bad |= found != right
    print(f"| {', '.join(right)} | {', '.join(found)} |")
raise SystemExit(int(bad))
