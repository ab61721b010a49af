"""GRPO, RLOO, colocated vLLM with `vllm_model_impl="transformers"`, or a model that vLLM has not: the trainer's model breaks.

The backend wraps the class of transformers itself, in the trainer's process (colocate mode runs the engine there), and the
trainer's model, which was made before, has not the attributes that the wrapper reads. GPT-NeoX (Pythia) has no class of
vLLM's own, and takes this way by default.
"""

import tempfile

import setup_vllm as v
import torch
import transformers

SIZE = dict(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
KINDS = {
    "Llama": ("Llama", {}),
    'Llama, model_impl="transformers"': ("Llama", dict(model_impl="transformers")),
    "GPT-NeoX, the default": ("GPTNeoX", {}),
}

print("| the trainer's model behind the engine's start | class in vLLM | forward pass |\n|---|---|---|")
wrong = False
for name, (kind, more) in KINDS.items():
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")
    model = made(made.config_class(**SIZE)).eval()
    before = model(input_ids=torch.tensor([v.PROMPT])).logits
    with tempfile.TemporaryDirectory() as folder:
        llm = v.engine(v.saved(model, folder), **more)
        there = type(v.inside(llm)).__name__
        try:
            said = f"{float((model(input_ids=torch.tensor([v.PROMPT])).logits - before).abs().max()):.1g} off"
        except AttributeError as error:
            said, wrong = f"AttributeError: {error}", True
        v.closed(llm)
    print(f"| {name} | {there} | {said} |", flush=True)
v.end(wrong)
