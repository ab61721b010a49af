# TRL 1.16.0, GRPO with tools, Qwen3.5, 3.6, 3.8, Nemotron 3 and GLM-4-MoE: a tool gets each text without the spaces and line breaks around it, as the indentation of code; LFM2, LFM2.5: a text is cut at its apostrophe or its closing parenthesis, and LFM2's escapes stay as they are
# trl/chat_template_utils.py: qwen3_5_template, nemotron_3_template, glm4moe_template match `\s*(?P<value>.*?)\s*`, where the chat templates write one line break on either side, or none; lfm2_2_5_template ends a text at the next quote, and a call at the next parenthesis
import transformers
from setup_bytes import of_bytes
from trl import chat_template_utils

transformers.logging.set_verbosity_error()
SAID = {"edit": "    return x\n", "say": "it's late", "write": "a\nb", "run": "print(1)"}
ASKED = [{"role": "user", "content": "Go."}]
END = {"glm4moe": "<|endoftext|>"}


def tool(name):
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def parsed(tokenizer, name, text):
    """What a tool gets of a call that the model's own chat template writes."""
    tools = [tool(name)]
    call = {"type": "function", "function": {"name": name, "arguments": {"text": text}}}
    answer = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
    prompt = tokenizer.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*ASKED, answer], tools=tools, tokenize=False)
    if not whole.startswith(prompt):  # a prompt that closes the thoughts
        answer.pop("reasoning_content")
        whole = tokenizer.apply_chat_template([*ASKED, answer], tools=tools, tokenize=False)
    assert whole.startswith(prompt)
    prefix, ids = tokenizer(prompt)["input_ids"], tokenizer(whole[len(prompt) :].rstrip("\n"))["input_ids"]
    found = chat_template_utils.parse_response(tokenizer, ids, prefix=prefix, tools=tools)
    return found["tool_calls"][0]["function"]["arguments"]["text"]


print("| template | " + " | ".join(f"`{text!r}`" for text in SAID.values()) + " |\n|---|---|---|---|---|")
wrong = False
for name in ("qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "glm4moe", "lfm2_v2", "lfm2_2_5"):
    tokenizer = of_bytes(bos_token="<s>", eos_token=END.get(name, "<|im_end|>"), pad_token="<pad>")
    tokenizer.add_tokens(["<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|assistant|>"])
    tokenizer.chat_template = getattr(chat_template_utils, f"{name}_chat_template")
    chat_template_utils.add_response_schema(tokenizer)
    found = {one: parsed(tokenizer, one, text) for one, text in SAID.items()}
    print(f"| {name} | " + " | ".join(f"`{text!r}`" for text in found.values()) + " |")
    wrong |= found != SAID
raise SystemExit(int(wrong))
