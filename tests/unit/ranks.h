// ranks.h: tests that run on all ranks at once. Ranks must stay in step, so a failure is recorded, and the
// test continues; after each test the ranks' failures are summed.
#ifndef RANKS_H
#define RANKS_H

#include <fnmatch.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "comm/mesh.h"

static int me, n;  // of the world
static Group world;
static int failures;

static void note(const char *format, ...) PRINTF_LIKE(1, 2);
static void note(const char *format, ...) {
    if (failures++ >= 5) return;
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("# rank %d of %d: %s\n", me, n, text);
    fflush(stdout);
}

#define SAME(got, expected)                                                                   \
    do {                                                                                      \
        double got_ = (double)(got), expected_ = (double)(expected);                          \
        if (!(got_ == expected_)) note("%s is %.17g, expected %.17g", #got, got_, expected_); \
    } while (0)

typedef struct RankTest {
    const char *name;
    void (*run)(void);
} RankTest;

#define TEST(name) \
    { #name, name }

// Starts the ranks: `natural` of them, or as "--ranks N" says. Returns the pattern of test names in argv.
static const char *ranks_start(int argc, char **argv, int natural) {
    const char *pattern = "*";
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--dry-run")) device_dry_run(true);
        else if (!strncmp(argv[i], "--", 2)) i += strcmp(argv[i], "--trust-calls") != 0;
        else pattern = argv[i];
    }
#ifdef __SANITIZE_ADDRESS__
    if (natural > 3) natural = 3;  // slow, and three ranks show what it looks for
#endif
    comm_set_timeout(30);
    comm_start(argc, argv, natural);
    me = comm_rank();
    n = comm_ranks();
    world = mesh_new((MeshShape){.dp = n}).world;
    return pattern;
}

// Runs the tests that match the pattern, in TAP, and ends the ranks. Returns the exit status.
static int ranks_run(const RankTest *tests, int count, const char *pattern) {
    int run = 0, failed = 0;
    for (int i = 0; i < count; i++) run += fnmatch(pattern, tests[i].name, 0) == 0;
    say("1..%d", run);
    for (int i = 0, number = 0; i < count; i++) {
        if (fnmatch(pattern, tests[i].name, 0)) continue;
        failures = 0;
        tests[i].run();
        bool bad = comm_sum(failures, world) > 0;
        failed += bad;
        say("%sok %d - %s on %d ranks", bad ? "not " : "", ++number, tests[i].name, n);
    }
    // Anything that was not freed shows in the account.
    Memory account = memory_account();
    if (account.now_total != account.now[MEMORY_COMMUNICATION]) note("tensors are left: %s", memory_text());
    return comm_finish(failed || failures ? STATUS_FAIL : STATUS_PASS);
}

#endif
