"""What only a GPU has room for: batches beyond 2³¹ logits, and how much gradient cut-cross-entropy's filter drops.

`python -m parity.tools.large [--device cuda]` prints the second as a table, and what replicas cost on the CPU and on the
device, from which `parity.judging.assess.ON_DEVICE` is to be set.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

import torch

from parity.case.inputs import Inputs
from parity.errors import Unsupported
from parity.implementations.implementation import Implementation, Outputs
from parity.recipe import Recipe
from parity.registry import load, loss_family
from parity.rounding.oracle import exact, replicas
from parity.running.provenance import resolve_device
from parity.running.shard import VOCABULARIES


def embedded(implementation: Implementation, rows: int) -> Implementation:
    """The implementation on a case's B·T tokens as the last of `rows`, the others copies without an upstream gradient.

    Outputs and gradients are those of the case alone, so its definition judges an index beyond 2³¹ without being run there.
    """

    def call(x: Inputs) -> Outputs:
        h, ids = x.hidden.flatten(0, 1), x.ids.flatten()
        n = len(ids)
        if rows < n:
            raise Unsupported(f"{n} tokens do not fit into {rows}")
        copies = torch.arange(rows - n, device=x.device) % n
        hidden = torch.cat([h.detach()[copies], h]).unsqueeze(0)
        out = implementation.call(x.replace(hidden=hidden, ids=torch.cat([ids[copies], ids]).unsqueeze(0)))
        return {name: value[0, rows - n :].view(x.ids.shape) for name, value in out.items()}

    return dataclasses.replace(implementation, id=f"{implementation.id} in {rows} rows", call=call)


def dropped(
    device: str, vocabularies: tuple[int, ...], dtypes: tuple[str, ...]
) -> Iterator[tuple[str, int, float, float]]:
    """(dtype, V, peak, share): of the gradient's norm, how much the filter of `cce.default` drops; 1 - |filtered| ÷ |all|."""
    kinds = [load()[f"cce.{name}"] for name in ("default", "unfiltered")]
    for dtype in dtypes:
        for size in vocabularies:
            for peak in (0.5, 1.0, 4.0, 12.0):
                settings = {"B": 1, "T": 64, "V": size, "H": 64, "peak": peak, "grad": "weight", "targets": "likely"}
                fam = loss_family("logprobs")
                x = fam.build(fam.case(1, dtype, settings))
                x = x.replace(**{n: None if t is None else t.to(device) for n, t in x.tensors.items()})
                norms = [_norm(kind, x) for kind in kinds]
                yield dtype, size, peak, 1 - norms[0] / norms[1]


def _norm(kind: Implementation, x: Inputs) -> float:
    weight = x.weight.detach().requires_grad_()
    with kind.around():
        out = kind.call(x.replace(weight=weight))["logps"]
        out.sum().backward()
    assert weight.grad is not None
    return float(weight.grad.double().norm())


def homes(device: str, sizes: tuple[int, ...]) -> Iterator[tuple[int, float, float, float]]:
    """(logits, seconds on the CPU, seconds on the device, largest relative difference) of twelve replicas."""
    fam = loss_family("logprobs")
    for size in sizes:
        case = fam.case(1, "fp32", {"B": 1, "T": 8, "V": size, "H": 16})
        x = fam.build(case)
        found, seconds = [], []
        for where in ("cpu", device):
            moved = x.replace(**{n: None if t is None else t.to(where) for n, t in x.tensors.items()})
            exact(fam, moved)  # the first call loads kernels
            begun = time.perf_counter()
            found.append(replicas(fam, moved, Recipe(), 12, 0))
            seconds.append(time.perf_counter() - begun)
        apart = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(*(f.values() for f in found), strict=True)
        )
        yield 8 * size, seconds[0], seconds[1], apart


def main() -> int:
    """Command line: the tables, Markdown."""
    from parity.process import prepare

    parser = argparse.ArgumentParser(prog="python -m parity.tools.large", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    device = resolve_device(parser.parse_args().device)
    prepare(device, threads=1)
    on_gpu = device == "cuda"
    print("| dtype | V | peak | gradient norm that the filter drops |\n|---|---|---|---|")
    for dtype, size, peak, share in dropped(
        device, VOCABULARIES if on_gpu else (512, 2048), ("fp16", "bf16") if on_gpu else ("fp16",)
    ):
        print(f"| {dtype} | {size:,} | {peak} | {share:.2%} |", flush=True)
    print("\n| logits | CPU, s | device, s | largest relative difference |\n|---|---|---|---|")
    for logits, cpu, there, apart in homes(device, (1024, 8192, 65536, 262_144) if on_gpu else (64,)):
        print(f"| {logits:,} | {cpu:.3f} | {there:.3f} | {apart:.1e} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
