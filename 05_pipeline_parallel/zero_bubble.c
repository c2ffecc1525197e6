// zero_bubble.c: W waits until there is nothing better to do: ZB-H1 and ZB-H2. Playbook: "Zero Bubble and DualPipe";
// Qi, Wan, Huang, Lin 2023, section 2.
//
// Against one_f_one_b.c: backward is two passes. Only B is on the way of others; W may run any time before the
// optimizer's step. Late ranks, which have the fewest forwards in flight, put W off:
//
//     rank r:  a = level (p - 1 - r) forwards ahead,  d = level r weight passes behind
//     for i = -a … m + d - 1:  F(i + a)  B(i)  W(i - d)       where there is no micro-batch, there is nothing to do
//
// level 1 is ZB-H1: 1F1B's lead, and its largest memory, now on every rank.
//
// PICTURE1
//
// level 2 is ZB-H2: twice the lead. No rank waits for its first B, and the Ws at the end make up for the start.
//
// PICTURE2
//
// Bubble of ZB-H1: (p - 1) (F + B - W) for m >= p, B >= W, F >= W; (p - 1) max(F + max(0, B - W), B) in general.
// Bubble of ZB-H2: (p - 1) F, which is how long the last rank waits for its first input, for m >= 2p - 1 and
// 2W <= F + B, W <= B. But rank 0 ends as much earlier as it started: if the next step begins without a barrier, a
// step costs (p - 1) (F + B - 2W) more than its work. That period is what the paper calls zero for F = B = W.
// Held from F to W: a + d + 1, p and 2p - 1 micro-batches on every rank (and m, where there are no more). From F to
// B it is 1F1B's p - r, or 2 (p - r) - 1. Messages: as 1F1B's.
// Run: build/05_pipeline_parallel/schedule --schedule zb_h1 --stages 4 --micro-batches 7               (zb_h2)
#include "schedule.h"

Schedule schedule_zero_bubble(int p, int m, int level) {
    Schedule s = schedule_new(level == 1 ? "zb_h1" : "zb_h2", p, m, p, 1);
    for (int r = 0; r < p; r++) {
        int ahead = level * (p - 1 - r), behind = level * r;
        for (int i = -ahead; i < m + behind; i++) {
            schedule_add(&s, r, PASS_F, r, i + ahead);
            schedule_add(&s, r, PASS_B, r, i);
            schedule_add(&s, r, PASS_W, r, i - behind);
        }
    }
    return s;
}
