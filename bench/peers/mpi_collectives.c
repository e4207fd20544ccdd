// mpi_collectives.c: Open MPI's and MPICH's side of the comparison; one source, compiled by either.
//   mpirun -n 2 ./mpi_collectives all-reduce --sizes 16,4K,1M
// In: the command line of meter.h. Out: one JSON array on rank 0's stdout. Buffers are private to their rank.
#include "meter.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <fcntl.h>
#include <unistd.h>

#if defined(OPEN_MPI)
static const char *const BACKEND = "openmpi";
#else
static const char *const BACKEND = "mpich";
#endif

static void ping(float *in, float *out, int n, int rank) {
    if (rank == 0) {
        MPI_Send(in, n, MPI_FLOAT, 1, 7, MPI_COMM_WORLD);
        MPI_Recv(out, n, MPI_FLOAT, 1, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(out, n, MPI_FLOAT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(in, n, MPI_FLOAT, 0, 7, MPI_COMM_WORLD);
    }
}

static void perform(meter_op op, float *in, float *out, int n, int rank, int world) {
    MPI_Comm all = MPI_COMM_WORLD;
    int part = n / world;
    switch (op) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, in, n, MPI_FLOAT, MPI_SUM, all); break;
    case REDUCE: MPI_Reduce(rank == 0 ? MPI_IN_PLACE : in, in, n, MPI_FLOAT, MPI_SUM, 0, all); break;
    case BROADCAST: MPI_Bcast(in, n, MPI_FLOAT, 0, all); break;
    case ALL_GATHER: MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, all); break;
    case GATHER: MPI_Gather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, 0, all); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, all); break;
    case SCATTER: MPI_Scatter(in, part, MPI_FLOAT, out, part, MPI_FLOAT, 0, all); break;
    case ALL_TO_ALL: MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, all); break;
    case BARRIER: MPI_Barrier(all); break;
    case SEND_RECV: ping(in, out, n, rank); break;
    default: break;
    }
}

static int open_shared(int rank, int world) { // rank 0 makes the page, the others open it through /proc
    char path[64];
    int fd = -1;
    if (rank == 0) {
        fd = meter_shared_fd(world);
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), fd);
    }
    MPI_Bcast(path, sizeof path, MPI_CHAR, 0, MPI_COMM_WORLD);
    if (rank != 0) fd = open(path, O_RDWR);
    if (fd < 0) {
        perror(path);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return fd;
}

int main(int argc, char **argv) {
    int rank, world;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    meter_args args = meter_parse(argc, argv);
    args.world = world;
    meter *m = meter_new(open_shared(rank, world), rank, &args);
    for (int s = 0; s < args.num_sizes; s++) {
        meter_begin(m, args.sizes[s], NULL);
        while (meter_ready(m)) {
            float *in = meter_in(m), *out = meter_out(m);
            int n = (int)meter_len(m);
            meter_start(m);
            perform(args.op, in, out, n, rank, world);
            meter_finish(m);
            MPI_Barrier(MPI_COMM_WORLD);
        }
        meter_report(m, BACKEND, "private", "shm");
    }
    meter_close(m);
    MPI_Finalize();
    return 0;
}
