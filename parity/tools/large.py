"""What only a GPU has room for: batches beyond 2³¹ logits; and from which size on replicas are faster there.

`python -m parity.tools.large --device cuda` prints what replicas cost on the CPU and on the device, and where they cross: what
`parity.judging.assess.ON_DEVICE` is to be.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch

from parity.case.inputs import Inputs
from parity.errors import Unsupported
from parity.implementations.implementation import Implementation, Outputs
from parity.judge.recipe import Recipe
from parity.judging.assess import ON_DEVICE
from parity.judging.oracle import exact, replicas
from parity.registry import loss_family
from parity.results.report import measured
from parity.running.provenance import resolve_device

SIZES = (128, 1_024, 8_192, 32_768, 131_072, 262_144)
"""Vocabularies of eight tokens, up to 2²¹ logits."""


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


def homes(device: str, sizes: tuple[int, ...]) -> Iterator[tuple[int, float, float, float]]:
    """(logits, seconds on the CPU, seconds on the device, largest relative difference) of twelve replicas."""
    fam = loss_family("logprobs")
    for size in sizes:
        case = fam.case(1, "fp32", {"B": 1, "T": 8, "V": size, "H": 16})
        x = fam.build(case)
        found, seconds = [], []
        for where in ("cpu", device):
            moved = x.to(where)
            exact(fam, moved)  # the first call loads kernels
            replicas(fam, moved, Recipe(), 1, 0)
            begun = time.perf_counter()
            found.append(replicas(fam, moved, Recipe(), 12, 0))
            seconds.append(time.perf_counter() - begun)
        apart = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(*(f.values() for f in found), strict=True)
        )
        yield 8 * size, seconds[0], seconds[1], apart


def crossing(found: Sequence[tuple[int, float, float, float]]) -> str:
    """The smallest size from which the device is faster at every size measured, beside `ON_DEVICE`."""
    slower = [logits for logits, cpu, there, _ in found if there >= cpu]
    faster = [logits for logits, *_ in found if logits > max(slower, default=0)]
    where = f"from {min(faster):,} logits on" if faster else f"at none of these sizes, the largest {found[-1][0]:,}"
    return f"Replicas are faster on the device {where}; ON_DEVICE is {ON_DEVICE:,}."


def main() -> int:
    """Command line: the table and the crossing, Markdown."""
    from parity.process import prepare

    parser = argparse.ArgumentParser(
        prog="python -m parity.tools.large", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    device = resolve_device(parser.parse_args().device)
    prepare(device, threads=1)
    found = list(homes(device, SIZES if device == "cuda" else SIZES[:1]))
    rows = ([f"{logits:,}", f"{cpu:.3f}", f"{there:.3f}", f"{apart:.1e}"] for logits, cpu, there, apart in found)
    table = measured.table([">logits", ">CPU, s", ">device, s", ">largest relative difference"], rows)
    print("\n".join([*table, "", crossing(found)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
