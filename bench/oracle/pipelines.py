"""Action lists of torch 2.11's pipeline schedules over a grid, for the tests of ours.

    python bench/oracle/pipelines.py            # with torch 2.11; writes golden/pipelines.txt and golden/dualpipev.csv

A line of pipelines.txt is a schedule, its ranks, stages a rank and micro-batches, and two hashes (64-bit FNV-1a): of the
computations of all ranks, and of the same with reductions and messages, both as CSV without idle cells. GPipe and 1F1B are
not here: in torch they are loops and not lists. dualpipev.csv is a list with computations that overlap.
"""

import itertools
import pathlib

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

FOLDER = pathlib.Path(__file__).resolve().parent / "golden"
RANKS = [1, 2, 3, 4, 8]
CHUNKS = [1, 2, 3, 4]
MICRO_BATCHES = [*range(1, 13), 16, 32]
CLASSES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "bfs": schedules.ScheduleLoopedBFS,
    "zb1p": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
IN_ROUNDS = ["interleaved", "zb1p"]
ALONG_A_V = ["zbv", "dualpipev"]


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def csv(rows):
    return "".join(",".join(str(action) for action in rows[rank]) + "\n" for rank in sorted(rows))


def computations(name, ranks, chunks, micro_batches):
    """The lists that the constructor of the schedule would make, without the stages that it wants."""
    schedule = object.__new__(CLASSES[name])
    schedule.pp_group_size = ranks
    schedule.n_local_stages = chunks
    schedule.num_stages = schedule._num_stages = ranks * chunks
    schedule._n_microbatches = micro_batches
    schedule._stages = [None] * chunks
    schedule.number_of_rounds = max(1, micro_batches // ranks)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    rows = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return {rank: [action for action in row if action is not None] for rank, row in rows.items()}


def whole(name, ranks, chunks, micro_batches, rows):
    style = "v" if name in ALONG_A_V else "loop"
    rank_of = generate_stage_to_rank_mapping(ranks, ranks * chunks, style=style)
    reduced = {rank: schedules._add_reduce_grad(row, micro_batches) for rank, row in rows.items()}
    return schedules._add_send_recv(reduced, stage_to_rank=lambda stage: rank_of[stage], num_stages=ranks * chunks)


def lines():
    for name, ranks, chunks, micro_batches in itertools.product(CLASSES, RANKS, CHUNKS, MICRO_BATCHES):
        rounds = max(1, micro_batches // ranks)
        if name == "dualpipev" or (name == "zbv" and chunks != 2):
            continue
        if name in IN_ROUNDS and micro_batches % rounds != 0:
            continue
        rows = computations(name, ranks, chunks, micro_batches)
        hashes = fnv(csv(rows)), fnv(csv(whole(name, ranks, chunks, micro_batches, rows)))
        yield "{} {} {} {} {:016x} {:016x}\n".format(name, ranks, chunks, micro_batches, *hashes)


def main():
    (FOLDER / "pipelines.txt").write_text("".join(lines()))
    rows = computations("dualpipev", 4, 2, 8)
    (FOLDER / "dualpipev.csv").write_text(csv(whole("dualpipev", 4, 2, 8, rows)))


if __name__ == "__main__":
    main()
