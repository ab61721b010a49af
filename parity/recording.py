"""Recorded rollouts: what a sampler generated, the log-probs it reported, and the trainer's own of the same tokens.

A recording is two files: `NAME.safetensors` with the tensors, and `NAME.json` beside it, which says where they come from
and holds the SHA-256 of the first. Rows are padded at the right; `lengths` say where a row ends.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity import data, decoding
from parity.errors import UsageError
from parity.judge.recipe import DTYPES

SCHEMA = 1
NEEDED = ("prompt_ids", "prompt_lengths", "completion_ids", "completion_lengths", "sampler_logps")
OPTIONAL = ("raw_logps", "trainer_logps", "kept_mass")
FACTS = ("engine", "model", "weights", "dtype", "temperature", "top_p", "top_k", "versions", "command", "sha256")


@dataclasses.dataclass(frozen=True)
class Recording:
    """B rollouts of up to T tokens."""

    name: str  # the file's name without suffix
    # the manifest: engine, model, weights (SHA-256 of the tensors), dtype, temperature, top_p, top_k, versions,
    # command, and what else was written
    facts: Mapping[str, Any]
    prompt_ids: Tensor  # (B, P) int32
    prompt_lengths: Tensor  # (B,) int32
    completion_ids: Tensor  # (B, T) int32
    completion_lengths: Tensor  # (B,) int32
    sampler_logps: Tensor  # (B, T) float32, what the engine reported of each token; NaN where it could not score one
    # (B, T) float32 or None: log-probs at temperature 1 over the whole vocabulary, where the engine has both
    raw_logps: Tensor | None = None
    # (B, T) float32 or None: transformers' model in the same dtype, at the temperature, whole vocabulary
    trainer_logps: Tensor | None = None
    # (B, T) float32 or None: share of the trainer's probability that top-p and top-k keep at each position, 0 where
    # they exclude the token itself
    kept_mass: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: the tokens that were sampled."""
        return torch.arange(self.completion_ids.shape[1]) < self.completion_lengths[:, None]

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion of each row, without padding."""
        ids = zip(self.prompt_ids, self.prompt_lengths, self.completion_ids, self.completion_lengths, strict=True)
        return [(p[:n].tolist(), c[:m].tolist()) for p, n, c, m in ids]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        found = {name: getattr(self, name) for name in (*NEEDED, *OPTIONAL)}
        return {name: value.contiguous() for name, value in found.items() if value is not None}

    def line(self) -> str:
        f = self.facts
        engine = f"{f['engine']} on {f.get('device', 'an unknown device')}"
        sampling = f"temperature {f['temperature']:g}, top-p {f['top_p']:g}"
        cut = f", top-k {f['top_k']}" if f["top_k"] else ""
        return f"{self.name}: {engine}, {f['model']}, {f['dtype']}, {sampling}{cut}"


def save(recording: Recording, folder: Path) -> Path:
    """Write both files into `folder`; the manifest's path."""
    from safetensors.torch import save as bytes_of

    content = bytes_of(recording.tensors())
    decoding.write(folder / f"{recording.name}.safetensors", content)
    facts = {"schema": SCHEMA, **recording.facts, "sha256": hashlib.sha256(content).hexdigest()}
    manifest = folder / f"{recording.name}.json"
    decoding.write(manifest, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    return manifest


def load(path: str | Path) -> Recording:
    """Read a recording by the path of either file, or without suffix. Raises UsageError: one line, where a file is
    missing, is not a recording's, or does not match the manifest's hash."""
    stem = Path(path)
    if stem.suffix in (".json", ".safetensors"):
        stem = stem.with_suffix("")
    manifest, tensors = stem.parent / f"{stem.name}.json", stem.parent / f"{stem.name}.safetensors"
    facts = _facts(manifest)
    try:
        content = tensors.read_bytes()
    except OSError as error:
        raise UsageError(f"{tensors}: {error.strerror}; a recording is this file and {manifest.name}") from None
    found = decoding.tensors_of(content, str(facts["sha256"]), str(tensors))
    return Recording(stem.name, facts, **_checked(tensors, found))


def _facts(manifest: Path) -> dict[str, Any]:
    facts: dict[str, Any] = decoding.decode(dict[str, Any], decoding.text_of(manifest, "recording"), str(manifest))
    decoding.of_schema(facts, SCHEMA, str(manifest), "a recording's manifest")
    if missing := [name for name in FACTS if name not in facts]:
        raise UsageError(f"{manifest}: not a recording's manifest: no {', '.join(missing)}")
    if facts["dtype"] not in DTYPES:
        raise UsageError(f"{manifest}: dtype {facts['dtype']!r} is unknown, choose from {', '.join(DTYPES)}")
    for name in ("temperature", "top_p"):
        if not isinstance(facts[name], int | float) or not facts[name] > 0:
            raise UsageError(f"{manifest}: {name} {facts[name]!r}: there is no distribution to judge")
    return facts


def _checked(path: Path, found: dict[str, Tensor]) -> dict[str, Tensor]:
    problems = [f"no {name}" for name in NEEDED if name not in found]
    problems += [f"{name} unknown" for name in found if name not in (*NEEDED, *OPTIONAL)]
    if not problems:
        shape = found["completion_ids"].shape
        for name, value in found.items():
            floating = name.endswith(("_logps", "_mass"))
            fits = value.shape == shape if floating else value.dim() == (1 if name.endswith("_lengths") else 2)
            wanted = torch.float32 if floating else torch.int32
            if value.dtype != wanted or not fits or value.shape[:1] != shape[:1]:
                like = tuple(shape) if floating else "(rows,)" if name.endswith("_lengths") else "(rows, tokens)"
                problems.append(f"{name} is {value.dtype} of shape {tuple(value.shape)}, not {wanted} of {like}")
    if not problems:
        for ids, lengths in (NEEDED[:2], NEEDED[2:4]):
            if bool(((found[lengths] < 0) | (found[lengths] > found[ids].shape[1])).any()):
                problems.append(f"{lengths} and {ids} do not fit")
        if not found["completion_lengths"].any():
            problems.append("no tokens")
    if problems:
        raise UsageError(f"{path}: not a recording: {', '.join(problems)}")
    return found


@functools.cache
def shipped() -> tuple[str, ...]:
    """The names of the recordings that come with the project."""
    return tuple(sorted(p.stem for p in data.rollouts_dir().glob("*.json")))


@functools.cache
def named(name: str) -> Recording:
    """A shipped recording by name. Raises UsageError naming those that exist."""
    if name not in shipped():
        raise UsageError(f"recording {name!r} is unknown, choose from {', '.join(shipped())}")
    return load(data.rollouts_dir() / name)
