// fatal.h: for tests of code that must end its process with one sentence.
#ifndef FATAL_H
#define FATAL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base.h"
// needs those above
#include <cmocka.h>

// How a process ended, from waitpid, and what it wrote to stderr.
typedef struct Ended {
    int status;
    char said[4096];
} Ended;

// Runs `act` in a process of its own. A forked child has only one thread: code that computes in it must not
// have used several threads before.
static inline Ended run_apart(void (*act)(void *context), const void *context) {
    Ended ended;
    memset(&ended, 0, sizeof ended);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        act((void *)context);
        _exit(STATUS_PASS);
    }
    close(ends[1]);
    const size_t most = sizeof ended.said - 1;
    size_t size = 0;
    for (ssize_t got; size < most && (got = read(ends[0], ended.said + size, most - size)) > 0;)
        size += (size_t)got;
    close(ends[0]);
    assert_int_equal(waitpid(child, &ended.status, 0), child);
    return ended;
}

static inline bool is_one_sentence(const Ended *ended) {
    const char *end = strchr(ended->said, '\n');
    return WIFEXITED(ended->status) && WEXITSTATUS(ended->status) == STATUS_USAGE && end && !end[1];
}

// It must end with STATUS_USAGE and one sentence on stderr that contains `part`.
static inline void expect_fatal(void (*act)(void *context), const void *context, const char *part) {
    Ended ended = run_apart(act, context);
    if (!is_one_sentence(&ended) || !strstr(ended.said, part))
        fail_msg("status %x, and \"%s\" instead of one sentence with \"%s\"", (unsigned)ended.status,
                 ended.said, part);
}

// The same for a function without a context.
typedef struct Call {
    void (*function)(void);
} Call;

static inline void call_function(void *call) { ((const Call *)call)->function(); }

#endif
