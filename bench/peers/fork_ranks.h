// fork_ranks.h: runs one function in N processes and fails if one of them does.
#ifndef FORK_RANKS_H
#define FORK_RANKS_H

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static int fork_ranks(int world, void (*body)(int rank, void *context), void *context) {
    pid_t pids[world];
    for (int rank = 0; rank < world; rank++) {
        pids[rank] = fork();
        if (pids[rank] < 0) exit(2);
        if (pids[rank] == 0) {
            body(rank, context);
            exit(0);
        }
    }
    int failed = 0;
    for (int left = world; left > 0; left--) {
        int status = 1;
        pid_t ended = wait(&status);
        for (int rank = 0; rank < world; rank++) {
            if (pids[rank] == ended) pids[rank] = 0;
            else if (status != 0 && pids[rank] > 0) kill(pids[rank], SIGKILL);
        }
        failed |= status != 0;
    }
    return failed;
}

#endif
