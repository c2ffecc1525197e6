// flash_timeline.h: when a block of flash attention multiplies and when it takes exponentials: the issue
// timeline (cuda/issue_timeline.h) of versions that count the same. The emulator records it; a GPU build
// shows none.
#ifndef FLASH_TIMELINE_H
#define FLASH_TIMELINE_H

#include "flash_tiles.h"

#ifdef __CUDACC__

template <class T, int D, class Launch>
void flash_timelines(const char *, const char *, int64_t, Launch, const char *svg) {
    CHECK(!svg,
          "--timeline-svg: the emulator records what it shows, and this build has a GPU; the CPU's "
          "(make) would write it");
}

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

// The timelines of two versions, each in both orders of tensor cores, from their middle on.
struct FlashPicture {
    enum { CLOCKS = 6000, COLUMNS = 84 };
    IssueTimeline timeline[4];
    char *title[4], *note[4];
    int count = 0;

    void add(const char *name, TensorOrder order, IssueTape tape, int tiles) {
        IssueTimeline t = issue_timeline(kernels_gpu(), order, tape);
        const char *how = order == TENSOR_BY_ISSUE ? "by issue" : "in turn";
        const double clocks = (double)t.clocks;
        note[count] =
            format_text("%5.0f clocks a tile; tensor cores busy %3.0f%%, special functions %3.0f%%",
                        clocks / tiles, 100 * t.tensor / clocks, 100 * t.special / clocks);
        title[count] = format_text("%s; tensor cores serve %s", name, how);
        say("timeline of %-10s %-8s  %s", name, how, note[count]);
        if (order == TENSOR_BY_ISSUE) {
            char *text = issue_timeline_text(&t, t.clocks / 2, t.clocks / 2 + CLOCKS, COLUMNS);
            say("%s", text);
            free(text);
        }
        report_number(name, order == TENSOR_BY_ISSUE ? "clocks_by_issue" : "clocks_in_turn", clocks,
                      "clocks");
        report_number(name, "tensor_clocks", t.tensor, "clocks");
        timeline[count++] = t;
    }
    void write(const char *file) const {
        static const SpanKind kinds[] = {{'0', "tensor cores: Q K'", "#4269d0"},
                                         {'1', "tensor cores: P V", "#6cc5b0"},
                                         {'e', "exponentials", "#efb118"},
                                         {'+', "other arithmetic", "#9498a0"},
                                         {'c', "copies by TMA", "#97bbf5"}};
        IssueRow row[4];
        for (int i = 0; i < count; i++) row[i] = {title[i], note[i], &timeline[i], timeline[i].clocks / 2};
        issue_timeline_svg(row, count, CLOCKS, kinds, sizeof kinds / sizeof *kinds,
                           "FlashAttention-3: a block's two consumer warpgroups and its copies, modelled",
                           "--timeline-svg", file);
        say("wrote %s", file);
    }
    ~FlashPicture() {
        while (count) {
            issue_timeline_free(&timeline[--count]);
            free(title[count]);
            free(note[count]);
        }
    }
};

// The timelines of versions 0 and 1, of which the second must hide more: in the order of issue, and with the
// order of tensor cores that is worse for each. svg: the file of the picture, or NULL.
template <class T, int D, class Launch>
void flash_timelines(const char *serial, const char *overlapped, int64_t keys_of_tile, Launch launch,
                     const char *svg) {
    enum { TILES = 16 };
    const char *const names[] = {serial, overlapped};
    FlashPicture picture;
    double clocks[2][2];
    say("a block on %d tiles of keys; 0: Q K', 1: P V, e: exponentials, +: other arithmetic", (int)TILES);
    for (int v = 0; v < 2; v++) {
        const IssueTape tape = flash_tape<T, D>(v, TILES * keys_of_tile, launch);
        for (TensorOrder order : {TENSOR_IN_TURN, TENSOR_BY_ISSUE}) {
            picture.add(names[v], order, tape, TILES);
            clocks[v][order] = (double)picture.timeline[picture.count - 1].clocks;
        }
        free(tape.steps);
    }
    if (svg) picture.write(svg);
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
