// meter.h: the measuring protocol that every peer shares, so that all are judged alike.
//
//   meter_ready   all ranks have finished the last turn; check it (first and last); rewrite this rank's buffer
//   meter_start   barrier in shared memory, then the clock
//   <one call>    the operation under test, by the peer
//   meter_finish  the clock; the time goes to a table in shared memory
//   <settle>      the peer's own barrier, so that no library has work left over (not timed)
//
// The time of a turn is that of its slowest rank; reported are the median and the 99th percentile over turns.
// Values are small whole numbers, so that every sum is exact and each result has a closed form.
//
// What `bytes` (S) means, n = ranks:  all-reduce, reduce, broadcast: the buffer.  all-gather, gather: the whole
// output (each rank gives S/n).  reduce-scatter, scatter: the whole input (each rank gets S/n).  all-to-all: the
// buffer of one rank (S/n to each).  send-recv: one message; rank 0 to rank 1 and back, half the round trip counts.
// exchange (2 ranks): S from each rank to the other.
#ifndef METER_H
#define METER_H

#include <stdbool.h>
#include <stddef.h>

enum { METER_MAX_RANKS = 64, METER_MAX_SIZES = 32, METER_MAX_TURNS = 20000 };

typedef enum {
    ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL, BARRIER, SEND_RECV,
    EXCHANGE, NUM_OPS
} meter_op;

// The command line: OP --sizes 16,4K,1M --seconds-per-size 0.4 [--world N] [--cold] [--deadline SECONDS]
typedef struct {
    meter_op op;
    size_t sizes[METER_MAX_SIZES];
    int num_sizes, world, deadline;
    double seconds;
    bool cold;
} meter_args;

typedef struct meter meter;

meter_args meter_parse(int argc, char **argv);          // exits with a message on bad input
size_t meter_shared_size(int world);                    // bytes of the page that all ranks map
int meter_shared_fd(int world);                         // makes that page; others open /proc/PID/fd/FD
meter *meter_new(int fd, int rank, const meter_args *); // world is taken from the arguments

// The arenas of one size: private and made here when `arena` is null, else this rank's part of a shared one.
size_t meter_arena_size(const meter *, size_t bytes);
void meter_begin(meter *, size_t bytes, float *arena);
bool meter_ready(meter *);
void meter_start(meter *);
void meter_finish(meter *);
// After meter_ready has said false: one JSON object (rank 0 only), and the arenas are given back.
void meter_report(meter *, const char *backend, const char *memory, const char *transport);
void meter_close(meter *); // ends the JSON array

float *meter_in(const meter *);   // this turn's buffer; in-place operations use only this one
float *meter_out(const meter *);
size_t meter_slot(const meter *); // offset of this turn's buffer in its arena, in elements
size_t meter_len(const meter *);  // elements in `bytes`
meter_op meter_operation(const meter *);
void meter_barrier(meter *);
void meter_sleep_in_barriers(meter *); // for peers whose own threads need the core of a waiting rank
void meter_pin(int rank, int world); // one core a rank, where there are enough

#endif
