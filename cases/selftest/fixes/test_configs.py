"""Values of a nested text config at the top, where some code reads them."""

import pytest

from cases.selftest.fixes.test_patches import transformers
from parity.fixes import patches


def multimodal(softcap=30.0, **top):
    config = transformers.Gemma3Config(text_config={"final_logit_softcapping": softcap, "num_hidden_layers": 1})
    for name, value in top.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("value", [None, 0.0, 50.0])
def test_lifting_never_overwrites(value):
    config = multimodal(final_logit_softcapping=value)
    patch = patches.lift_text_config_attributes(config)
    assert not patch
    assert config.final_logit_softcapping == value


def test_nothing_to_lift():
    patch = patches.lift_text_config_attributes(multimodal(softcap=None))
    assert not patch
    assert "only in the nested text config" in patch.reason
    config = multimodal()
    config.text_config.my_scale = 0.25
    assert patches.lift_text_config_attributes(config, names=("my_scale",))
    assert config.my_scale == 0.25
