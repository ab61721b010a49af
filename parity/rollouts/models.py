"""The tiny models that recordings are made of: those of the trainer checks with heads of 32, the least that vLLM takes."""

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from parity.data import rollouts_dir
from parity.errors import UsageError
from parity.trainers.rig import models
from parity.upstream import trl

TINY = ("llama", "qwen2", "gemma2")
PREFIX = "tiny-"
HEAD = 32
"""Size of an attention head; vLLM's attention on a CPU has 32, 64, 80, 96, 112 and 128."""


def config(name: str) -> Any:
    """The architecture's config, twice as wide."""
    given = models.config(name)
    given.hidden_size = HEAD * given.num_attention_heads
    if getattr(given, "head_dim", None) is not None:
        given.head_dim = HEAD
    if hasattr(given, "query_pre_attn_scalar"):
        given.query_pre_attn_scalar = HEAD
    return given


def folder_of(model: str, **changes: Any) -> Path:
    """A model's folder: DIR itself, or of the tiny model `tiny-NAME` that is shipped with the recordings.

    `changes` are config values that a copy's config.json has and the weights know nothing of: a lost softcap.

    Raises:
        UsageError: for what is neither.
    """
    folder = Path(model)
    if model.startswith(PREFIX) and model.removeprefix(PREFIX) in TINY:
        folder = rollouts_dir() / "models" / model.removeprefix(PREFIX)
        return _changed(folder, tuple(sorted(changes.items()))) if changes else folder
    if not (folder / "config.json").exists():
        tiny = ", ".join(PREFIX + name for name in TINY)
        raise UsageError(f"model {model!r}: no folder with a config.json; or one of {tiny}")
    return folder


@functools.cache
def _changed(folder: Path, changes: tuple[tuple[str, Any], ...]) -> Path:
    out = _root() / "-".join([folder.name, *(f"{k}={v}" for k, v in changes)])
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | dict(changes), indent=1))
    return out


def make(name: str, folder: Path) -> None:
    """How a shipped model was made. Its weights come with the recordings all the same: the scale of a head is measured by a
    forward pass, whose last bits change with the version of transformers, and a recording is of one set of weights."""
    models.write(config(name), folder)


@functools.cache
def _root() -> Path:
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="parity-rollouts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def loaded(folder: Path, dtype: torch.dtype, attention: str = "eager") -> Any:
    """The causal language model in `folder`, in evaluation mode."""
    import transformers

    with trl.quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=dtype, attn_implementation=attention
        ).eval()


def has_sdpa(folder: Path) -> bool:
    """Whether the model's class runs with torch's fused attention."""
    import transformers

    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return bool(getattr(getattr(transformers, name, None), "_supports_sdpa", False))


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of the tensors in the folder's safetensors files, sorted by name."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name).contiguous()
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
