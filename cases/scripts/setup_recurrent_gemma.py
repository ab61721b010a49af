import torch
import transformers


def recurrent_gemma(**more):
    """A tiny model with a recurrent and an attention layer."""
    torch.manual_seed(0)
    return transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=16,
            lru_width=32,
            conv1d_width=4,
            attention_window_size=64,
            block_types=["recurrent", "attention"],
            **more,
        )
    )
