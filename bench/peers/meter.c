// meter.c: see meter.h for the protocol and the meaning of every word.
#define _GNU_SOURCE
#include "meter.h"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WARM_UP, MEASURE, STOP };
enum { PAGE = 4096, SMALL_BYTES = 65536, SMALL_TURNS = 200, LARGE_TURNS = 5 };

typedef struct {
    _Alignas(128) atomic_uint arrived;
    _Alignas(128) atomic_uint generation;
    _Alignas(128) atomic_int phase; // written by rank 0 between two barriers, read after the second
    _Alignas(128) double micros[];  // [rank][turn]
} shared_page;

struct meter {
    shared_page *shared;
    int rank, world;
    double seconds;
    bool cold, crowded, sleeps, printed;
    meter_op op;
    size_t bytes, len, stride, num_slots, slot, map_size;
    float *arena; // num_slots inputs, then num_slots outputs
    bool owns_arena;
    unsigned *stamps; // what each slot was last rewritten with
    unsigned turn;
    int phase, recorded;
    double started, phase_began;
};

static const char *const OP_NAMES[NUM_OPS] = {"all-reduce", "reduce",     "broadcast", "all-gather", "gather",
                                              "reduce-scatter", "scatter", "all-to-all", "barrier",    "send-recv",  "exchange"};

static double micros_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(2);
}

// ---- command line ----

static size_t parse_size(const char *text) {
    char *end;
    size_t value = strtoull(text, &end, 10);
    if (end == text) fail("not a size", text);
    if (*end == 'K') value <<= 10;
    if (*end == 'M') value <<= 20;
    if (*end == 'G') value <<= 30;
    return value;
}

static void parse_sizes(meter_args *args, char *list) {
    for (char *part = strtok(list, ","); part; part = strtok(NULL, ",")) {
        if (args->num_sizes == METER_MAX_SIZES) fail("too many sizes", part);
        args->sizes[args->num_sizes++] = parse_size(part);
    }
}

static meter_op parse_op(const char *name) {
    for (int op = 0; op < NUM_OPS; op++)
        if (!strcmp(name, OP_NAMES[op])) return (meter_op)op;
    fail("unknown operation", name);
    return NUM_OPS;
}

meter_args meter_parse(int argc, char **argv) {
    meter_args args = {.seconds = 0.4, .world = 2, .deadline = 300};
    if (argc < 2) fail("usage", "OP --sizes 16,4K,1M [--seconds-per-size 0.4] [--world N] [--cold] [--deadline SECONDS]");
    args.op = parse_op(argv[1]);
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "--cold")) {
            args.cold = true;
            continue;
        }
        if (i + 1 == argc) fail("no value given for", argv[i]);
        char *value = argv[i + 1];
        if (!strcmp(argv[i], "--sizes")) parse_sizes(&args, value);
        else if (!strcmp(argv[i], "--seconds-per-size")) args.seconds = atof(value);
        else if (!strcmp(argv[i], "--world")) args.world = atoi(value);
        else if (!strcmp(argv[i], "--deadline")) args.deadline = atoi(value);
        else fail("unknown option", argv[i]);
        i++;
    }
    if (args.op == BARRIER) args.sizes[0] = 0, args.num_sizes = 1;
    if (args.world < 1 || args.world > METER_MAX_RANKS) fail("world", "must be 1 to 64");
    return args;
}

// ---- the shared page ----

size_t meter_shared_size(int world) {
    return sizeof(shared_page) + sizeof(double) * METER_MAX_TURNS * (size_t)world;
}

int meter_shared_fd(int world) {
    int fd = memfd_create("meter", 0);
    if (fd < 0 || ftruncate(fd, (off_t)meter_shared_size(world))) fail("memfd", "cannot be made");
    return fd;
}

meter *meter_new(int fd, int rank, const meter_args *args) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); // nothing is left behind when the starter dies,
    alarm((unsigned)args->deadline);  // nor when a rank waits for one that has
    meter *m = calloc(1, sizeof *m);
    size_t size = meter_shared_size(args->world);
    m->shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (m->shared == MAP_FAILED) fail("shared page", "cannot be mapped");
    m->rank = rank, m->world = args->world, m->seconds = args->seconds, m->cold = args->cold, m->op = args->op;
    m->crowded = args->world > sysconf(_SC_NPROCESSORS_ONLN);
    return m;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

