"""Two processes over gloo."""

import torch
import torch.distributed as dist


def of_two(work, folder):
    """What `work(rank)` returns on each of two ranks."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    arguments = [(work, rank, folder / "store", queue) for rank in range(2)]
    workers = [context.Process(target=_rank, args=given, daemon=True) for given in arguments]
    for worker in workers:
        worker.start()
    found = dict(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(timeout=20)
    return [found[rank] for rank in range(2)]


def _rank(work, rank, path, queue):
    torch.set_num_threads(1)  # a forked OpenMP pool would hang
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    queue.put((rank, work(rank)))
    dist.destroy_process_group()
