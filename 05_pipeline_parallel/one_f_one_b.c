// one_f_one_b.c: one forward, one backward: each backward runs as early as it can. Playbook:
// "One-forward-one-backward and LLama 3.1 schemes"; Narayanan et al. 2021, "Memory-Efficient
// Pipeline-Parallel DNN Training" (PipeDream-Flush); Fan et al. 2021, "DAPPLE".
//
// Changes from afab.c: on rank r forwards run a = p - 1 - r micro-batches ahead of backwards, one for each
// rank after it, and no further.
//
//     rank r, for i = -a … m - 1:  F(i + a)  BW(i)        each only if there is such a micro-batch
//
// That one loop is warm-up (i < 0), the steady state, and the end (i + a >= m); D is BW, dots the bubble:
//
//     rank 0  |F0--F1--F2--F3--........................D0------....D1------....D2------....D3------
//     rank 1  |....F0--F1--F2--................D0------F3--D1------....D2------....D3------........
//     rank 2  |........F0--F1--........D0------F2--D1------F3--D2------....D3------................
//     rank 3  |............F0--D0------F1--D1------F2--D2------F3--D3------........................
//
// Bubble: AFAB's, (p - 1) (F + B + W), for every m: the first backward begins earlier, but the last one ends
// no sooner. Activations held on rank r: min(p - r, m) micro-batches instead of m. Messages: as many as
// AFAB's, but in every turn a rank waits for a round trip to its neighbours: if messages are slow, 1F1B is
// slower than AFAB.
// Run: build/05_pipeline_parallel/one_f_one_b
//      build/05_pipeline_parallel/schedule --schedule one_f_one_b --stages 4 --micro-batches 4  (--split)
// Last line: PASS one_f_one_b: stages on several ranks reproduce the single-device step …
#include "schedule.h"

// With `split` B and W are two passes, one right after the other. B's gradient leaves before W begins, and so
// reaches rank 0 sooner: bubble (p - 1) (F + B), for every m; zero_bubble.c goes on from there.
Schedule schedule_one_f_one_b(int p, int m, bool split) {
    Schedule s = schedule_new(split ? "one_f_one_b_split" : "one_f_one_b", p, m, p, 1);
    for (int r = 0; r < p; r++) {
        int ahead = p - 1 - r;
        for (int i = -ahead; i < m; i++) {
            schedule_add(&s, r, PASS_F, r, i + ahead);
            schedule_add(&s, r, split ? PASS_B : PASS_BW, r, i);
            if (split) schedule_add(&s, r, PASS_W, r, i);
        }
    }
    return s;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(argc, argv, "One forward, one backward: a backward as soon as there is one.",
                            "one_f_one_b");
}
#endif
