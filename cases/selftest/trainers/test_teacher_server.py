"""The check of a teacher on a server against trainers that are wrong on purpose."""

from cases.selftest.trainers.asked import rows
from parity.trainers.checks import distillation
from parity.trainers.rig import drive


def outcome(path="released", **settings):
    return rows("server-distillation-trainer", "teacher-server", path, **settings)


def unmasked(self, teacher_result, student_log_probs, completion_tokens, labels):
    """The server path as trl 1.1.0 to 1.3.0 wired it: what stands at padding goes into the divergence."""
    return self._compute_sparse_top_1_divergence_loss(
        student_log_probs=student_log_probs,
        teacher_top1_token_ids=teacher_result["topk_token_ids"].squeeze(-1),
        teacher_top1_logprobs=teacher_result["topk_logprobs"].squeeze(-1),
        reverse_token_ids=completion_tokens,
        reverse_teacher_logprobs=teacher_result["actual_logprobs"],
        labels=labels,
    )


def test_leaking_padding_is_red(monkeypatch):
    kind = drive.trl_class(distillation.upstream())
    monkeypatch.setattr(kind, "_compute_server_sparse_top_1_divergence_loss", unmasked)
    broken = outcome(beta=1.0)
    assert broken["loss"].verdict == "agree"  # nan_to_num: the forward pass shows nothing
    assert broken["gradient"].verdict == "disagree" and "(not finite)" in broken["gradient"].message


def test_an_accumulated_sum_is_red(monkeypatch):
    kind = drive.trl_class(distillation.upstream())
    original = kind.compute_loss
    monkeypatch.setattr(kind, "compute_loss", lambda self, *args, **more: original(self, *args, **more) * 2)
    assert "is 2 times the definition's" in outcome(beta=0.3, split="1x2")["gradient"].message
