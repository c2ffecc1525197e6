// zero_bubble_v.c: ZB-V: two stages a rank, in a V, so that the end of the model is where its start is. Playbook: "Zero
// Bubble and DualPipe"; Qi, Wan, Nair, Lin 2024, "Pipeline Parallelism with Controllable Memory".
//
// Against zero_bubble.c: rank r has stages r (its "down" chunk) and 2p - 1 - r ("up"). A micro-batch goes down the
// ranks, turns on the last one without a message, and comes back up to rank 0, which knows the loss: its first B is
// ready there when the down chunk's forwards are done. So every rank holds the same, p micro-batches, and that is
// enough for what ZB-H2 needs 2p - 1 for.
//
// PICTURE
//
// A rank's list, x' being a pass of the up chunk, and each pass taking the next micro-batch of its kind and chunk:
//     2 (p - r) - 1 times  F              until the first micro-batch has turned and is back
//     r times              F' F
//     p - r times          F' B' W'       the loss is known: backwards begin
//     then in turn         F B W F' B' W' until the forwards are done
//     r times              B B'           now B is all that others wait for, and W fills the rest
//     p - r times          B W
//     the rest             W' …, W …
// Bubble: (p - 1) B / 2, for F <= B <= 3F / 2 or so and W <= B; as a period (p - 1) (B - W), W <= B: zero if
// F = B = W alone. For every m: the list is planned for at least 2p - 1, and what does not exist is left out.
// Held from F to W, in micro-batches of two stages: p. Messages: twice 1F1B's, less at the turn.
// Run: build/05_pipeline_parallel/schedule --schedule zb_v --stages 4 --micro-batches 7
#include "schedule.h"

// A rank at work: how many passes of each kind it has had, of both chunks.
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

static void fill_list(Rank *r, int p, int planned) {
    for (int i = 0; i < 2 * (p - r->rank) - 1; i++) next(r, PASS_F, DOWN);
    for (int i = 0; i < r->rank; i++) {
        next(r, PASS_F, UP);
        next(r, PASS_F, DOWN);
    }
    for (int i = 0; i < p - r->rank; i++) {
        next(r, PASS_F, UP);
        backward(r, UP);
    }
    while (r->next[UP][PASS_F] < planned) {
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
    while (r->next[UP][PASS_W] < planned) next(r, PASS_W, UP);
    while (r->next[DOWN][PASS_W] < planned) next(r, PASS_W, DOWN);
}

Schedule schedule_zero_bubble_v(int p, int m) {
    Schedule s = schedule_new("zb_v", p, m, 2 * p, 1);
    int planned = m < 2 * p - 1 ? 2 * p - 1 : m;
    for (int r = 0; r < p; r++) s.place[r] = s.place[2 * p - 1 - r] = r;
    for (int r = 0; r < p; r++) {
        Rank rank = {.schedule = &s, .rank = r};
        fill_list(&rank, p, planned);
    }
    return s;
}
