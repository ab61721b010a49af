"""Two processes over gloo."""

import traceback

import torch
import torch.distributed as dist


class Failed(str):
    """A rank's traceback."""


def of_two(work, folder):
    """What `work(rank)` returns on each of two ranks."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    arguments = [(work, rank, folder / "store", queue) for rank in range(2)]
    workers = [context.Process(target=_rank, args=given, daemon=True) for given in arguments]
    for worker in workers:
        worker.start()
    found = {}
    for _ in workers:
        rank, told = queue.get(timeout=120)
        assert not isinstance(told, Failed), told  # the other rank may wait for ever
        found[rank] = told
    for worker in workers:
        worker.join(timeout=20)
    return [found[rank] for rank in range(2)]


def _rank(work, rank, path, queue):
    torch.set_num_threads(1)  # a forked OpenMP pool would hang
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        queue.put((rank, work(rank)))
    except BaseException:
        queue.put((rank, Failed(traceback.format_exc())))
        raise
    dist.destroy_process_group()
