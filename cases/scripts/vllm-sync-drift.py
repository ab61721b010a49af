# TRL 1.16.0, peft 0.21.2: LoRA or QLoRA with use_vllm: each weight sync merges and unmerges the adapter in place, which moves the frozen base model, and with it the reference
# trl/generation/vllm_generation.py:_iter_named_params calls merge_adapter and unmerge_adapter; peft/tuners/lora/bnb.py:Linear4bit.merge quantises W + BA anew. Needs bitsandbytes
import importlib.util
import tempfile
import types

import peft
import torch
import transformers
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
size = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
folder = tempfile.mkdtemp()
transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).save_pretrained(folder)
ids = torch.randint(3, 256, (8, 32))
accelerator = types.SimpleNamespace(state=types.SimpleNamespace(deepspeed_plugin=None))
BITS = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def logps(model):
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float().log_softmax(-1)
    return logits[:, :-1].gather(-1, ids[:, 1:, None])


def trained(dtype, quantised, sync, steps=100):
    """Of 100 steps of AdamW: how far the reference and the policy moved, and the last loss."""
    more = dict(quantization_config=transformers.BitsAndBytesConfig(**BITS), device_map={"": "cpu"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more if quantised else {})
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).train()  # no dropout; bitsandbytes packs another way in eval()
    start = logps(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    sender = object.__new__(VLLMGeneration)
    vars(sender).update(model=model, accelerator=accelerator, _dist=DistributedBackend(accelerator))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        for _ in sender._iter_named_params() if sync else ():
            pass
    with model.disable_adapter():
        reference = logps(model)
    return *(float((one - start).square().mean().sqrt()) for one in (reference, logps(model))), loss.item()


if not importlib.util.find_spec("bitsandbytes"):
    print("without the rows in 4 bits, which need bitsandbytes\n")
print("| 100 steps | reference moved, nats, right: 0 | policy moved, with sync, without | loss |\n|---|---|---|---|")
wrong = False
kinds = [("float32", torch.float32, 0), ("bfloat16", torch.bfloat16, 0), ("4 bits", torch.bfloat16, 1)]
for name, dtype, bits in kinds if importlib.util.find_spec("bitsandbytes") else kinds[:2]:
    synced, alone = trained(dtype, bits, True), trained(dtype, bits, False)
    print(f"| {name} | {synced[0]:.4f} | {synced[1]:.4f}, {alone[1]:.4f} | {synced[2]:.4f}, {alone[2]:.4f} |")
    wrong |= synced[0] > 1e-3
raise SystemExit(int(wrong))
