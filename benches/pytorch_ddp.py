"""The peer of two ranks: the model of pytorch_gpt.py in DistributedDataParallel over gloo, a thread a process, tokens a second.

    python benches/pytorch_ddp.py char 2 100     # size, processes, steps; prints the median over steps of the slowest process
"""
import os
import sys

import torch
from torch import distributed, multiprocessing, nn

from pytorch_gpt import SIZES, Gpt, median


def work(rank, ranks, size, steps, results):
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    layers, heads, width, context, batch, vocabulary, bias = SIZES[size]
    own = batch // ranks
    model = nn.parallel.DistributedDataParallel(Gpt(layers, heads, width, context, vocabulary, bias))
    torch.manual_seed(rank)
    results.put(own * ranks * context / median(model, size, own, steps))
    distributed.barrier()
    distributed.destroy_process_group()


def main():
    size, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    spawned = multiprocessing.get_context("spawn")
    results = spawned.SimpleQueue()
    processes = [spawned.Process(target=work, args=(rank, ranks, size, steps, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    print(min(results.get() for _ in processes))
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
