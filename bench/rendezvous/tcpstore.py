"""The peer's side of `meet`: many clients of PyTorch's TCPStore, each with a connection of its own.

Per client: connect, set, get of another client's key, barrier (add, then wait for a key that the last one sets).
The server has a process of its own; the clients live in a few processes with a few threads each, which do their
clients' calls one after the other (TCPStore's calls block, and let other threads run meanwhile).

Prints one JSON line: {"ranks": .., "connect_s": .., "total_s": ..}. Importing torch and starting processes is not timed.
"""

import argparse
import datetime
import json
import multiprocessing
import resource
import threading
import time

TIMEOUT = datetime.timedelta(seconds=120)


def raise_limit():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def store(port, world, is_master):
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, world, is_master, TIMEOUT, wait_for_workers=False)


def serve(pipe):
    raise_limit()
    server = store(0, None, True)
    pipe.send(server.port)
    pipe.recv()


def in_threads(shares, work):
    threads = [threading.Thread(target=lambda share=share: [work(i) for i in share]) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def clients(pipe, port, world, ranks, num_threads):
    import torch.distributed  # noqa: F401  (before the clock starts)

    raise_limit()
    shares = [ranks[i::num_threads] for i in range(num_threads)]
    stores = {}

    def connect(rank):
        stores[rank] = store(port, world, False)

    def exchange(rank):
        stores[rank].set(f"rank/{rank}", str(rank))

    def arrive(rank):
        other = (rank + world // 2 + 1) % world
        assert stores[rank].get(f"rank/{other}") == str(other).encode()
        if stores[rank].add("barrier", 1) == world:
            stores[rank].set("barrier/all", "")

    def leave(rank):
        stores[rank].wait(["barrier/all"], TIMEOUT)

    pipe.send("ready")
    pipe.recv()
    in_threads(shares, connect)
    pipe.send("connected")
    for work in (exchange, arrive, leave):
        in_threads(shares, work)
    pipe.send("done")
    pipe.recv()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    to_server, theirs = context.Pipe()
    children = [context.Process(target=serve, args=(theirs,))]
    children[0].start()
    port = to_server.recv()
    pipes = []
    for part in range(options.processes):
        ours, theirs = context.Pipe()
        ranks = list(range(part, options.ranks, options.processes))
        arguments = (theirs, port, options.ranks, ranks, options.threads)
        children.append(context.Process(target=clients, args=arguments))
        children[-1].start()
        pipes.append(ours)

    def hear(word):
        assert all(pipe.recv() == word for pipe in pipes)

    hear("ready")
    began = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    hear("connected")
    connected = time.monotonic() - began
    hear("done")
    total = time.monotonic() - began
    for pipe in pipes + [to_server]:
        pipe.send("end")
    for child in children:
        child.join()
    print(json.dumps({"ranks": options.ranks, "connect_s": round(connected, 3), "total_s": round(total, 3)}))


if __name__ == "__main__":
    main()
