"""gloo's side of the comparison, through torch.distributed on loopback TCP, one thread a rank.

    python gloo_collectives.py LIBMETER all-reduce --world 2 --sizes 16,4K,1M

In: the built meter library (the protocol of meter.h, shared with the C peers) and its command line.
Out: one JSON array on stdout. An operation that this gloo has not got gives an empty array and a note on stderr.
The calls into the meter cost about 1 us of the timed part; gloo's fastest call takes a hundred times that.
"""

import ctypes
import os
import signal
import sys
import tempfile

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

OPS = ["all-reduce", "reduce", "broadcast", "all-gather", "gather",
       "reduce-scatter", "scatter", "all-to-all", "barrier", "send-recv"]


class Args(ctypes.Structure):
    """meter_args of meter.h."""

    _fields_ = [("op", ctypes.c_int), ("sizes", ctypes.c_size_t * 32), ("num_sizes", ctypes.c_int),
                ("world", ctypes.c_int), ("deadline", ctypes.c_int), ("seconds", ctypes.c_double),
                ("cold", ctypes.c_bool)]


def load_meter(path):
    lib = ctypes.CDLL(path)
    handle, floats = ctypes.c_void_p, ctypes.c_void_p
    lib.meter_parse.restype, lib.meter_parse.argtypes = Args, [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    lib.meter_new.restype, lib.meter_new.argtypes = handle, [ctypes.c_int, ctypes.c_int, ctypes.POINTER(Args)]
    lib.meter_begin.argtypes = [handle, ctypes.c_size_t, floats]
    lib.meter_report.argtypes = [handle] + [ctypes.c_char_p] * 3
    lib.meter_ready.restype = ctypes.c_bool
    for name in ("meter_ready", "meter_start", "meter_finish", "meter_in", "meter_out", "meter_close",
                 "meter_sleep_in_barriers"):
        getattr(lib, name).argtypes = [handle]
    lib.meter_in.restype = lib.meter_out.restype = floats
    return lib


def tensor_at(cache, address, length):
    if address not in cache:
        memory = (ctypes.c_float * length).from_address(address)
        cache[address] = torch.frombuffer(memory, dtype=torch.float32)
    return cache[address]


def ping(rank, x, y):
    if rank == 0:
        dist.send(x, 1)
        dist.recv(y, 1)
    elif rank == 1:
        dist.recv(y, 0)
        dist.send(x, 0)


def call_for(op, rank, world, x, y):
    """The operation on input x and output y, with every view made before the clock starts."""
    part = x.numel() // world
    root = rank == 0
    return {
        "all-reduce": lambda: dist.all_reduce(x),
        "reduce": lambda: dist.reduce(x, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all-gather": lambda mine=x[:part]: dist.all_gather_into_tensor(y, mine),
        "gather": lambda mine=x[:part], parts=list(y.split(part)) if root else None: dist.gather(mine, parts, 0),
        "reduce-scatter": lambda mine=y[:part]: dist.reduce_scatter_tensor(mine, x),
        "scatter": lambda mine=y[:part], parts=list(x.split(part)) if root else None: dist.scatter(mine, parts, 0),
        "all-to-all": lambda: dist.all_to_all_single(y, x),
        "barrier": lambda: dist.barrier(),
        "send-recv": lambda: ping(rank, x, y),
    }[op]


def measure(lib, meter, op, rank, world, size):
    lib.meter_begin(meter, size, None)
    tensors, calls = {}, {}
    while lib.meter_ready(meter):
        at = lib.meter_in(meter)
        if at not in calls:
            x = tensor_at(tensors, at, max(size // 4, world))
            y = tensor_at(tensors, lib.meter_out(meter), max(size // 4, world))
            calls[at] = call_for(op, rank, world, x, y)
        call = calls[at]
        lib.meter_start(meter)
        call()
        lib.meter_finish(meter)
        dist.barrier()
    lib.meter_report(meter, b"gloo", b"private", b"tcp")


def run_rank(lib, args, rank, shared, meeting):
    torch.set_num_threads(1)
    meter = lib.meter_new(shared, rank, ctypes.byref(args))
    lib.meter_sleep_in_barriers(meter)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.world)
    op = OPS[args.op]
    try:
        for size in args.sizes[: args.num_sizes]:
            measure(lib, meter, op, rank, args.world, size)
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error).lower() for word in ("not support", "unsupported", "not implemented")):
            raise
        print(f"gloo has no {op}: {error}", file=sys.stderr)
    lib.meter_close(meter)
    dist.destroy_process_group()


def fork_rank(body):
    """Starts body in a process of its own and returns its id; torch is already loaded, so this takes no time."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(status)
    return pid


def main():
    lib = load_meter(sys.argv[1])
    words = [b"gloo_collectives"] + [word.encode() for word in sys.argv[2:]]
    args = lib.meter_parse(len(words), (ctypes.c_char_p * len(words))(*words))
    shared = lib.meter_shared_fd(args.world)
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        alive = {fork_rank(lambda r=rank: run_rank(lib, args, r, shared, meeting)) for rank in range(args.world)}
        failed = False
        while alive:
            pid, status = os.wait()
            alive.discard(pid)
            failed = failed or status != 0
            for other in alive if status else ():
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)


if __name__ == "__main__":
    main()
