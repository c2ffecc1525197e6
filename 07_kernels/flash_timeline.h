// flash_timeline.h: when a block of flash attention multiplies and when it takes exponentials: the issue
// timeline (cuda/issue_timeline.h) of versions that count the same. The emulator records it; a GPU build
// shows none.
#ifndef FLASH_TIMELINE_H
#define FLASH_TIMELINE_H

#include "flash_tiles.h"

#ifdef __CUDACC__

template <class T, int D, class Launch>
void flash_timelines(const char *, const char *, int64_t, Launch) {}

#else

#include "cuda/issue_timeline.h"
#include "cuda_on_cpu/cuda_on_cpu_tape.h"

// The first block of a forward pass without a mask, on so many keys.
template <class T, int D, class Launch>
IssueTape flash_tape(int version, int64_t keys, Launch launch) {
    const Heads shape = {1, keys, 1, 1, 1 / sqrtf((float)D), 0};
    const std::vector<T> zeros((size_t)(keys * D));
    Array<T> qkv(zeros.data(), keys * D), o(keys * D);
    Array<float> lse(keys);
    cuda_tape_begin();
    launch(version, o.at, lse.at, (float *)NULL, qkv.at, qkv.at, qkv.at, shape);
    return cuda_tape_end();
}

// Returns how many clocks the block takes. picture: of its middle, too.
static inline double say_timeline(const char *name, TensorOrder order, IssueTape tape, int tiles,
                                  bool picture) {
    enum { CLOCKS = 6000, COLUMNS = 84 };
    IssueTimeline t = issue_timeline(kernels_gpu(), order, tape);
    const char *how = order == TENSOR_BY_ISSUE ? "by issue" : "in turn";
    const double clocks = (double)t.clocks;
    say("timeline of %-10s %-8s  %5.0f clocks a tile; tensor cores busy %3.0f%%, special functions %3.0f%%",
        name, how, clocks / tiles, 100 * t.tensor / clocks, 100 * t.special / clocks);
    if (picture) {
        char *text = issue_timeline_text(&t, t.clocks / 2, t.clocks / 2 + CLOCKS, COLUMNS);
        say("%s", text);
        free(text);
    }
    report_number(name, order == TENSOR_BY_ISSUE ? "clocks_by_issue" : "clocks_in_turn", clocks, "clocks");
    report_number(name, "tensor_clocks", t.tensor, "clocks");
    issue_timeline_free(&t);
    return clocks;
}

// The timelines of versions 0 and 1, of which the second is to hide more: in the order of issue, and where
// each meets the order of tensor cores that is worse for it.
template <class T, int D, class Launch>
void flash_timelines(const char *serial, const char *overlapped, int64_t keys_of_tile, Launch launch) {
    enum { TILES = 16 };
    const char *const names[] = {serial, overlapped};
    double clocks[2][2];
    say("a block on %d tiles of keys; 0: Q K', 1: P V, e: exponentials, +: other arithmetic", (int)TILES);
    for (int v = 0; v < 2; v++) {
        const IssueTape tape = flash_tape<T, D>(v, TILES * keys_of_tile, launch);
        for (TensorOrder order : {TENSOR_IN_TURN, TENSOR_BY_ISSUE})
            clocks[v][order] = say_timeline(names[v], order, tape, TILES, order == TENSOR_BY_ISSUE);
        free(tape.steps);
    }
    report_that(clocks[1][TENSOR_BY_ISSUE] < clocks[0][TENSOR_BY_ISSUE],
                "%s takes %.0f clocks, and %s no more than %.0f", overlapped, clocks[1][TENSOR_BY_ISSUE],
                serial, clocks[0][TENSOR_BY_ISSUE]);
    const double worse[] = {fmax(clocks[0][0], clocks[0][1]), fmax(clocks[1][0], clocks[1][1])};
    report_that(worse[1] < worse[0],
                "in the order of tensor cores that is worse for it, %s takes %.0f clocks, and %s no more "
                "than %.0f",
                overlapped, worse[1], serial, worse[0]);
}

#endif
#endif
