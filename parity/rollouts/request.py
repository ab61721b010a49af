"""What an engine is asked for and what it answers."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts as token ids, and how to sample: one completion each, row i with seed `seed` + i.

    `top_k` 0 and `top_p` 1 leave the distribution whole.
    """

    prompts: list[list[int]]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 32
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions with their log-probs, row by row; None for a token that the engine could not score.

    Attributes:
        completions: token ids of each row.
        logps: as the engine reports them beside a sampled token.
        raw: at temperature 1 over the whole vocabulary, or None where the engine does not have them.
        facts: what the manifest says of the engine: engine, device, versions, and how `logps` are to be understood.
    """

    completions: list[list[int]]
    logps: list[list[float | None]]
    raw: list[list[float | None]] | None
    facts: Mapping[str, Any]
