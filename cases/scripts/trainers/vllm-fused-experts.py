"""GRPO, RLOO, any trainer with vLLM, experts that a checkpoint calls w1, w2, w3 (LFM2-MoE): vLLM keeps the first ones.

transformers 5 holds the experts of a layer in two tensors, `experts.gate_up_proj` and `experts.down_proj`, and writes them
under the checkpoint's names when it saves. TRL sends the names of `named_parameters()`. vLLM 0.33.0 looks for the names of
the checkpoint, or for `experts.w13` and `experts.w2` (layers/fused_moe/routed_experts.py:RoutedExperts.load_weights and
build_expert_params_mapping, whose rule is written out below), and passes over a tensor that fits none without a word.
"""

import contextlib
import copy
import types

import torch
import transformers
from trl.generation.vllm_generation import VLLMGeneration

SIZE = dict(vocab_size=32, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2)
SIZE |= dict(num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
KINDS = {
    "LFM2-MoE": (transformers.Lfm2MoeForCausalLM, ("w1", "w2", "w3"), dict(num_dense_layers=0)),
    "Qwen3-MoE": (transformers.Qwen3MoeForCausalLM, ("gate_proj", "down_proj", "up_proj"), {}),
}
MORE = {"LFM2-MoE": dict(layer_types=["conv", "full_attention"], max_position_embeddings=64)}


def sent(model):
    """What TRL pushes to vLLM: name and tensor."""
    pushed = object.__new__(VLLMGeneration)
    pushed.model = model
    pushed._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda _: contextlib.nullcontext())
    return dict(pushed._iter_named_params())


def taken(name, gate, down, up):
    """Whether vLLM loads it; other modules raise where a name is none of theirs."""
    if ".experts." not in name:
        return True
    fused = {("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13"}[gate, up]
    wanted = [f"experts.{fused}", f"experts.{down}"]
    wanted += [f"experts.{e}.{x}." for e in range(SIZE["num_experts"]) for x in (gate, down, up)]
    return any(x in name for x in wanted)


def logps(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 26)[None]).logits.double().log_softmax(-1)


print(
    "| every weight moved by 0.02, pushed to vLLM | experts taken | dropped | log-probs off, right: 0 |\n|---|---|---|---|"
)
transformers.logging.set_verbosity_error()
wrong = False
for name, (kind, names, more) in KINDS.items():
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZE | more | MORE.get(name, {}))).eval()
    engine = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p).sign())
        here = dict(engine.named_parameters())
        pushed = sent(model)
        experts = [n for n in pushed if ".experts." in n]
        for n, value in pushed.items():
            if taken(n, *names):
                here[n].copy_(value)
    dropped = sorted({n.rsplit(".", 1)[1] for n in experts if not taken(n, *names)})
    off = float((logps(model) - logps(engine)).abs().max())
    wrong |= off > 1e-5
    print(
        f"| {name} | {sum(taken(n, *names) for n in experts)} of {len(experts)} | {', '.join(dropped) or '-'} | {off:.3g} |"
    )
raise SystemExit(int(wrong))
