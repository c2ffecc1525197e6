// zero_bubble_v.c: ZB-V: two stages per rank, placed in a V: rank 0 has the first and the last. Playbook:
// "Zero Bubble and DualPipe"; Qi, Wan, Huang, Lin 2023 (arXiv 2401.10241); Qi, Wan, Amar, Lin 2024, "Pipeline
// Parallelism with Controllable Memory", whose V-ZB is of this kind.
//
// Changes from zero_bubble.c: rank r has stages r (its "down" chunk) and 2p - 1 - r ("up"). A micro-batch
// goes down the ranks, turns on the last one without a message, and comes back up to rank 0, which computes
// the loss and begins the backward at once. So every rank holds equally much, p micro-batches, where ZB-H2
// needs 2p - 1 (small letters: "up"):
//
//     rank 0  |F0F1F2F3F4F5F6f0b0w0f1b1w1f2b2w2f3b3w3B0W0f4b4w4B1W1f5b5w5B2W2f6b6w6B3W3B4W4B5W5B6W6......
//     rank 1  |..F0F1F2F3F4f0F5f1b0w0f2b1w1f3b2w2F6B0W0f4b3w3B1W1f5b4w4B2W2f6b5w5B3b6B4W3B5W4B6W5w6W6....
//     rank 2  |....F0F1F2f0F3f1F4f2b0w0f3b1w1F5B0W0f4b2w2F6B1W1f5b3w3B2W2f6b4w4B3b5B4b6B5W3B6W4w5w6W5W6..
//     rank 3  |......F0f0F1f1F2f2F3f3b0w0F4B0W0f4b1w1F5B1W1f5b2w2F6B2W2f6b3w3B3b4B4b5B5b6B6W3w4w5w6W4W5W6
//
// Bubble: (p - 1) B / 2, of a period (p - 1) (B - W), for m >= 2p - 1 and W <= F <= B <= min(3F / 2, 2W):
// zero only if F = B = W, and only for a period. The comment on schedule_zero_bubble_v says why.
// Held from F to W, in micro-batches of two stages: p; for m < 2p - 1 min(m, p, (m + 1 + r) / 2). Messages:
// twice 1F1B's, but none at the turn.
// Run: build/05_pipeline_parallel/zero_bubble_v
//      build/05_pipeline_parallel/schedule --schedule zb_v --stages 4 --micro-batches 7
// Last line: PASS zero_bubble_v: stages on several ranks reproduce the single-device step …
#include "schedule.h"

// A rank's progress: how many passes of each kind it has had, for both chunks.
typedef struct Rank {
    Schedule *schedule;
    int rank, next[2][3];  // (chunk, F B W)
} Rank;

enum { DOWN, UP };

static void next(Rank *r, PassKind kind, int chunk) {
    int stage = chunk == DOWN ? r->rank : r->schedule->stages - 1 - r->rank;
    schedule_add(r->schedule, r->rank, kind, stage, r->next[chunk][kind]++);
}

static void backward(Rank *r, int chunk) {
    next(r, PASS_B, chunk);
    next(r, PASS_W, chunk);
}

// The list of rank r. x' is a pass of the up chunk; each pass takes the next micro-batch of its kind and
// chunk:
//
//     2 (p - r) - 1 times  F              until the first micro-batch has turned and is back
//     r times              F' F           one down, one up, until the first gradient comes
//     p - r times          F' B' W'       backward of the up chunk
//     then in turn         F B W F' B' W' until the forwards are done
//     r times              B B'           now others wait only for B, and W fills the rest
//     p - r times          B W
//     the rest             W' …, W …
//
// For m < 2p - 1 the list is the same, without the passes that do not exist.
static void fill_list(Rank *r, int p, int m) {
    for (int i = 0; i < 2 * (p - r->rank) - 1; i++) next(r, PASS_F, DOWN);
    for (int i = 0; i < r->rank; i++) {
        next(r, PASS_F, UP);
        next(r, PASS_F, DOWN);
    }
    for (int i = 0; i < p - r->rank; i++) {
        next(r, PASS_F, UP);
        backward(r, UP);
    }
    while (r->next[UP][PASS_F] < m) {
        next(r, PASS_F, DOWN);
        backward(r, DOWN);
        next(r, PASS_F, UP);
        backward(r, UP);
    }
    for (int i = 0; i < r->rank; i++) {
        next(r, PASS_B, DOWN);
        next(r, PASS_B, UP);
    }
    for (int i = 0; i < p - r->rank; i++) backward(r, DOWN);
    while (r->next[UP][PASS_W] < m) next(r, PASS_W, UP);
    while (r->next[DOWN][PASS_W] < m) next(r, PASS_W, DOWN);
}

// What it costs. F, B and W are the times of two stages, as a rank has them: one pass takes half of that.
//
//     held     Before its first B' a rank has 2 (p - r) - 1 + 2 r + 1 = 2p forwards: p micro-batches.
//              From then on a B and its W make room for each F.
//     bubble   The first micro-batch is through its 2p stages at p F, and its gradient is on rank r at
//              p F + r B / 2, when rank r has computed for p F. So by then the last rank has waited
//              (p - 1) B / 2, and never waits again: as all ranks compute equally long, this is the bubble.
//     period   The last B of the down chunk begins on rank 0 (p - 1) B / 2 later than on the last rank.
//              After it rank 0 has one W, and the last rank 2p - 1 of them, each of W / 2. So rank 0 ends
//              (p - 1) (W - B / 2) before the last rank, and may begin the next step; it has lost
//              (p - 1) B / 2 - (p - 1) (W - B / 2) = (p - 1) (B - W).
Schedule schedule_zero_bubble_v(int p, int m) {
    Schedule s = schedule_new("zb_v", p, m, 2 * p, 1);
    for (int r = 0; r < p; r++) s.place[r] = s.place[2 * p - 1 - r] = r;
    for (int r = 0; r < p; r++) {
        Rank rank = {.schedule = &s, .rank = r};
        fill_list(&rank, p, m);
    }
    return s;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(argc, argv, "Zero bubble in a V: two stages a rank, there and back.", "zb_v");
}
#endif
