// cuda_on_cpu_tape.cc: the steps of one block's warps, as they run (cuda_on_cpu_tape.h).
#include "cuda_on_cpu_tape.h"

#include "cuda_on_cpu_inside.h"

static List<IssueStep> tape;
static List<int> lines;  // that call wgmma, in the order of their letters

void cuda_tape_begin(void) {
    cudaDeviceSynchronize();
    tape.count = lines.count = 0;
    now.counting = now.recording = true;
}

IssueTape cuda_tape_end(void) {
    cudaDeviceSynchronize();
    now.counting = now.recording = false;
    IssueTape made = {tape.items, (int64_t)tape.count};
    tape = {};
    return made;
}

// NULL if nothing is recorded, or this is not the lane that represents the warp.
static IssueStep *add(IssueKind kind) {
    if (!now.recording || now.thread->lane) return NULL;
    tape.add({});
    IssueStep *s = &tape.items[tape.count - 1];
    s->kind = kind, s->warp = now.thread->warp;
    return s;
}

// For operations at which all lanes of the warp have met, whichever arrived last.
static IssueStep *add_of_warp(IssueKind kind, int warp) {
    if (!now.recording) return NULL;
    tape.add({});
    IssueStep *s = &tape.items[tape.count - 1];
    s->kind = kind, s->warp = warp;
    return s;
}

void tape_block(uint32_t site) {
    if (now.thread->lane) return;
    const BlockWork &work = block_work(site);
    if (!work.flop_instructions && !work.special_instructions) return;
    IssueStep *s = add(ISSUE_WORK);
    s->fma = work.flop_instructions, s->special = work.special_instructions;
}

void tape_access(Space space, size_t size) {
    if (space != SHARED) return;
    if (IssueStep *s = add(ISSUE_WORK)) s->passes = size <= 4 ? 1 : (int)(size * LANES / 128);
}

static char letter_of(int line) {
    size_t i = 0;
    while (i < lines.count && lines.items[i] != line) i++;
    if (i == lines.count) lines.add(line);
    return (char)(i < 10 ? '0' + i : 'A' + i % 26);
}

void tape_product(int warp, int flops, int64_t passes, int line) {
    IssueStep *s = add_of_warp(ISSUE_PRODUCT, warp);
    if (s) s->flops = flops, s->passes = (int)passes, s->letter = letter_of(line);
}

void tape_commit(int warp) { add_of_warp(ISSUE_COMMIT, warp); }

void tape_finish(int warp, uint32_t pending) {
    if (IssueStep *s = add_of_warp(ISSUE_FINISH, warp)) s->pending = (int)pending;
}

static void add_at(IssueKind kind, int64_t barrier, uint32_t phase, size_t bytes) {
    IssueStep *s = add(kind);
    if (s) s->phase = (int)(phase * (BLOCK_BARRIER + 1) + barrier), s->bytes = (int)bytes;
}

void tape_arrive(int64_t barrier, uint32_t phase) { add_at(ISSUE_ARRIVE, barrier, phase, 0); }
void tape_await(int64_t barrier, uint32_t phase) { add_at(ISSUE_AWAIT, barrier, phase, 0); }
void tape_copy(int64_t barrier, uint32_t phase, size_t bytes) { add_at(ISSUE_COPY, barrier, phase, bytes); }
