// dualpipe.c: the pipeline runs in both directions at once. Playbook: "Zero Bubble and DualPipe"; DeepSeek-V3, section
// 3.2.1.
//
// Against zero_bubble.c: half of the micro-batches enter at rank 0 and half at rank p - 1 (p even). So each rank has
// two stages, r and p - 1 - r, two copies of the model stand on the ranks, and every rank has a forward and a backward
// of different micro-batches to do together: the pair F+BW, of which one computes while the other communicates.
// Before the optimizer's one step, gradients of the mirrored copies are added up.
//
// PICTURE
//
// A rank and its mirror p - 1 - r do the same with the directions swapped. With k = min(r, p - 1 - r), its distance
// from the end of the pipeline that is nearer, h = p / 2, and n micro-batches a direction, x' being a pass of those
// from the far end, and each pass taking the next micro-batch of its kind and direction:
//     2 (h - k - 1) times     F                        fill
//     k + 1 times             F F'
//     h - k - 1 times         B' W F'
//     n - p + k + 1 times     F+BW' F'+BW              the steady state: nothing but pairs (in the middle of the
//                                                      pipeline the first is F, BW': that BW' needs an F just done)
//     h - k - 1 times         BW' F'+BW
//     k + 1 times             BW' BW                   from the middle on as B' B, which leaves W behind
//     h - k - 1 times         W B                      drain
//     k + 1 times             W
// Bubble: (p/2 - 1) (F&B + BW - 3W) in DeepSeek-V3, with BW = B + W, F&B the pair: exact where F = B >= W. Where
// F < B it is (p/2 - 1) (F&B + F - 2W), a little less, for the slack not to change sides. It needs m >= 2p, m even;
// with less, what does not exist is left out of a plan for as many, and the bubble is larger.
// Held: p + 1 micro-batches on every rank, and weights twice. Messages: as 1F1B's, but to both neighbours alike.
// Run: build/05_pipeline_parallel/schedule --schedule dualpipe --stages 4 --micro-batches 8
#include "schedule.h"

// A rank at work. Chunk 0 is of the direction whose end is nearer.
typedef struct Rank {
    Schedule *schedule;
    int rank;
    DualChunk chunk[2];
    int forwards[2], backwards[2];
    struct {
        int stage, micro_batch;
    } waiting[2 * RANKS_MOST];  // W, in the order of their B
    int first, last;
} Rank;

// The next micro-batch of a chunk; one that does not exist, where more are planned.
static int next(const DualChunk *chunk, int *count) {
    int i = (*count)++;
    return i < chunk->count ? chunk->first + i : -1;
}

static void forward(Rank *r, int d) {
    schedule_add(r->schedule, r->rank, PASS_F, r->chunk[d].stage, next(&r->chunk[d], &r->forwards[d]));
}

static void backward(Rank *r, int d) {
    schedule_add(r->schedule, r->rank, PASS_BW, r->chunk[d].stage, next(&r->chunk[d], &r->backwards[d]));
}

static void pair(Rank *r, int f, int b) {
    schedule_add_pair(r->schedule, r->rank, r->chunk[f].stage, next(&r->chunk[f], &r->forwards[f]),
                      r->chunk[b].stage, next(&r->chunk[b], &r->backwards[b]));
}

// B alone; its W waits.
static void backward_input(Rank *r, int d) {
    int i = next(&r->chunk[d], &r->backwards[d]);
    schedule_add(r->schedule, r->rank, PASS_B, r->chunk[d].stage, i);
    r->waiting[r->last].stage = r->chunk[d].stage;
    r->waiting[r->last++].micro_batch = i;
}

static void backward_weight(Rank *r) {
    schedule_add(r->schedule, r->rank, PASS_W, r->waiting[r->first].stage, r->waiting[r->first].micro_batch);
    r->first++;
}

void schedule_dual_rank(Schedule *s, int rank, int half, int k, int planned, const DualChunk chunk[2]) {
    Rank r = {.schedule = s, .rank = rank, .chunk = {chunk[0], chunk[1]}};
    for (int i = 0; i < 2 * (half - k - 1); i++) forward(&r, 0);
    for (int i = 0; i < k + 1; i++) {
        forward(&r, 0);
        forward(&r, 1);
    }
    for (int i = 0; i < half - k - 1; i++) {
        backward_input(&r, 1);
        backward_weight(&r);
        forward(&r, 1);
    }
    for (int i = 0; i < planned - 2 * half + k + 1; i++) {
        if (i == 0 && k == half - 1) {
            forward(&r, 0);
            backward(&r, 1);
        } else {
            pair(&r, 0, 1);
        }
        pair(&r, 1, 0);
    }
    for (int i = 0; i < half - k - 1; i++) {
        backward(&r, 1);
        pair(&r, 1, 0);
    }
    for (int i = 0; i < 2 * (k + 1); i++) {
        // every second one is of direction 1; from the middle on, W is left behind
        if (i <= k) backward(&r, i % 2 == 0);
        else backward_input(&r, i % 2 == 0);
    }
    for (int i = 0; i < half - k - 1; i++) {
        backward_weight(&r);
        backward_input(&r, 0);
    }
    for (int i = 0; i < k + 1; i++) backward_weight(&r);
}

Schedule schedule_dualpipe(int p, int m) {
    Schedule s = schedule_new("dualpipe", p, m, p, 2);
    int half = p / 2, n[2] = {m - m / 2, m / 2};
    int planned = n[0] < p ? p : n[0];
    for (int k = 0; k < p; k++) s.place[p + k] = p - 1 - k;
    for (int i = n[0]; i < m; i++) s.direction[i] = 1;
    for (int r = 0; r < p; r++) {
        bool far = r >= half;  // nearer to the start of direction 1
        int k = far ? p - 1 - r : r;
        DualChunk first = {k, 0, n[0]}, second = {k, n[0], n[1]};
        DualChunk chunk[2] = {far ? second : first, far ? first : second};
        chunk[1].stage = p - 1 - k;
        schedule_dual_rank(&s, r, half, k, planned, chunk);
    }
    return s;
}
