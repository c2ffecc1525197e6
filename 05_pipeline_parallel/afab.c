// afab.c: all forward, all backward: every forward of a step runs before its first backward. Playbook:
// "Splitting layers on various nodes - All forward, all backward"; Huang et al. 2019, "GPipe".
//
// Stage r is on rank r. With one micro-batch this is the naive pipeline, in which one rank works and the
// others wait.
//
//     rank r:  F(0) … F(m-1)  BW(0) … BW(m-1)           drawn below as F and D; dots: the bubble
//
//     rank 0  |F0--F1--F2--F3--....................................D0------D1------D2------D3------
//     rank 1  |....F0--F1--F2--F3--........................D0------D1------D2------D3------........
//     rank 2  |........F0--F1--F2--F3--............D0------D1------D2------D3------................
//     rank 3  |............F0--F1--F2--F3--D0------D1------D2------D3------........................
//
// The first F reaches the last rank after p - 1 forwards, and the last BW comes back through p - 1 backwards:
//     makespan (m + p - 1) (F + B + W),  bubble (p - 1) (F + B + W), for every m: (p - 1) / m of the work.
// Activations held: those of all m micro-batches. Messages sent: m activations by every rank but the last,
// m gradients by every rank but the first.
// Run: build/05_pipeline_parallel/afab
//      build/05_pipeline_parallel/schedule --schedule afab --stages 4 --micro-batches 4  (naive: 1)
// Last line: PASS afab: stages on several ranks reproduce the single-device step …
#include "schedule.h"

Schedule schedule_afab(int p, int m) {
    Schedule s = schedule_new("afab", p, m, p, 1);
    for (int r = 0; r < p; r++) {
        for (int i = 0; i < m; i++) schedule_add(&s, r, PASS_F, r, i);
        for (int i = 0; i < m; i++) schedule_add(&s, r, PASS_BW, r, i);
    }
    return s;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(
        argc, argv, "All forward, all backward: the naive pipeline with many micro-batches.", "afab");
}
#endif
