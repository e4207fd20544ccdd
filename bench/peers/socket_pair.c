// socket_pair.c: the rate of one plain TCP connection over loopback between two processes.
//
//   ./socket_pair exchange --sizes 64K,1M
//
// Two figures a size S, both with S bytes sent AND S bytes received by each of the two processes, which is what a
// 2-rank all-reduce of S bytes must move:
//   backend "socket"         in two dependent halves, as an all-reduce does: S/2 each way (reduce-scatter), and when
//                            a process has sent and received its half, S/2 each way again (all-gather)
//   backend "socket-duplex"  S each way at once
// Nothing is added up and nothing is framed. The time runs from the start barrier until the slower process has
// received its last byte and handed its last byte to the kernel. One thread a process, one core each, non-blocking,
// TCP_NODELAY, 4 MiB socket buffers; poll only when neither direction moves. The bytes received are checked.
#define _GNU_SOURCE
#include "fork_ranks.h"
#include "meter.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { BUFFER = 4 << 20, WINDOW = 256 << 10 }; // WINDOW: bytes per system call

typedef struct {
    meter_args args;
    int shared, ends[2];
} job;

static void check(bool ok, const char *what) {
    if (ok) return;
    perror(what);
    exit(2);
}

static void make_pair(int ends[2]) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int door = socket(AF_INET, SOCK_STREAM, 0);
    check(door >= 0 && !bind(door, (void *)&at, len) && !listen(door, 1), "listen");
    check(!getsockname(door, (void *)&at, &len), "getsockname");
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    check(!connect(ends[0], (void *)&at, len), "connect");
    ends[1] = accept(door, NULL, NULL);
    check(ends[1] >= 0, "accept");
    close(door);
    for (int e = 0; e < 2; e++) {
        int on = 1, buffer = BUFFER;
        setsockopt(ends[e], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(ends[e], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        setsockopt(ends[e], SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
        check(!fcntl(ends[e], F_SETFL, O_NONBLOCK), "fcntl");
    }
}

static size_t moved(ssize_t result) {
    if (result > 0) return (size_t)result;
    check(result < 0 && (errno == EAGAIN || errno == EINTR), "socket");
    return 0;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static void exchange(int end, const char *out, char *in, size_t bytes) {
    size_t sent = 0, got = 0;
    while (sent < bytes || got < bytes) {
        size_t before = sent + got;
        if (sent < bytes) sent += moved(send(end, out + sent, least(bytes - sent, WINDOW), MSG_NOSIGNAL));
        if (got < bytes) got += moved(recv(end, in + got, least(bytes - got, WINDOW), 0));
        if (sent + got > before) continue;
        struct pollfd wait = {.fd = end, .events = (short)((sent < bytes ? POLLOUT : 0) | (got < bytes ? POLLIN : 0))};
        poll(&wait, 1, 1000);
    }
}

static void measure(meter *m, size_t size, int end, size_t parts) {
    meter_begin(m, size, NULL);
    while (meter_ready(m)) {
        char *out = (char *)meter_in(m), *in = (char *)meter_out(m);
        size_t part = meter_len(m) * 4 / parts;
        meter_start(m);
        for (size_t p = 0; p < parts; p++) exchange(end, out + p * part, in + p * part, part);
        meter_finish(m);
    }
    meter_report(m, parts == 2 ? "socket" : "socket-duplex", "private", "tcp");
}

static void run_rank(int rank, void *context) {
    job *j = context;
    close(j->ends[1 - rank]);
    meter_pin(rank, 2);
    meter *m = meter_new(j->shared, rank, &j->args);
    for (int s = 0; s < j->args.num_sizes; s++) {
        measure(m, j->args.sizes[s], j->ends[rank], 2);
        measure(m, j->args.sizes[s], j->ends[rank], 1);
    }
    meter_close(m);
}

int main(int argc, char **argv) {
    static job j;
    j.args = meter_parse(argc, argv);
    if (j.args.op != EXCHANGE || j.args.world != 2) return fprintf(stderr, "socket_pair knows exchange with 2 ranks only\n"), 2;
    j.shared = meter_shared_fd(2);
    make_pair(j.ends);
    return fork_ranks(2, run_rank, &j);
}
