// dualpipe.c: the pipeline runs in both directions at once. Playbook: "Zero Bubble and DualPipe";
// DeepSeek-V3, section 3.2.1.
//
// Changes from zero_bubble.c: half of the micro-batches enter at rank 0 and half at rank p - 1 (p even). So
// rank r has two stages, r and p - 1 - r, the ranks together store two copies of the model, and each rank can
// run a forward and a backward of different micro-batches together: the pair F+BW, in which one computes
// while the other communicates (chapter 06's overlapped_experts.c; here one runs after the other). Before the
// optimizer step, gradients of the two copies are summed. (Small letters: direction 1.)
//
//     rank 0  |F0-F1-F2-f4-b4-w4-f5-F3+d5----...f6+D0----d6----...f7+D1----d7----B2-W2-B3-W3-
//     rank 1  |...F0-f4-F1-f5-F2-d4----f6+D0----F3+d5----f7+D1----d6----D2----...b7-B3-w7-W3-
//     rank 2  |...f4-F0-f5-F1-f6-D0----F2+d4----f7+D1----F3+d5----D2----d6----...B3-b7-W3-w7-
//     rank 3  |f4-f5-f6-F0-B0-W0-F1-f7+D1----...F2+d4----D2----...F3+d5----D3----b6-w6-b7-w7-
//
// Bubble: (p/2 - 1) (F&B + BW - 3W) in DeepSeek-V3, where BW = B + W and F&B is the time of a pair; if F < B
// it is shorter (the comment on schedule_dualpipe). Messages: as many as with 1F1B, of both kinds to both
// neighbours. Held: p + 1 micro-batches on every rank, and weights twice.
// Run: build/05_pipeline_parallel/dualpipe
//      build/05_pipeline_parallel/schedule --schedule dualpipe --stages 4 --micro-batches 8
// Last line: PASS dualpipe: stages on several ranks reproduce the single-device step …
#include "schedule.h"

// A rank's progress. Chunk 0 is of the direction that enters at the nearer end.
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

// The next micro-batch of a chunk; after the last, one that does not exist.
static int next(const DualChunk *chunk, int *count) {
    int i = (*count)++;
    return i < chunk->count ? chunk->first + i : -1;
}

static void forward(Rank *r, int c) {
    schedule_add(r->schedule, r->rank, PASS_F, r->chunk[c].stage, next(&r->chunk[c], &r->forwards[c]));
}

static void backward(Rank *r, int c) {
    schedule_add(r->schedule, r->rank, PASS_BW, r->chunk[c].stage, next(&r->chunk[c], &r->backwards[c]));
}

static void pair(Rank *r, int f, int b) {
    schedule_add_pair(r->schedule, r->rank, r->chunk[f].stage, next(&r->chunk[f], &r->forwards[f]),
                      r->chunk[b].stage, next(&r->chunk[b], &r->backwards[b]));
}

// B alone; its W waits.
static void backward_input(Rank *r, int c) {
    int i = next(&r->chunk[c], &r->backwards[c]);
    schedule_add(r->schedule, r->rank, PASS_B, r->chunk[c].stage, i);
    r->waiting[r->last].stage = r->chunk[c].stage;
    r->waiting[r->last++].micro_batch = i;
}

static void backward_weight(Rank *r) {
    schedule_add(r->schedule, r->rank, PASS_W, r->waiting[r->first].stage,
                 r->waiting[r->first].micro_batch);
    r->first++;
}

// Rank r and its mirror p - 1 - r do the same with the directions swapped. Let k = min(r, p - 1 - r) be
// the distance to the nearer end of the pipeline, half = p / 2, and n the micro-batches of a direction. x' is
// a pass of those from the far end; each pass takes the next micro-batch of its kind and direction:
//
//     2 (half - k - 1) times  F                        fill
//     k + 1 times             F F'
//     half - k - 1 times      B' W' F'
//     n - p + k + 1 times     F+BW' F'+BW              steady state: nothing but pairs (for k = half - 1
//                                                      the first is F, BW': others wait for this F)
//     half - k - 1 times      BW' F'+BW
//     k + 1 times             BW' BW                   from the middle on as B' B, whose W waits
//     half - k - 1 times      W B                      drain; W of the earliest B that has had none
//     k + 1 times             W
//
// For m < 2p, or an odd m, the list is the same, without the passes that do not exist.
void schedule_dual_rank(Schedule *s, int rank, int half, int k, const DualChunk chunk[2]) {
    int n = chunk[0].count > chunk[1].count ? chunk[0].count : chunk[1].count;
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
    for (int i = 0; i < n - 2 * half + k + 1; i++) {
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
        // of chunks 1 and 0 in turn; from the middle on, W waits
        if (i <= k) backward(&r, i % 2 == 0);
        else backward_input(&r, i % 2 == 0);
    }
    for (int i = 0; i < half - k - 1; i++) {
        backward_weight(&r);
        backward_input(&r, 0);
    }
    for (int i = 0; i < k + 1; i++) backward_weight(&r);
}

// For W <= F <= B and an even m >= 2p, if a pair takes as long as its passes, the bubble is
//
//     max((p/2 - 1) (F&B + F - 2W),  (p/2 - 1) (F&B + B - 2W) - F)
//
// which is DeepSeek-V3's for F = B, and less for F < B. (A shorter pair shortens the step; this is then how
// long the middle ranks idle.) Held for any m: min(m, p + 1, n + 1 + k), where n micro-batches enter at the
// nearer end, k ranks away.
Schedule schedule_dualpipe(int p, int m) {
    Schedule s = schedule_new("dualpipe", p, m, p, 2);
    int half = p / 2, n[2] = {m - m / 2, m / 2};
    for (int k = 0; k < p; k++) s.place[p + k] = p - 1 - k;
    for (int i = n[0]; i < m; i++) s.direction[i] = 1;
    for (int r = 0; r < p; r++) {
        bool far = r >= half;  // nearer to the start of direction 1
        int k = far ? p - 1 - r : r;
        DualChunk first = {k, 0, n[0]}, second = {k, n[0], n[1]};
        DualChunk chunk[2] = {far ? second : first, far ? first : second};
        chunk[1].stage = p - 1 - k;
        schedule_dual_rank(&s, r, half, k, chunk);
    }
    return s;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(
        argc, argv, "DualPipe: micro-batches from both ends, forward and backward in pairs.", "dualpipe");
}
#endif
