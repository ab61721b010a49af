# peft 0.21.2: a LoRA on the embeddings of a model that ties them to its head, with ensure_weight_tying: merging adds its change twice, so merged, unloaded and vLLM's weights are another model's
# peft/tuners/tuners_utils.py:BaseTuner.merge_adapter and unload merge embed_tokens and lm_head one after the other, into the weight that they share; lora/layer.py:Linear.merge, Embedding.merge
import warnings

import peft
import torch
import transformers

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
ids = torch.arange(2, 26).view(2, 12)


def model():
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    out = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=32, tie_word_embeddings=True, **size))
    return out.eval()


def adapted(tie):
    """A policy whose embeddings have a trained LoRA."""
    config = peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=tie, task_type="CAUSAL_LM")
    policy = peft.get_peft_model(model(), config).eval()
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    return policy


def logits(one):
    with torch.no_grad():
        return one(input_ids=ids).logits


print(
    "| LoRA on tied embeddings | change of the weight when merged / the adapter's, right: 1 | logits merged - unmerged, largest |"
)
print("|---|---|---|")
wrong = False
for tie in (False, True):
    policy = adapted(tie)
    layer = policy.base_model.model.model.embed_tokens
    delta, before = layer.get_delta_weight("default").detach(), layer.base_layer.weight.detach().clone()
    alone = logits(policy)
    policy.merge_adapter()
    ratio = float((layer.base_layer.weight.detach() - before).norm() / delta.norm())
    off = float((logits(policy) - alone).abs().max())
    policy.unmerge_adapter()
    assert torch.allclose(logits(policy), alone, atol=1e-5)
    unloaded = float((logits(policy.merge_and_unload()) - alone).abs().max())
    print(f"| ensure_weight_tying={tie} | {ratio:.3f} | merge_adapter {off:.4f}, merge_and_unload {unloaded:.4f} |")
    wrong |= tie and abs(ratio - 1) > 1e-3
raise SystemExit(int(wrong))
