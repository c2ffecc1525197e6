// zero_bubble.c: W waits until there is nothing better to do: ZB-H1 and ZB-H2. Playbook: "Zero Bubble and
// DualPipe"; Qi, Wan, Huang, Lin 2023, section 2.
//
// Against one_f_one_b.c: backward is two passes. Other ranks wait for B only; W may run any time
// before the optimizer's step. Late ranks, which have the fewest forwards in flight, put W off:
//
//     rank r:  a = level (p - 1 - r) forwards ahead,  d = level r weight passes behind
//     for i = -a … m + d - 1:  F(i + a)  B(i)  W(i - d)       nothing where there is no such micro-batch
//
// level 1 is ZB-H1: 1F1B's lead, and its largest memory, now on every rank (F = B = W = 1):
//
//     rank 0  |F0-F1-F2-F3-.........B0-W0-F4-B1-W1-F5-B2-W2-F6-B3-W3-B4-W4-B5-W5-B6-W6-
//     rank 1  |...F0-F1-F2-......B0-F3-B1-W0-F4-B2-W1-F5-B3-W2-F6-B4-W3-B5-W4-B6-W5-W6-
//     rank 2  |......F0-F1-...B0-F2-B1-F3-B2-W0-F4-B3-W1-F5-B4-W2-F6-B5-W3-B6-W4-W5-W6-
//     rank 3  |.........F0-B0-F1-B1-F2-B2-F3-B3-W0-F4-B4-W1-F5-B5-W2-F6-B6-W3-W4-W5-W6-
//
// level 2 is ZB-H2: twice the lead. No rank waits for its first B, and the Ws at the end make up for the
// start:
//
//     rank 0  |F0-F1-F2-F3-F4-F5-F6-B0-W0-B1-W1-B2-W2-B3-W3-B4-W4-B5-W5-B6-W6-.........
//     rank 1  |...F0-F1-F2-F3-F4-B0-F5-B1-F6-B2-W0-B3-W1-B4-W2-B5-W3-B6-W4-W5-W6-......
//     rank 2  |......F0-F1-F2-B0-F3-B1-F4-B2-F5-B3-F6-B4-W0-B5-W1-B6-W2-W3-W4-W5-W6-...
//     rank 3  |.........F0-B0-F1-B1-F2-B2-F3-B3-F4-B4-F5-B5-F6-B6-W0-W1-W2-W3-W4-W5-W6-
//
// Bubble of ZB-H1, m >= p: (p - 1) (F + B - W) where B >= W, F >= W; else
// (p - 1) max(F + max(0, B - W), B), and as a period (p - 1) max(F + B - W, B).
// Bubble of ZB-H2, m >= 2p - 1: (p - 1) F, which is how long the last rank waits for its first input,
// where 2W >= B, 2F >= B; else (p - 1) max(F, F + B - 2W, B - F). But rank 0 ends earlier than the last
// rank: if the next step begins without a barrier, a step costs (p - 1) max(F + B - 2W, B - F, 0) more
// than its work. This period is what the paper calls zero, and it is for F = B = W.
// Held from F to W: a + d + 1, p and 2p - 1 micro-batches on every rank (and m, where there are no more).
// From F to B it is 1F1B's p - r, or 2 (p - r) - 1. Messages: as 1F1B's.
// Run: build/05_pipeline_parallel/schedule --schedule zb_h1 --stages 4 --micro-batches 7  (zb_h2)
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

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(argc, argv, "Zero bubble: B and W apart, so that W fills the bubble.", "zb_h1");
}
#endif
