"""The tokens that the installed trainer samples: the same at the same seed, others under another default."""

import pytest

from parity.trainers.rig import drive, sampled
from parity.upstream import trl

pytest.importorskip("trl")


def test_a_seed_gives_the_same_tokens_and_another_default_gives_others(monkeypatch):
    first = sampled.tokens()
    assert len(first) == sampled.PROMPTS * sampled.EACH
    assert all(1 <= len(tokens) <= drive.COMPLETION for tokens in first)
    assert sampled.tokens() == first
    known = trl.fields
    monkeypatch.setattr(trl, "fields", lambda config: {**known(config), "top_k": 1})
    greedy = sampled.tokens()
    assert greedy != first
    assert len({tuple(tokens) for tokens in greedy}) <= sampled.PROMPTS, "one completion a prompt: the likeliest tokens"
