"""The HTTP teacher against TRL's own client, and the distillation checks against trainers that are wrong on purpose."""

import base64
import json
import math
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

from cases.selftest.trainers.asked import rows
from parity.trainers.rig import drive, models, teacher_client
from parity.trainers.rig.teacher_server import scorer, serving

SEQUENCES, PROMPTS = [[5, 9, 12, 3, 44], [7, 8, 3]], [2, 1]


@pytest.fixture(scope="module")
def score():
    return scorer(models.model("llama").eval())


def expected(score, temperature=1.0):
    return [
        torch.log_softmax(score(ids)[start - 1 : -1].double() / temperature, -1).float()
        for ids, start in zip(SEQUENCES, PROMPTS, strict=True)
    ]


@pytest.mark.parametrize("k", [1, 4])
def test_client_reads_what_the_model_says(score, k):
    from trl.generation.vllm_client import VLLMClient

    with serving(score) as teacher:
        client = VLLMClient(base_url=teacher.url, connection_timeout=5.0)
        got = client.get_sequence_logprobs(SEQUENCES, PROMPTS, top_logprobs=k, temperature=0.7)
    for i, truth in enumerate(expected(score, 0.7)):
        top = truth.topk(k, -1)
        actual = truth.gather(-1, torch.tensor(SEQUENCES[i][PROMPTS[i] :]).unsqueeze(-1))
        assert torch.equal(torch.tensor(got["logprobs"][i]), top.values)
        assert got["logprob_token_ids"][i] == top.indices.tolist()
        assert torch.equal(torch.tensor(got["actual_logprobs"][i]), actual)


def test_client_turns_a_missing_log_prob_into_minus_infinity(score):
    from trl.generation.vllm_client import VLLMClient

    def partial(ids):
        return score(ids).index_fill_(0, torch.tensor([2]), torch.nan)

    with serving(partial) as teacher:
        client = VLLMClient(base_url=teacher.url, connection_timeout=5.0)
        got = client.get_sequence_logprobs(SEQUENCES[:1], PROMPTS[:1], top_logprobs=1)
    assert [math.isfinite(row[0]) for row in got["actual_logprobs"][0]] == [True, False, True]


def test_older_protocol(score):
    request = {"sequences": SEQUENCES, "prompt_lengths": PROMPTS, "top_logprobs": 2, "temperature": 1.0}
    with serving(score) as teacher:
        body = json.dumps(request).encode()
        sent = urllib.request.Request(f"{teacher.url}/get_sequence_logprobs/", body)
        answer = json.loads(urllib.request.urlopen(sent).read())
        assert [path for path, _ in teacher.requests] == ["/get_sequence_logprobs"]
    truth = expected(score)
    array = np.frombuffer(base64.b64decode(answer["actual_logprobs_b64"]), np.float32).reshape(2, 3, 1)
    actual = truth[1].gather(-1, torch.tensor(SEQUENCES[1][1:]).unsqueeze(-1))
    assert answer["completion_lengths"] == [3, 2]
    assert np.array_equal(array[1, :2], actual.numpy())
    assert np.isneginf(array[1, 2])


def test_unknown_route_is_404(score):
    with serving(score) as teacher, pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{teacher.url}/generate")


def outcome(path="released", **settings):
    return rows("server-distillation-trainer", "teacher-server", path, **settings)


@pytest.fixture
def as_in_1_3_0(monkeypatch):
    """The server path as trl 1.1.0 to 1.3.0 wired it: what stands at padding goes into the divergence."""
    kind = drive.trl_class(teacher_client.upstream())

    def unmasked(self, teacher_result, student_log_probs, completion_tokens, labels):
        return self._compute_sparse_top_1_divergence_loss(
            student_log_probs=student_log_probs,
            teacher_top1_token_ids=teacher_result["topk_token_ids"].squeeze(-1),
            teacher_top1_logprobs=teacher_result["topk_logprobs"].squeeze(-1),
            reverse_token_ids=completion_tokens,
            reverse_teacher_logprobs=teacher_result["actual_logprobs"],
            labels=labels,
        )

    monkeypatch.setattr(kind, "_compute_server_sparse_top_1_divergence_loss", unmasked)


def test_leaking_padding_is_red_and_the_patch_mends_it(as_in_1_3_0):
    broken = outcome(beta=1.0)
    assert broken["loss"].verdict == "agree"  # nan_to_num: the forward pass shows nothing
    for quantity in ("finite gradient", "gradient"):
        assert broken[quantity].verdict == "disagree", quantity
    assert {row.verdict for row in outcome("fixed", beta=1.0).values()} == {"agree"}


def test_an_accumulated_sum_is_red(monkeypatch):
    kind = drive.trl_class(teacher_client.upstream())
    original = kind.compute_loss

    def summed(self, model, inputs, *args, **kwargs):
        return original(self, model, inputs, *args, **kwargs) * 2

    monkeypatch.setattr(kind, "compute_loss", summed)
    got = outcome(beta=0.5, split="1x2")
    assert got["gradient"].verdict == "disagree"
    assert "is 2 times the definition's" in got["gradient"].message
