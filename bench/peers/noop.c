/* A program that does nothing, to be started by a launcher: says when it began, by the monotonic clock.
 *
 *     noop               prints its line and ends
 *     noop sleep         prints its line and sleeps until it is ended
 *     noop fail-once     at the first attempt rank 0 says when it fails and does, the others sleep; then as `noop`
 *
 * Out: `noop rank R attempt A WHAT at NANOSECONDS`, with WHAT `begins` or `fails`, in one write.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static void say(const char *what) {
    struct timespec now;
    char line[128];
    clock_gettime(CLOCK_MONOTONIC, &now);
    int length = snprintf(line, sizeof line, "noop rank %d attempt %d %s at %lld\n", number("RANK"),
                          number("TORCHELASTIC_RESTART_COUNT"), what, now.tv_sec * 1000000000LL + now.tv_nsec);
    if (write(1, line, (size_t)length) != length)
        exit(2);
}

static void sleep_until_ended(void) {
    for (;;)
        pause();
}

int main(int argc, char **argv) {
    const char *manner = argc > 1 ? argv[1] : "";
    say("begins");
    if (strcmp(manner, "sleep") == 0)
        sleep_until_ended();
    if (strcmp(manner, "fail-once") == 0 && number("TORCHELASTIC_RESTART_COUNT") == 0) {
        if (number("RANK") != 0)
            sleep_until_ended();
        /* The others must run, or a launcher could be measured while it still starts them. */
        usleep(300000);
        say("fails");
        return 1;
    }
    return 0;
}
