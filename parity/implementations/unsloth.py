"""Unsloth's log-probs, from unsloth-zoo.

It patches libraries at import, so it wants a process of its own: `parity run --with unsloth-zoo==2026.10.9`. Its licence
is (L)GPL: an optional extra, never a requirement. Its GRPO loss has no adapter yet.
"""

from __future__ import annotations

from parity.families import Inputs
from parity.implementations import Outputs, accepted, implementation, require
from parity.rounding import Recipe


def _chunked(x: Inputs) -> Recipe:
    """A chunk of logits in the dtype of the hidden states, to which the head is cast, and of their gradient likewise."""
    return Recipe(logits="input", dlogits="input", inputs=None if x.weight.dtype == x.hidden.dtype else "input")


@implementation(
    "unsloth.chunked_selective_log_softmax",
    family="logprobs",
    role="candidate",
    library="unsloth-zoo",
    recipe=_chunked,
    sources=("unsloth_zoo.rl_replacements.chunked_hidden_states_selective_log_softmax",),
)
def chunked_selective_log_softmax(x: Inputs) -> Outputs:
    """`chunked_hidden_states_selective_log_softmax(hidden, head, ids, …)`; 0 stands for no scale and no softcap there."""
    import unsloth_zoo.rl_replacements as module

    s = x.settings
    require(s.ignored == "none", "no ignore_index: the caller masks")
    function = accepted(module, "chunked_hidden_states_selective_log_softmax")
    logps = function(
        x.hidden,
        x.weight,
        x.ids.long(),
        logit_scale_multiply=0.0 if s.logit_scale == 1.0 else s.logit_scale,
        logit_softcapping=s.softcap or 0.0,
        temperature=s.temperature,
        lm_head_bias=x.bias,
    )
    return {"logps": logps.view(s.B, s.T)}