void meter_barrier(meter *m) {
    shared_page *s = m->shared;
    unsigned generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) + 1 == (unsigned)m->world) {
        atomic_store(&s->arrived, 0);
        atomic_store(&s->generation, generation + 1);
        if (m->sleeps) syscall(SYS_futex, &s->generation, FUTEX_WAKE, METER_MAX_RANKS, NULL, NULL, 0);
        return;
    }
    for (int spins = 0; atomic_load(&s->generation) == generation; spins++) {
        if (m->sleeps) syscall(SYS_futex, &s->generation, FUTEX_WAIT, generation, NULL, NULL, 0);
        else if (m->crowded || spins > 10000) sched_yield();
        else relax();
    }
}

void meter_sleep_in_barriers(meter *m) { m->sleeps = true; }

void meter_pin(int rank, int world) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (world > cores) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(rank % cores, &set);
    sched_setaffinity(0, sizeof set, &set);
}

// ---- buffers: hot = one slot; cold = so many that a slot leaves the caches between its rewriting and its use ----

static size_t stride_of(size_t bytes) { return bytes < PAGE ? PAGE : (bytes + PAGE - 1) / PAGE * PAGE; }

static size_t slots_of(const meter *m, size_t bytes) {
    if (!m->cold) return 1;
    long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    size_t span = 2 * (size_t)(cache > 0 ? cache : 64 << 20);
    size_t slots = span / stride_of(bytes);
    return slots < 2 ? 2 : slots;
}

size_t meter_arena_size(const meter *m, size_t bytes) { return 2 * stride_of(bytes) * slots_of(m, bytes); }

// Small whole numbers in which each power of two of the place shows, so that a chunk in a wrong place is seen too.
static inline float given(int rank, unsigned stamp, size_t i) {
    uint32_t at = (uint32_t)i;
    return (float)(int)((at + (at >> 8) + (at >> 16) + (at >> 24) + stamp) & 255) + (float)rank;
}

static void rewrite(meter *m, size_t slot, unsigned stamp) {
    float *x = m->arena + slot * m->stride;
    int rank = m->rank;
    for (size_t i = 0; i < m->len; i++) x[i] = given(rank, stamp, i);
    m->stamps[slot] = stamp;
}

