"""The runtime patches on real libraries: what upstream does first (so that each test can fail), then what we do."""

import contextlib
import logging
import sys

import pytest
import torch
from trl.models import utils

from parity.fixes import patch as patch_module
from parity.fixes import patches


def test_flags_come_back_after_an_error():
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    for layer, flag in zip(layers, (True, False, True), strict=True):
        layer.gradient_checkpointing = flag
    raised = pytest.raises(RuntimeError, match="out of memory")
    with patches.keep_gradient_checkpointing(), raised, utils.disable_gradient_checkpointing(layers):
        raise RuntimeError("out of memory")
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True]


def test_applying_twice_is_harmless_and_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(patch_module, "_logged", set())
    with caplog.at_level(logging.INFO, "parity.fixes"), patches.keep_gradient_checkpointing() as first:
        replacement = utils.disable_gradient_checkpointing
        with patches.keep_gradient_checkpointing() as second, patches.keep_gradient_checkpointing() as third:
            assert not second
            assert not third
            assert second.reason == "already applied"
        assert utils.disable_gradient_checkpointing is replacement
    assert len(caplog.records) == 2
    assert len(first) > 0


def test_nothing_to_keep_where_trl_is_right(monkeypatch):
    @contextlib.contextmanager
    def harmless(model, *args, **kwargs):
        yield

    monkeypatch.setattr(utils, "disable_gradient_checkpointing", harmless)
    monkeypatch.setattr(utils, "unwrap_model_for_generation", harmless)
    patch = patches.keep_gradient_checkpointing()
    assert not patch
    assert "no longer overwrite" in patch.reason


def test_nothing_to_keep_without_trl(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.models.utils", None)
    patch = patches.keep_gradient_checkpointing()
    assert not patch
    assert "trl cannot be imported" in patch.reason
