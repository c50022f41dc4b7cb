#!/usr/bin/env python3
"""Messages of `hpctrain --spawn` beside plain sockets: bytes a second from one process to another over 127.0.0.1.

    benches/raw_sockets.py [--program target/release/hpctrain] [--rounds 5]

For each size plain sockets and a broadcast over two ranks take turns; prints the medians in GB/s and their ratio.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import subprocess
import time

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]

# Bytes of a measurement.
TOTAL = 1 << 30


def receive(port, size, count):
    memory = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as stream:
        for _ in range(count):
            at = 0
            while at < size:
                at += stream.recv_into(memory[at:])
        stream.sendall(b"x")


def plain(size):
    """Bytes a second of one process that sends messages and another that reads each into the same memory."""
    count = max(4, min(2000, TOTAL // size))
    listener = socket.create_server(("127.0.0.1", 0))
    reader = multiprocessing.Process(target=receive, args=(listener.getsockname()[1], size, count))
    reader.start()
    stream, _ = listener.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = bytes(size)
    begun = time.perf_counter()
    for _ in range(count):
        stream.sendall(memory)
    stream.recv(1)
    seconds = time.perf_counter() - begun
    reader.join()
    return size * count / seconds


def ours(program, size):
    """The same of a broadcast from one rank to another."""
    command = [program, "bench", "comm", "--spawn", "2", "--operations", "broadcast", "--algorithms", "halving-doubling"]
    run = subprocess.run([*command, "--sizes", str(size), "--json"], stdout=subprocess.PIPE, check=True)
    row = json.loads(run.stdout)["rows"][0]
    return row["bytes"] / row["microseconds"] * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| bytes | plain sockets, GB/s | over two ranks, GB/s | ratio |\n|---|---|---|---|")
    for size in SIZES:
        pairs = [(plain(size), ours(arguments.program, size)) for _ in range(arguments.rounds)]
        one, other = (statistics.median(rates) / 1e9 for rates in zip(*pairs))
        print(f"| {size:,} | {one:.2f} | {other:.2f} | {other / one:.2f} |", flush=True)


if __name__ == "__main__":
    main()
