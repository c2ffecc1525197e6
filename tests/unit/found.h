// found.h: for tests of what CUDA on the CPU finds: each case runs in a child process, and must end with the
// sentence that names the fault, or without any. Include it after cmocka.h.
#ifndef FOUND_H
#define FOUND_H

#include "cuda/gpu.h"
#include "fatal.h"

// ---- a child that runs one case ----

typedef void Case(void);

extern bool cuda_on_cpu_outlives_fork;

// Returns the exit status; what the child wrote to stderr goes into `text`.
static int run_child(Case *run, char *text, size_t size) {
    cuda_on_cpu_outlives_fork =
        true;  // real CUDA does not; here the child uses the parent's arrays
    const Call call = {run};
    const Ended ended = run_apart(call_function, &call);
    snprintf(text, size, "%s", ended.said);
    return WIFEXITED(ended.status) ? WEXITSTATUS(ended.status) : 128 + WTERMSIG(ended.status);
}

// It must end with a sentence that has these parts.
static void expect_found(const char *name, Case *run, const char *const parts[], int count) {
    char text[4096];
    int status = run_child(run, text, sizeof text);
    if (status != STATUS_USAGE) fail_msg("%s: status %d, stderr \"%s\"", name, status, text);
    for (int i = 0; i < count; i++)
        if (!strstr(text, parts[i])) fail_msg("%s: \"%s\" lacks \"%s\"", name, text, parts[i]);
    const char *newline = strchr(text, '\n');
    if (!newline || newline[1]) fail_msg("%s: \"%s\" is not one line", name, text);
}

static inline void expect_sound(const char *name, Case *run) {
    char text[4096];
    int status = run_child(run, text, sizeof text);
    if (status != 0 || *text) fail_msg("%s: status %d, stderr \"%s\"", name, status, text);
}

// The start of a sentence that names a line of the test: "tests/unit/test_x.cc:12: ".
static inline const char *at_line(const char *file, int line) {
    static char text[80];
    snprintf(text, sizeof text, "%s:%d: ", file, line);
    return text;
}
#define AT(line) at_line(__FILE__, line)

// With what it may have left in the queues of streams.
#define RUN_WHOLE(run)                       \
    [] {                                     \
        run;                                 \
        CUDA_CHECK(cudaDeviceSynchronize()); \
    }
#define FOUND(run, ...)                                                                 \
    do {                                                                                \
        const char *const parts[] = {__VA_ARGS__};                                      \
        expect_found(#run, RUN_WHOLE(run), parts, (int)(sizeof parts / sizeof *parts)); \
    } while (0)
#define SOUND(run) expect_sound(#run, RUN_WHOLE(run))

static float *floats(size_t count) {
    float *memory;
    CUDA_CHECK(cudaMalloc(&memory, count * sizeof(float)));
    CUDA_CHECK(cudaMemset(memory, 0, count * sizeof(float)));
    return memory;
}

#endif
