"""Unsloth's log-probs and GRPO loss, from unsloth-zoo, which patches libraries at import and so wants a process of its own."""
