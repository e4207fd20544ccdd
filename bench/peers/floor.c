// floor.c: what an all-reduce of buffers in shared memory cannot beat on this machine.
//
//   buffers  a  [ slice 0 | slice 1 ]      N processes, one mapping, N buffers in it. Process r loads slice r of
//            b  [ slice 0 | slice 1 ]      every buffer, adds, and stores the sum to slice r of every buffer.
//
// Nothing is synchronised inside the timed part; the start barrier and the rewriting by each buffer's owner are
// those of all contenders (meter.h). So the figure is memory and cache-line movement alone.
//   ./floor all-reduce --world 2 --sizes 64K,1M
#define _GNU_SOURCE
#include "fork_ranks.h"
#include "meter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct {
    meter_args args;
    int fd;
    float *arenas[METER_MAX_SIZES][METER_MAX_RANKS];
} job;

// `count` is a constant where it matters, so that the inner loops vanish and the outer one becomes vectors.
static inline __attribute__((always_inline)) void sum_slice(float *const *buffers, int count, size_t from, size_t to) {
#pragma GCC ivdep
    for (size_t i = from; i < to; i++) {
        float sum = buffers[0][i];
        for (int b = 1; b < count; b++) sum += buffers[b][i];
        for (int b = 0; b < count; b++) buffers[b][i] = sum;
    }
}

static void sum_pair(float *restrict a, float *restrict b, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) a[i] = b[i] = a[i] + b[i];
}

static void sum_four(float *restrict a, float *restrict b, float *restrict c, float *restrict d, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) a[i] = b[i] = c[i] = d[i] = a[i] + b[i] + c[i] + d[i];
}

static void sum_mine(float *const *buffers, int world, int rank, size_t len) {
    size_t from = len * (size_t)rank / (size_t)world, to = len * (size_t)(rank + 1) / (size_t)world;
    if (world == 2) sum_pair(buffers[0], buffers[1], from, to);
    else if (world == 4) sum_four(buffers[0], buffers[1], buffers[2], buffers[3], from, to);
    else sum_slice(buffers, world, from, to);
}

static void run_rank(int rank, void *context) {
    job *j = context;
    int world = j->args.world;
    meter_pin(rank, world);
    meter *m = meter_new(j->fd, rank, &j->args);
    for (int s = 0; s < j->args.num_sizes; s++) {
        meter_begin(m, j->args.sizes[s], j->arenas[s][rank]);
        while (meter_ready(m)) {
            float *buffers[METER_MAX_RANKS];
            for (int r = 0; r < world; r++) buffers[r] = j->arenas[s][r] + meter_slot(m);
            meter_start(m);
            sum_mine(buffers, world, rank, meter_len(m));
            meter_finish(m);
        }
        meter_report(m, "floor", "heap", "shm");
    }
    meter_close(m);
}

static void map_arenas(job *j, const meter *m) {
    for (int s = 0; s < j->args.num_sizes; s++)
        for (int r = 0; r < j->args.world; r++) {
            size_t size = meter_arena_size(m, j->args.sizes[s]);
            int fd = memfd_create("arena", 0);
            void *at = MAP_FAILED;
            if (fd >= 0 && !ftruncate(fd, (off_t)size)) at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (at == MAP_FAILED) perror("arena"), exit(2);
            j->arenas[s][r] = at;
        }
}

int main(int argc, char **argv) {
    static job j;
    j.args = meter_parse(argc, argv);
    if (j.args.op != ALL_REDUCE) return fprintf(stderr, "floor knows all-reduce only\n"), 2;
    j.fd = meter_shared_fd(j.args.world);
    map_arenas(&j, meter_new(j.fd, 0, &j.args));
    return fork_ranks(j.args.world, run_rank, &j);
}
