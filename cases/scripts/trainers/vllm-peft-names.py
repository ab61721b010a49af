"""GRPO, RLOO, any trainer with vLLM, adapters of peft whose names or weights TRL's sync_weights does not undo, with a real vLLM.

It takes `modules_to_save.default.` and tensors with `lora_` out of the names; a wrapper of single tokens, and an adapter of
another name, stay in. With tied embeddings it merges LoRA into the embedding, which is vLLM's head too; the head that is
trained has no LoRA.
"""

import copy
import tempfile

import peft
import setup_vllm as v
import torch
import transformers

SIZE = dict(vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(initializer_range=0.15)
HEAD = dict(target_modules="all-linear", modules_to_save=["lm_head"])
KINDS = {
    "LoRA": (False, dict(target_modules="all-linear"), ["default"]),
    "modules_to_save": (False, HEAD, ["default"]),
    'modules_to_save, an adapter named "policy"': (False, HEAD, ["policy"]),
    "modules_to_save, a second adapter": (False, HEAD, ["default", "reference"]),
    "trainable_token_indices": (False, dict(target_modules="all-linear", trainable_token_indices=[5, 6]), ["default"]),
    "LoRA on embeddings": (False, dict(target_modules=["embed_tokens", "q_proj"]), ["default"]),
    "LoRA on tied embeddings": (True, dict(target_modules=["embed_tokens", "q_proj"]), ["default"]),
}

print("| adapter | it changes the log-probs by | vLLM's, nats off | error |\n|---|---|---|---|")
wrong = False
for tied in (False, True):
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, tie_word_embeddings=tied)).eval()
    with tempfile.TemporaryDirectory() as folder:
        llm = v.engine(v.saved(base, folder))
        start = list(base.state_dict().items())
        for name, (_, more, adapters) in [(n, k) for n, k in KINDS.items() if k[0] == tied]:
            v.inside(llm).load_weights(start)
            config = peft.LoraConfig(r=4, **more)
            model = peft.get_peft_model(copy.deepcopy(base), config, adapter_name=adapters[0]).eval()
            for more_adapters in adapters[1:]:
                model.add_adapter(more_adapters, config)
            v.moved(model)
            change = v.off(llm, model)
            try:
                v.pusher(model, llm).sync_weights()
                error = None
            except ValueError as raised:
                error = str(raised).split(" in ")[0]
                model.unmerge_adapter()
            found = v.off(llm, model)
            wrong |= bool(error) or found > 0.001
            print(f"| {name} | {change:.2g} | {found:.2g} | {error or '-'} |", flush=True)
        v.closed(llm)
v.end(wrong)
