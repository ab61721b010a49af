# TRL 1.16.0, vLLM 0.31, peft 0.21.2: GRPO, RLOO, ... with vllm_mode="server", LoRA with modules_to_save=["lm_head"], a model whose head is tied to its embeddings (Qwen2.5 to 3B, Llama 3.2, Gemma): the trained head does not reach the generator
# trl/generation/vllm_generation.py:_iter_named_params sends lm_head.weight beside embed_tokens.weight; vllm/model_executor/models/utils.py:AutoWeightsLoader leaves out a name that is tied to an earlier one (written out here, vLLM 0.31)
import types
import warnings

import peft
import torch
import transformers
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
IDS = torch.arange(2, 34)[None]
SIZE = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def fresh(tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).eval()


def logps(model):
    with torch.no_grad():
        scores = model(input_ids=IDS).logits.log_softmax(-1)
    return scores[:, :-1].gather(-1, IDS[:, 1:, None])


def run(tied):
    """Mean log-prob of the policy, the model that vLLM has, and the base model; what is left out."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(fresh(tied), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(10):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = types.SimpleNamespace(state=types.SimpleNamespace(deepspeed_plugin=None))
    sender = object.__new__(VLLMGeneration)
    vars(sender).update(model=model, accelerator=accelerator, _dist=DistributedBackend(accelerator))
    generator, left = fresh(tied), []
    first = {}  # id of a parameter -> its first name, as in _get_tied_embedding_params
    for name, value in generator.named_parameters(remove_duplicate=False):
        first.setdefault(id(value), name)
    for name, value in sender._iter_named_params():
        target = generator.get_parameter(name)
        if first[id(target)] != name:
            left.append(name)
        else:
            target.data.copy_(value)
    return (*(float(logps(one).mean()) for one in (model.eval(), generator, fresh(tied))), ", ".join(left) or "nothing")


print(
    "| tie_word_embeddings | log-prob of the policy | of the generator | of the base model | left out |\n|---|---|---|---|---|"
)
wrong = False
for tied in (False, True):
    policy, sampler, base, left = run(tied)
    print(f"| {tied} | {policy:.4f} | {sampler:.4f} | {base:.4f} | {left} |")
    wrong |= abs(policy - sampler) > 1e-3
raise SystemExit(int(wrong))
