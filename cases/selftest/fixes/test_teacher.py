"""The teacher's padding is masked in server distillation."""

import pytest
import torch
from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer

from parity.fixes import patches


def unmasked(self, teacher_result, student_log_probs, completion_tokens, labels):
    """The server loss as trl 1.1.0 to 1.3.0 wired it: required positions are checked, padding goes in as it is."""
    required = labels != -100
    if (required & ~torch.isfinite(teacher_result["actual_logprobs"])).any():
        raise ValueError("Teacher server is missing actual-token logprobs for required positions")
    return self._compute_sparse_top_1_divergence_loss(
        student_log_probs=student_log_probs,
        teacher_top1_token_ids=teacher_result["topk_token_ids"].squeeze(-1),
        teacher_top1_logprobs=teacher_result["topk_logprobs"].squeeze(-1),
        reverse_token_ids=completion_tokens,
        reverse_teacher_logprobs=teacher_result["actual_logprobs"],
        labels=labels,
    )


def ragged_batch():
    torch.manual_seed(0)
    labels = torch.tensor([[3, 4, 5], [6, -100, -100]])
    padding = labels == -100
    actual = torch.full((2, 3), -1.5).masked_fill(padding, -torch.inf)
    top = torch.full((2, 3, 1), -0.4).masked_fill(padding.unsqueeze(-1), -torch.inf)
    teacher = {"actual_logprobs": actual, "topk_logprobs": top, "topk_token_ids": torch.ones(2, 3, 1, dtype=torch.long)}
    return teacher, torch.randn(2, 3, 8, requires_grad=True), labels


def server_gradient(instance):
    teacher, logits, labels = ragged_batch()
    loss = instance._compute_server_sparse_top_1_divergence_loss(
        teacher, logits.log_softmax(-1), labels.clamp(min=0), labels=labels
    )
    return loss, torch.autograd.grad(loss, logits)[0], labels


def test_the_newest_trl_masks_the_padding_itself():
    patch = patches.mask_teacher_padding()
    assert not patch
    assert "ServerDistillationTrainer masks the padding itself" in patch.reason


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_ragged_completions_have_finite_gradients(monkeypatch, beta, tail, alone):
    """In one trainer, or in all of its class."""
    instance = object.__new__(ServerDistillationTrainer)
    instance.beta, instance.loss_add_tail, instance.reverse_kl_top_1_mode = beta, tail, "sampled"
    want_loss, want, labels = server_gradient(instance)  # the newest release is right
    monkeypatch.setattr(ServerDistillationTrainer, "_compute_server_sparse_top_1_divergence_loss", unmasked)
    if beta == 1.0 and tail:
        loss, gradient, _ = server_gradient(instance)
        assert loss.isfinite()
        assert not gradient.isfinite().all()
    owner = instance if alone else None
    with patches.mask_teacher_padding(owner) as patch:
        assert patch
        assert len(patch) == 1
        with patches.mask_teacher_padding(owner) as again:
            assert "already" in again.reason
        loss, gradient, labels = server_gradient(instance)
        torch.testing.assert_close(loss, want_loss)
        torch.testing.assert_close(gradient, want)
        assert (gradient[labels == -100] == 0).all()
        teacher, logits, labels = ragged_batch()
        teacher["actual_logprobs"][0, 1] = -torch.inf
        with pytest.raises(ValueError, match="missing actual-token logprobs"):
            instance._compute_server_sparse_top_1_divergence_loss(teacher, logits.log_softmax(-1), labels, labels)
        assert teacher["actual_logprobs"].isinf().sum() == 3  # the caller's tensors are left alone
    assert ServerDistillationTrainer._compute_server_sparse_top_1_divergence_loss is unmasked
    assert "_compute_server_sparse_top_1_divergence_loss" not in vars(instance)


def test_a_loss_that_cannot_be_tried_is_left_alone(monkeypatch):
    monkeypatch.setattr(ServerDistillationTrainer, "_compute_server_sparse_top_1_divergence_loss", lambda self: None)
    patch = patches.mask_teacher_padding()
    assert not patch
    assert "ServerDistillationTrainer could not be tried (TypeError" in patch.reason
