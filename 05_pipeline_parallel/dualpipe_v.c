// dualpipe_v.c: DualPipe folded in the middle: one direction and one copy of the weights. Playbook: "Zero Bubble and
// DualPipe"; DeepSeek's DualPipeV, from Qi, Wan, Lin 2025, "Cut-in-half".
//
// Against dualpipe.c: a rank and its mirror do the same there with the directions swapped. So one of each pair of ranks
// is enough: what left for the mirrored half now turns on the last rank. Rank r has stages r and 2p - 1 - r, as in
// zero_bubble_v.c, and the list of rank r of DualPipe on 2p ranks, whose second direction is here the way back up.
//
// PICTURE
//
// Bubble: DualPipe's on 2p ranks, with stages half as long: (p - 1) (F&B + BW - 3W) / 2, exact where F = B >= W.
// Held: p + 1/2 micro-batches of two stages, weights once. It needs m >= 2p; with less, what does not exist is left
// out of a plan for as many. Messages: as ZB-V's.
// Run: build/05_pipeline_parallel/schedule --schedule dualpipe_v --stages 4 --micro-batches 8
#include "schedule.h"

Schedule schedule_dualpipe_v(int p, int m) {
    Schedule s = schedule_new("dualpipe_v", p, m, 2 * p, 1);
    for (int r = 0; r < p; r++) s.place[r] = s.place[2 * p - 1 - r] = r;
    for (int r = 0; r < p; r++) {
        DualChunk chunk[2] = {{r, 0, m}, {2 * p - 1 - r, 0, m}};
        schedule_dual_rank(&s, r, p, r, m < 2 * p ? 2 * p : m, chunk);
    }
    return s;
}