void meter_begin(meter *m, size_t bytes, float *arena) {
    if (bytes % (4 * (size_t)m->world)) fail("size", "must be a multiple of 4 bytes times the ranks");
    m->bytes = bytes, m->len = bytes / 4, m->stride = stride_of(bytes) / 4, m->num_slots = slots_of(m, bytes);
    m->map_size = meter_arena_size(m, bytes), m->owns_arena = !arena;
    m->arena = arena ? arena
                     : mmap(NULL, m->map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (m->arena == MAP_FAILED) fail("arena", "not enough memory");
    m->stamps = calloc(m->num_slots, sizeof *m->stamps);
    for (size_t slot = 0; slot < m->num_slots; slot++) rewrite(m, slot, 0);
    m->turn = 0, m->recorded = 0, m->phase = WARM_UP, m->phase_began = micros_now();
    if (m->rank == 0) atomic_store(&m->shared->phase, WARM_UP);
    meter_barrier(m);
}

size_t meter_slot(const meter *m) { return m->slot * m->stride; }
float *meter_in(const meter *m) { return m->arena + meter_slot(m); }
float *meter_out(const meter *m) { return m->arena + (m->num_slots + m->slot) * m->stride; }
size_t meter_len(const meter *m) { return m->len; }
meter_op meter_operation(const meter *m) { return m->op; }

// ---- closed forms ----

static float summed(int world, unsigned stamp, size_t i) {
    return (float)world * given(0, stamp, i) + (float)(world * (world - 1) / 2);
}

static size_t result_len(const meter *m) {
    bool root = m->rank == 0;
    switch (m->op) {
    case BARRIER: return 0;
    case REDUCE: case GATHER: return root ? m->len : 0;
    case REDUCE_SCATTER: case SCATTER: return m->len / (size_t)m->world;
    case SEND_RECV: return m->rank < 2 && m->world > 1 ? m->len : 0;
    default: return m->len;
    }
}

static float expected(const meter *m, unsigned stamp, size_t i) {
    size_t chunk = m->len / (size_t)m->world, mine = (size_t)m->rank * chunk;
    switch (m->op) {
    case ALL_REDUCE: case REDUCE: return summed(m->world, stamp, i);
    case BROADCAST: return given(0, stamp, i);
    case ALL_GATHER: case GATHER: return given((int)(i / chunk), stamp, i % chunk);
    case REDUCE_SCATTER: return summed(m->world, stamp, mine + i);
    case SCATTER: return given(0, stamp, mine + i);
    case ALL_TO_ALL: return given((int)(i / chunk), stamp, mine + i % chunk);
    case SEND_RECV: case EXCHANGE: return given(1 - m->rank, stamp, i);
    default: return 0;
    }
}

static void verify(const meter *m) {
    bool in_place = m->op == ALL_REDUCE || m->op == REDUCE || m->op == BROADCAST;
    const float *got = in_place ? meter_in(m) : meter_out(m);
    unsigned stamp = m->stamps[m->slot];
    for (size_t i = 0; i < result_len(m); i++) {
        float want = expected(m, stamp, i);
        if (got[i] == want) continue;
        fprintf(stderr, "%s of %zu bytes is wrong on rank %d, turn %u, element %zu: expected %g, got %g\n",
                OP_NAMES[m->op], m->bytes, m->rank, m->turn, i, want, got[i]);
        exit(3);
    }
}

// ---- one turn ----

static int next_phase(const meter *m) { // rank 0 decides for all
    double elapsed = (micros_now() - m->phase_began) * 1e-6;
    if (m->phase == WARM_UP) return m->turn >= 3 && elapsed > 0.1 * m->seconds ? MEASURE : WARM_UP;
    int least = m->bytes <= SMALL_BYTES ? SMALL_TURNS : LARGE_TURNS;
    bool enough = m->recorded >= least || (m->recorded >= LARGE_TURNS && elapsed > 5 * m->seconds);
    bool over = (enough && elapsed > m->seconds) || m->recorded == METER_MAX_TURNS;
    return over ? STOP : MEASURE;
}

bool meter_ready(meter *m) {
    if (m->rank == 0) atomic_store(&m->shared->phase, next_phase(m));
    meter_barrier(m);
    int phase = atomic_load(&m->shared->phase);
    if (m->turn == 1 || phase == STOP) verify(m);
    if (phase != m->phase) m->phase = phase, m->phase_began = micros_now();
    if (phase == STOP) return false;
    m->turn++;
    m->slot = m->turn % m->num_slots;
    rewrite(m, (m->slot + m->num_slots / 2) % m->num_slots, m->turn);
    return true;
}

void meter_start(meter *m) {
    meter_barrier(m);
    m->started = micros_now();
}

void meter_finish(meter *m) {
    double took = micros_now() - m->started;
    if (m->phase != MEASURE) return;
    if (m->op == SEND_RECV) took /= 2;
    m->shared->micros[(size_t)m->rank * METER_MAX_TURNS + (size_t)m->recorded++] = took;
}

// ---- report ----

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bus_factor(const meter *m) {
    double n = m->world;
    switch (m->op) {
    case ALL_REDUCE: return 2 * (n - 1) / n;
    case REDUCE: case BROADCAST: case SEND_RECV: case EXCHANGE: return 1;
    default: return (n - 1) / n;
    }
}

static void print_line(meter *m, const char *backend, const char *memory, const char *transport) {
    int turns = m->recorded;
    double *slowest = m->shared->micros; // row 0 becomes the slowest of all rows
    for (int rank = 1; rank < m->world; rank++)
        for (int t = 0; t < turns; t++) {
            double x = m->shared->micros[(size_t)rank * METER_MAX_TURNS + (size_t)t];
            if (x > slowest[t]) slowest[t] = x;
        }
    qsort(slowest, (size_t)turns, sizeof(double), by_value);
    double median = (slowest[(turns - 1) / 2] + slowest[turns / 2]) / 2;
    double p99 = slowest[(int)(0.99 * (turns - 1) + 0.5)];
    double rate = (double)m->bytes / median * 1e-3;
    printf("%s {\"op\":\"%s\",\"world\":%d,\"bytes\":%zu,\"dtype\":\"f32\",\"memory\":\"%s\",\"backend\":\"%s\","
           "\"transport\":\"%s\",\"median_us\":%.3f,\"p99_us\":%.3f,\"algbw_gbps\":%.4f,\"busbw_gbps\":%.4f}",
           m->printed ? ",\n" : "[\n", OP_NAMES[m->op], m->world, m->bytes, memory, backend, transport, median, p99, rate,
           rate * bus_factor(m));
    m->printed = true;
}

void meter_report(meter *m, const char *backend, const char *memory, const char *transport) {
    meter_barrier(m); // every row of the table is complete
    if (m->rank == 0) print_line(m, backend, memory, transport);
    if (m->owns_arena) munmap(m->arena, m->map_size);
    free(m->stamps);
    meter_barrier(m); // the table may be written again
}

void meter_close(meter *m) {
    if (m->rank == 0) printf("%s\n]\n", m->printed ? "" : "[");
    fflush(stdout);
}
