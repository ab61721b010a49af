"""A causal LM that returns a case's hidden states, and a tokenizer: TRL's trainer runs on them.

The backbone returns stored hidden states, a leaf, at the positions that predict the completion; the last token of a prompt
tells which sequence it is. The LM head is a real Linear, tied or biased as the case says. transformers is imported on first use.
"""

import functools
from typing import Any

import torch
from torch import nn

from parity.case.inputs import Inputs
from parity.implementations import plain
from parity.implementations.limits import require
from parity.upstream import trl

PROMPT = 2
"""Prompt length: a left-padded pair, so that the first completion token is predicted from a real position."""


def _nothing(self: Any) -> None:
    """The tensors of the case take the place of what would be drawn."""


@functools.cache
def classes() -> tuple[type, type]:
    """A configuration and a causal LM whose backbone returns stored hidden states; made on first use."""
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

    class ReplayConfig(PretrainedConfig):
        model_type = "parity_replay"

        def __init__(self, vocab_size: int = 8, hidden_size: int = 8, **kwargs: Any):
            self.vocab_size, self.hidden_size = vocab_size, hidden_size
            super().__init__(**{"num_hidden_layers": 1, "num_attention_heads": 1, **kwargs})

    class ReplayBackbone(PreTrainedModel):
        config_class = ReplayConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.embed_tokens: nn.Module = nn.Embedding(1, 1)
            self.tied = False
            self.post_init()

        init_weights = _nothing

        def get_input_embeddings(self) -> nn.Module:
            return self.embed_tokens

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            hidden = self.hidden
            if self.tied:
                hidden = hidden + plain.embedded(self.previous_ids, self.embed_tokens.weight)
            # a subclass scores some rows, in another order, or with their padding changed or cut
            if not torch.equal(input_ids, self.ids):
                rows, width, mask = input_ids[:, PROMPT - 1], input_ids.shape[1], kwargs.get("attention_mask")
                own = bool((rows < len(self.ids)).all())
                if own:
                    same = input_ids == self.ids[rows][:, :width]
                    own = bool((same if mask is None else same | (mask == 0)).all())
                require(
                    own,
                    "the model here has hidden states for the sequences of the case alone, each in a row of its own",
                )
                hidden = hidden[rows, :width]
            return BaseModelOutputWithPast(last_hidden_state=hidden)

    class ReplayForCausalLM(PreTrainedModel, GenerationMixin):
        config_class = ReplayConfig
        base_model_prefix = "model"

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = ReplayBackbone(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
            self.post_init()

        init_weights = _nothing

        def get_input_embeddings(self) -> nn.Module:
            return self.model.embed_tokens

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, input_ids: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
            hidden = self.model(input_ids, **kwargs).last_hidden_state
            if logits_to_keep:
                hidden = hidden[:, -logits_to_keep:]
            z = self.lm_head(hidden.to(self.lm_head.weight.dtype))
            if self.config.logit_scale is not None:
                z = z * self.config.logit_scale
            if self.config.final_logit_softcapping is not None:
                z = torch.tanh(z / self.config.final_logit_softcapping) * self.config.final_logit_softcapping
            return CausalLMOutputWithPast(logits=z)

    return ReplayConfig, ReplayForCausalLM


def prompts(x: Inputs) -> torch.Tensor:
    """(B, PROMPT): a padding token, and the number of the sequence."""
    numbers = torch.arange(x.settings.B, device=x.hidden.device)
    return torch.stack([torch.zeros_like(numbers), numbers], 1)


def tokenizer() -> Any:
    return trl.tokenizer({"<pad>": 0, "<eos>": 1, "w": 2}, pad_token="<pad>")


def model(x: Inputs) -> Any:
    """The replay model of a case: the case's leaves are its parameters, so that the harness reads their gradients."""
    configuration, model_class = classes()
    s = x.settings
    config = configuration(
        vocab_size=s.V,
        hidden_size=s.H,
        head_bias=x.bias is not None,
        final_logit_softcapping=s.softcap,
        logit_scale=None if s.logit_scale == 1.0 else s.logit_scale,
        tie_word_embeddings=False,
    )
    out = model_class(config)
    out.lm_head.weight = x.weight
    if x.bias is not None:
        out.lm_head.bias = x.bias
    out.model.hidden = nn.functional.pad(x.hidden, (0, 0, PROMPT - 1, 1))
    out.model.ids = torch.cat([prompts(x), x.ids.long()], 1)
    if s.head == "tied":
        out.model.tied = True
        out.model.previous_ids = nn.functional.pad(x.previous_ids, (PROMPT - 1, 1))
        out.model.embed_tokens = nn.Embedding(s.V, s.H, _weight=x.weight.detach())
        out.model.embed_tokens.weight = out.lm_head.weight
    return out
