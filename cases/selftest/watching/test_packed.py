"""SFT's packed rows, each sequence of which is looked at by itself."""

import functools
from unittest import mock

import pytest
import torch

from cases.selftest.watching.runs import of, watched
from parity.watching import taps

PACKED = {"packing": True, "max_length": 64, "per_device_train_batch_size": 2}


@pytest.mark.parametrize("wanted", [PACKED, {"padding_free": True, "max_length": None}, PACKED | {"loss_type": "dft"}])
def test_right_ones_are_silent_and_looked_at(tmp_path, said, wanted):
    watch, lines = watched(of("sft-trainer", **wanted), tmp_path)
    assert not watch.findings and len(lines) == 2
    assert min(line["tokens"] for line in lines) > 8 and "watch/trainer_units" in lines[0]
    assert not [line for line in said if "no log-probs" in line]


def leaking(trainer, change=lambda ids: {"attention_mask": torch.ones_like(ids)}):
    """The trainer, whose model gets other arguments in training, made of `input_ids`; a mask of ones shows all tokens before."""
    forward = trainer.model.forward

    def changed(*args, **kwargs):
        return forward(*args, **kwargs | (change(kwargs["input_ids"]) if kwargs.get("fused_lm_head") else {}))

    trainer.model.forward = functools.wraps(forward)(changed)
    return trainer


def named(watch):
    causes = [f.causes for f in watch.findings if f.what == "trainer"]
    assert causes and all("sequences change each other in their row" in c for c in causes), watch.findings


def test_positions_that_go_on_are_found(tmp_path):
    trainer = leaking(of("sft-trainer", **PACKED), lambda ids: {"position_ids": torch.arange(ids.shape[1])[None]})
    watch, _ = watched(trainer, tmp_path)
    assert "trainer" in {f.what for f in watch.findings}


def test_a_row_that_sees_those_before_is_named(tmp_path):
    watch, _ = watched(leaking(of("sft-trainer", **PACKED)), tmp_path)
    named(watch)


@pytest.mark.parametrize("behind", [None, 128])
def test_they_are_named_with_padding_behind_and_by_logits_of_their_own_tokens(tmp_path, behind):
    trainer, tables = leaking(of("sft-trainer", **PACKED, pad_to_multiple_of=behind)), []
    trainer.model.lm_head.register_forward_hook(lambda _, args, out: tables.append(out.shape[1]))
    watch, _ = watched(trainer, tmp_path)
    named(watch)
    assert max(tables) < PACKED["max_length"] // 2


def test_a_loss_twice_as_large_is_found_in_packed_rows(tmp_path):
    trainer = of("sft-trainer", **PACKED)
    step = trainer.compute_loss

    def doubled(*args, **kwargs):
        out = step(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    trainer.compute_loss = doubled
    watch, _ = watched(trainer, tmp_path)
    assert any("2 times" in f.text for f in watch.findings), watch.findings


def test_what_is_no_packed_row_is_not_taken_for_one():
    ids = torch.arange(6)[None]
    unpacked = functools.partial(taps._unpacked, torch.zeros(1, 5), mock.Mock(), ids, ids)
    assert unpacked(torch.tensor([[0, 1, 0, 1, 2, 0]])).ids.tolist() == [[0, 1, 0], [2, 3, 4]]
    assert unpacked(torch.tensor([[0, 1, 2, 0, 0, 0]])).ids.tolist() == [[0, 1, 2]]
    assert unpacked(torch.tensor([[1, 2, 0, 1, 2, 3]])) is None
    assert unpacked(torch.tensor([[0, 1, 0, 2, 3, 4]])) is None
    assert unpacked(torch.tensor([[3, 4, 5, 6, 7, 8]])) is None
