// zero_bubble.c: W waits until there is nothing better to do: ZB-H1 and ZB-H2. Playbook: "Zero Bubble and
// DualPipe"; Qi, Wan, Huang, Lin 2023, section 2.
//
// Changes from one_f_one_b.c: backward is two passes. Other ranks wait only for B; W may run any time before
// the optimizer step. The later a rank, the fewer forwards it has in flight, and the longer it delays W.
// Level 1, ZB-H1, is as far ahead as 1F1B, and every rank now needs 1F1B's largest memory.
// Level 2, ZB-H2, is twice as far ahead: no rank waits for its first B, and Ws at the end balance the start.
//
//     rank r:  a = level (p - 1 - r) forwards ahead,  d = level r weight passes behind
//     for i = -a … m + d - 1:  F(i + a)  B(i)  W(i - d)       each only if there is such a micro-batch
//
// ZB-H1 for p = 4, m = 7, F = B = W:
//
//     rank 0  |F0-F1-F2-F3-.........B0-W0-F4-B1-W1-F5-B2-W2-F6-B3-W3-B4-W4-B5-W5-B6-W6-
//     rank 1  |...F0-F1-F2-......B0-F3-B1-W0-F4-B2-W1-F5-B3-W2-F6-B4-W3-B5-W4-B6-W5-W6-
//     rank 2  |......F0-F1-...B0-F2-B1-F3-B2-W0-F4-B3-W1-F5-B4-W2-F6-B5-W3-B6-W4-W5-W6-
//     rank 3  |.........F0-B0-F1-B1-F2-B2-F3-B3-W0-F4-B4-W1-F5-B5-W2-F6-B6-W3-W4-W5-W6-
//
//     m >=            bubble / (p - 1)           period / (p - 1)           held to W  held to B
//     p       ZB-H1   max(F + max(0, B - W), B)  max(F + B - W, B)          p          p - r
//     2p - 1  ZB-H2   max(F, F + B - 2W, B - F)  max(F + B - 2W, B - F, 0)  2p - 1     2 (p - r) - 1
// Run: build/05_pipeline_parallel/zero_bubble
//      build/05_pipeline_parallel/schedule --schedule zb_h1 --stages 4 --micro-batches 7  (zb_h2)
// Last line: PASS zero_bubble: stages on several ranks reproduce the single-device step …
#include "schedule.h"

// The bubble of ZB-H1 is (p - 1) (F + B - W) if W is the shortest pass: the last rank waits (p - 1) F for
// its first input, and has p Ws left after its last B. That B's gradient takes p - 1 Bs up to and on rank
// 0, where one W follows: (p - 1) F + (p - 1) B + W in place of p W. That of ZB-H2 is (p - 1) F if neither
// F nor W is below B / 2: that is how long the last rank waits for its first input. But rank 0 ends earlier
// than the last rank, and could begin the next step: what the paper calls zero is the bubble of a period, and
// for F = B = W it is. It takes an optimizer step that waits for no other rank (the paper's section 4). Here
// all ranks sum the gradient norm before they step. From F to W rank r holds a + d + 1 micro-batches.
// Messages are those of 1F1B.
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
