"""A teacher server on loopback with the part of vLLM's API that TRL's `VLLMClient` uses, backed by a real model.

Two protocols: `POST /v1/completions` with `prompt_logprobs` (vLLM's own server, TRL since 1.12) and
`POST /get_sequence_logprobs/` (`trl vllm-serve`, TRL 1.1 to 1.11, arrays in base64). The contract between teacher and
trainer: every completion position carries the k likeliest tokens and the token that is there, finite; a position that
the server has nothing for is absent or NaN, and the client turns it into -inf.
"""

import base64
import contextlib
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

Score = Callable[[list[int]], Tensor]
"""Token ids of one sequence -> log-probs (T, V) of the token after each position, float."""


def scorer(model: Any) -> Score:
    """Log-softmax of the model's logits on one unpadded sequence, (T, V), in the dtype of the logits."""

    @torch.no_grad()
    def score(ids: list[int]) -> Tensor:
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)

    return score


class Teacher:
    """A running server: `url`, `requests` as they came, and `answers`, the log-probs (T, V) of every scored sequence."""

    def __init__(self, score: Score):
        self.score = score
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[tuple[int, ...], Tensor] = {}
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def logps(self, ids: list[int], temperature: float) -> Tensor:
        """Row t: log-probs of token t given those before it; row 0, which nothing predicts, is NaN. (T, V) float32."""
        found = torch.log_softmax(self.score(ids)[:-1].double() / temperature, -1).float()
        rows = torch.cat([torch.full_like(found[:1], torch.nan), found]) if len(ids) > 1 else found.new_empty(0, 0)
        self.answers[tuple(ids)] = rows
        return rows

    def completions(self, request: dict[str, Any]) -> dict[str, Any]:
        """vLLM's answer to `/v1/completions` with `prompt_logprobs`: k likeliest and the actual token, with ranks."""
        k = request["prompt_logprobs"]
        choices = []
        for index, ids in enumerate(request["prompt"]):
            rows = self.logps(ids, request["temperature"])
            entries = [None, *(_ranked(row, k, token) for row, token in zip(rows[1:], ids[1:], strict=True))]
            choices.append({"index": index, "text": "", "finish_reason": "length", "prompt_logprobs": entries})
        return {"id": "cmpl-0", "object": "text_completion", "model": request["model"], "choices": choices}

    def sequence_logprobs(self, request: dict[str, Any]) -> dict[str, Any]:
        """`trl vllm-serve`'s answer, arrays padded with -inf to the longest completion."""
        k = request["top_logprobs"]
        pairs = list(zip(request["sequences"], request["prompt_lengths"], strict=True))
        rows = [self.logps(ids, request["temperature"])[start:] for ids, start in pairs]
        tops = [row.topk(k, -1) for row in rows]
        width = max(len(row) for row in rows)
        values, ids_of = np.full((len(rows), width, k), -np.inf, np.float32), np.zeros((len(rows), width, k), np.int32)
        actual, tokens = np.full((len(rows), width, 1), -np.inf, np.float32), np.zeros((len(rows), width, 1), np.int32)
        for i, ((ids, start), row, top) in enumerate(zip(pairs, rows, tops, strict=True)):
            n, there = len(row), torch.tensor(ids[start:]).unsqueeze(-1)
            values[i, :n], ids_of[i, :n] = top.values, top.indices
            actual[i, :n], tokens[i, :n] = row.gather(-1, there), there
        arrays = {"logprobs": values, "token_ids": ids_of, "actual_logprobs": actual, "actual_token_ids": tokens}
        encoded = {f"{name}_b64": base64.b64encode(a.tobytes()).decode() for name, a in arrays.items()}
        return encoded | {"shape": [len(rows), width, k], "completion_lengths": [len(row) for row in rows]}


def _ranked(row: Tensor, k: int, token: int) -> dict[str, dict[str, Any]]:
    ids = [*row.topk(min(k, row.numel())).indices.tolist(), token]
    ranks = [*range(1, len(ids)), int((row > row[token]).sum()) + 1]
    return {str(i): {"logprob": float(row[i]), "rank": r, "decoded_token": ""} for i, r in zip(ids, ranks, strict=True)}


def _handler(teacher: Teacher) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answers = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": "teacher", "object": "model"}]}}
            self._answer(answers.get(self.path.rstrip("/")))

        def do_POST(self) -> None:
            answers = {"/v1/completions": teacher.completions, "/get_sequence_logprobs": teacher.sequence_logprobs}
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.rstrip("/")
            teacher.requests.append((path, request))
            self._answer(answers[path](request) if path in answers else None)

        def _answer(self, content: dict[str, Any] | None) -> None:
            body = json.dumps({"error": f"no route {self.path}"} if content is None else content).encode()
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr for each request."""

    return Handler


@contextlib.contextmanager
def serving(score: Score) -> Iterator[Teacher]:
    """A teacher for the time of the block, reached without a proxy; TRL's client is let through without vLLM.

    `VLLMClient` refuses to exist where vllm is not installed, though scoring over HTTP does not use it.
    """
    from trl.generation import vllm_client

    here = mock.patch.dict(os.environ, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    with here, mock.patch.object(vllm_client, "is_vllm_available", return_value=True):
        teacher = Teacher(score)
        try:
            yield teacher
        finally:
            teacher.close()
