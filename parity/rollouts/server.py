"""A server that speaks the OpenAI completions protocol with log-probs: `vllm serve`, SGLang, and others."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from parity.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts as token ids, and how to sample: one completion each, row i with seed `seed` + i; `top_k` 0: no limit."""

    prompts: list[list[int]]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 32
    seed: int = 0

    @property
    def sampling(self) -> dict[str, Any]:
        """How to sample, as every engine names it."""
        return {"temperature": self.temperature, "top_p": self.top_p}


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions with their log-probs, row by row; NaN for a token that the engine could not score."""

    completions: list[list[int]]  # token ids of each row
    logps: list[list[float]]  # as the engine reports them beside a sampled token
    # at temperature 1 over the whole vocabulary, or None where the engine does not have them
    raw: list[list[float]] | None
    # what the manifest says of the engine: engine, device, versions, and how `logps` are to be understood
    facts: Mapping[str, Any]


TIMEOUT = 600.0
TOKEN_ID = "token_id:"
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Said to a server, which else takes those of the model's generation_config.json."""


def opened(url: str) -> Callable[[Request], Sampled]:
    """Asks the server at `url` for its model; what is returned samples a request.

    Whether the server's log-probs are processed or raw is its own setting and no answer says it: the manifest records
    "server", and `parity rollouts judge` says which of the two they fit. vLLM's are raw unless it was started with
    --logprobs-mode processed_logprobs. Raises UsageError where there is no such server, or it does not answer in the protocol.
    """
    base = url.rstrip("/").removesuffix("/v1")
    name = _ask("GET", f"{base}/v1/models")["data"][0]["id"]
    try:
        version = f"vLLM server {_ask('GET', f'{base}/version')['version']}"
    except (UsageError, KeyError, TypeError):
        version = "OpenAI completions server"  # the question is not part of the protocol

    def sample(request: Request) -> Sampled:
        completions, logps = [], []
        for row, prompt in enumerate(request.prompts):
            body = {"model": name, "prompt": prompt, "max_tokens": request.max_tokens, **request.sampling}
            body |= {"seed": request.seed + row, "logprobs": 1, "return_token_ids": True}  # the last is vLLM's
            body |= {**PLAIN, "top_k": request.top_k or -1}
            answer = _ask("POST", f"{base}/v1/completions", body)
            try:
                choice = answer["choices"][0]
                found = choice["logprobs"]["token_logprobs"]
                ids = _ids(choice)
            except (KeyError, IndexError, TypeError) as error:
                raise UsageError(f"{url}: no log-probs in the answer ({type(error).__name__}: {error})") from None
            if len(ids) != len(found):
                raise UsageError(f"{url}: {len(ids)} tokens with {len(found)} log-probs in row {row}")
            completions.append(ids)
            logps.append([math.nan if v is None else float(v) for v in found])
        return Sampled(completions, logps, None, {"engine": version, "device": "the server's", "reported": "server"})

    return sample


def _ids(choice: dict[str, Any]) -> list[int]:
    """Token ids, in a field of their own or as "token_id:7" in place of the tokens' texts. Raises UsageError for a
    server that gives texts alone, which may be of several tokens."""
    if (given := choice.get("token_ids")) is not None:
        return list(given)
    tokens = choice["logprobs"]["tokens"]
    if not all(t.startswith(TOKEN_ID) for t in tokens):
        raise UsageError(
            "the server gives tokens as text; let it return token ids "
            "(vllm serve does; SGLang: --return-tokens-as-token-ids where it has it)"
        )
    return [int(t.removeprefix(TOKEN_ID)) for t in tokens]


def _ask(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    import requests

    try:
        answer = requests.request(method, url, json=body, timeout=TIMEOUT)
    except requests.RequestException as error:
        raise UsageError(f"{url}: {type(error).__name__}: no server answers there") from None
    if not answer.ok:
        raise UsageError(f"{url}: {answer.status_code} {answer.text.strip()[:200]}")
    try:
        return answer.json()
    except ValueError:
        raise UsageError(f"{url}: the answer is not JSON") from None
