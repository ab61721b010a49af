"""`parity rollouts record`: sample with an engine, score with the trainer's model, write recordings."""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity import recording
from parity.case.case import hashes
from parity.errors import UsageError
from parity.judge.recipe import DTYPES
from parity.recording import Recording
from parity.rollouts import contract, engine_models, push, server, vllm_engine
from parity.rollouts.judge import score
from parity.rollouts.server import Request, Sampled

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


@dataclasses.dataclass(frozen=True)
class RecordingOptions:
    """What the command was asked for; every temperature with every top-p is a recording."""

    model: str
    engine: str
    out: Path
    dtype: str = "fp32"
    temperatures: tuple[float, ...] = (1.0,)
    top_ps: tuple[float, ...] = (1.0,)
    top_k: int = 0
    prompts: Path | None = None
    rows: int = 64
    max_tokens: int = 32
    seed: int = 0
    name: str | None = None
    contract: bool = False
    push: Path | None = None
    adapter: Path | None = None
    sleep: bool = False


def record(options: RecordingOptions) -> Iterator[Path]:
    """The manifests of the recordings, one after the other as they are written."""
    folder = engine_models.folder_of(options.model)
    prompts = read_prompts(options, folder)
    longest = max(map(len, prompts)) + options.max_tokens + 1 + contract.SHARED * options.contract
    sample = engine(options, folder, longest)
    if options.push is not None:
        folder, options = options.push, dataclasses.replace(options, model=str(options.push))
    for temperature, top_p in itertools.product(options.temperatures, options.top_ps):
        request = Request(prompts, temperature, top_p, options.top_k, options.max_tokens, options.seed)
        yield recording.save(_recording(options, folder, request, sample(request)), options.out)
    base = Request(prompts, max_tokens=options.max_tokens, seed=options.seed)
    for asked, request, found in contract.questions(base, sample) if options.contract else ():
        yield recording.save(_recording(options, folder, request, found, asked), options.out)


def engine(options: RecordingOptions, folder: Path, max_length: int) -> Callable[[Request], Sampled]:
    """The engine called for, and what `push` pushes to it. Raises UsageError for one that does not exist or is not there."""
    change = None
    if (options.push and options.engine != "vllm") or (not options.push and (options.adapter or options.sleep)):
        raise UsageError("--push needs --engine vllm, --adapter and --sleep need --push")
    if options.push is not None:
        vllm_engine.prepare()
        model, merged = push.moved(folder, DTYPES[options.dtype], options.push, options.adapter)
        change = functools.partial(push.pushed, model=model, folder=merged, asleep=options.sleep)
    if options.engine == "vllm":
        return vllm_engine.opened(str(folder), options.dtype, max_length, change)
    if options.engine == "transformers":
        return engine_models.opened(str(folder), options.dtype, max_length)
    if options.engine.startswith(("http://", "https://")):
        return server.opened(options.engine)
    raise UsageError(f"engine {options.engine!r} is unknown, choose vllm, transformers or a server's http://…")


def read_prompts(options: RecordingOptions, folder: Path) -> list[list[int]]:
    """Token ids: of the file's lines, each a text or a JSON list of ids; without a file words by hash, for a tiny model.
    Raises UsageError for a file that cannot be read, has no prompts, or is needed."""
    if options.prompts is None:
        if not options.model.startswith(engine_models.PREFIX):
            raise UsageError("--prompts FILE is needed: a prompt a line, as text or as a JSON list of token ids")
        lengths = hashes(options.seed, "prompt length", (options.rows,)) % 9 + 4
        drawn = [hashes(options.seed, f"prompt {i}", (int(n),)) % 50 + 3 for i, n in enumerate(lengths)]
        return [ids.astype(int).tolist() for ids in drawn]
    try:
        lines = [line for line in options.prompts.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{options.prompts}: {error}") from None
    if not lines:
        raise UsageError(f"{options.prompts}: no prompts")
    return [_ids(line, folder) for line in itertools.islice(itertools.cycle(lines), options.rows)]


def _ids(line: str, folder: Path) -> list[int]:
    if line.lstrip().startswith("["):
        try:
            return [int(i) for i in json.loads(line)]
        except (ValueError, TypeError):
            pass  # a text that begins with a bracket
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(line)["input_ids"])


def _recording(options: RecordingOptions, folder: Path, request: Request, found: Sampled, asked: str = "") -> Recording:
    rows = list(zip(request.prompts, found.completions, strict=True))
    sampling = (request.temperature, request.top_p, request.top_k)
    completion_ids = padded(found.completions, torch.int32, request.max_tokens)
    trainer = engine_models.loaded(folder, DTYPES[options.dtype], options.adapter)
    scores = score(trainer, rows, request.max_tokens, sampling)
    kept = scores.kept.float() if request.top_p < 1 or request.top_k > 0 else None
    facts = {
        **found.facts,
        "model": options.model,
        "weights": engine_models.weights_hash(folder),
        "dtype": options.dtype,
        **request.sampling,
        "top_k": request.top_k,
        "seed": request.seed,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "processor": torch.backends.cpu.get_cpu_capability(),
        "command": shlex.join(["parity", *sys.argv[1:]]),
        **({"asked": asked} if asked else {}),
    }
    stem = options.name or Path(options.model).name.removeprefix(engine_models.PREFIX)
    name = f"{stem}-{options.dtype}-t{request.temperature:g}-p{request.top_p:g}"
    return Recording(
        name + (f"-k{request.top_k}" if request.top_k else f"-{asked.replace(' ', '-')}" * bool(asked)),
        facts,
        padded(request.prompts, torch.int32),
        torch.tensor([len(p) for p in request.prompts], dtype=torch.int32),
        completion_ids,
        torch.tensor([len(c) for c in found.completions], dtype=torch.int32),
        padded(found.logps, torch.float32, request.max_tokens),
        None if found.raw is None else padded(found.raw, torch.float32, request.max_tokens),
        scores.full.float(),
        kept,
    )


def padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype, width: int = 0) -> Tensor:
    """Rows of different lengths as one tensor, zeros at the right."""
    out = torch.zeros(len(rows), max([width, *map(len, rows)]), dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(list(row), dtype=dtype)
    return out
