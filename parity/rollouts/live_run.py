"""`python -m parity.rollouts.live_run WHAT`: one live run in a process of its own, told step by step.

vLLM's engine lives in the process and cannot be started twice in it.

    colocate            TRL's GRPOTrainer with vllm_mode="colocate", three steps
    colocate-no-sync    the same, the weights no longer sent to the engine after the first step
    server              vllm_mode="server" over loopback: one step, the weights never sent
    engine CONFIG=VALUE …   a recording of tiny-gemma2 whose engine reads other config values, judged
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from parity.process import prepare

MODEL = "tiny-llama"
START = 420.0
"""Seconds that a server is given to start."""


def main(words: list[str]) -> int:
    """0 where every step agrees, 1 where one does not."""
    prepare("cpu", 1)
    from parity.rollouts import vllm_engine

    vllm_engine.prepare()
    if words[:1] == ["engine"]:
        return engine(dict(word.split("=", 1) for word in words[1:]))
    if words not in (["colocate"], ["colocate-no-sync"], ["server"]):
        print(__doc__)
        return 2
    return trainer(words[0])


def trainer(what: str) -> int:
    """TRL's trainer, step by step."""
    from parity.rollouts import live, models

    folder, begun = models.folder_of(MODEL), time.monotonic()
    with ExitStack() as stack:
        more: dict[str, Any] = {"vllm_mode": "colocate"}
        if what == "server":
            more = {"vllm_mode": "server", "vllm_server_base_url": stack.enter_context(served(folder)), "steps": 1}
            changed = stack.enter_context(live.without_communicator())
        else:
            changed = stack.enter_context(live.runnable())
        print("\n".join(f"changed: {line}" for line in changed))
        made = live.built(folder, **more)
        if what == "colocate-no-sync":
            live.forget_to_sync(made)
        steps = live.run(made, folder)
    for number, step in enumerate(steps, 1):
        print(f"step {number}: {step.line()}")
    print(f"{what}: {time.monotonic() - begun:.0f} s, {vllm_engine_name()}")
    return 0 if all(step.verdict.agrees for step in steps) else 1


def vllm_engine_name() -> str:
    """The engine and TRL, with versions."""
    import trl

    from parity.rollouts.vllm_engine import distribution

    return f"{distribution()}, trl {trl.__version__}"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """`vllm serve`'s API server on a free port of the loopback interface; its address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "128", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs"]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with tempfile.TemporaryFile("w+") as log:  # a file, no pipe: a server whose pipe nobody reads stops when it is full
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[str], url: str, log: IO[str]) -> None:
    import requests

    begun = time.monotonic()
    while time.monotonic() - begun < START:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"the server ended with {process.returncode}: {log.read()[-2000:]}")
        try:
            if requests.get(f"{url}/health", timeout=2).ok:
                return
        except requests.RequestException:
            pass  # not up yet
        time.sleep(1)
    log.seek(0)
    raise RuntimeError(f"no server after {START:g} s: {log.read()[-2000:]}")


def engine(changes: dict[str, str]) -> int:
    """Rollouts of an engine that reads another config than the trainer, and what `judge` says of them."""

    import torch

    from parity import recording
    from parity.rollouts import models, report
    from parity.rollouts.judge import judge
    from parity.rollouts.record import RecordingOptions, record
    from parity.rollouts.scoring import Trainer

    folder = models.folder_of("tiny-gemma2", **{k: json.loads(v) for k, v in changes.items()})
    with tempfile.TemporaryDirectory() as out:
        options = RecordingOptions(
            str(folder), "vllm", Path(out), temperatures=(0.7,), rows=32, max_tokens=16, prompts=_words(out)
        )
        (path,) = record(options)
        found = recording.load(path)
    print(f"the engine's config has {changes or 'nothing changed'}")
    verdict = judge(found, Trainer(models.folder_of("tiny-gemma2"), torch.float32))
    print(report.text(found, verdict))
    return 0 if verdict.agrees else 1


def _words(folder: str) -> Path:
    path = Path(folder) / "prompts.txt"
    path.write_text("\n".join(json.dumps([3 + (7 * i + j) % 50 for j in range(5)]) for i in range(32)))
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
