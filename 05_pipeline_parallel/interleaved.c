// interleaved.c: each rank has v stages, every p-th of the p v stages. Playbook: "Interleaving stages";
// Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
//
// Changes from one_f_one_b.c: stage k is on rank k mod p. So a micro-batch goes round the ranks v times, and
// a pass takes a v-th of the time, as does filling and draining the pipeline. A rank's v stages, its chunks,
// take turns: `group` micro-batches go through the first, then through the second …; then the next group:
//
//     forward k of a rank:  micro-batch group (k div (v group)) + k mod group,  chunk (k div group) mod v
//
// Backward has the same order with the chunks reversed; on rank r forwards stay a = 2 (p - 1 - r) + (v - 1)
// group ahead of it, as in Megatron-LM, whose micro-batch group size is p by default. group = p is
// depth-first (a micro-batch leaves the model as soon as it can), group = m breadth-first (the pipeline is
// filled first; Lamy-Poirier 2023); Llama 3.1 tunes it. (Small letters: chunk 1; D = BW.)
//
//     rank 0  |F0F1F2F3f0f1f2f3............d0--..d1--..d2--..d3--D0--D1--D2--D3--
//     rank 1  |..F0F1F2F3f0f1f2f3......d0--..d1--..d2--..d3--D0--D1--D2--D3--....
//     rank 2  |....F0F1F2F3f0f1f2..d0--f3d1--..d2--..d3--D0--D1--D2--D3--........
//     rank 3  |......F0F1F2F3f0d0--f1d1--f2d2--f3d3--D0--D1--D2--D3--............
//
// Bubble: (p - 1) (F + B + W) / v if group divides m; (p - m + (m - 1) / v) (F + B + W) if m < p. Messages
// sent: 2 m v by middle ranks, v times 1F1B's, and m (2 v - 1) by the first and the last. Held on rank r:
// min(m, (a + 1) / v) micro-batches of v stages.
// Run: build/05_pipeline_parallel/interleaved
//      build/05_pipeline_parallel/schedule --schedule interleaved --stages 4 --micro-batches 4 --chunks 2
// Last line: PASS interleaved: stages on several ranks reproduce the single-device step …
#include "schedule.h"

// The k-th forward of a rank; the k-th backward has the chunks reversed.
static void turn(int k, int v, int group, int *chunk, int *micro_batch) {
    *micro_batch = k / (v * group) * group + k % group;
    *chunk = k / group % v;
}

// The first micro-batch of a group is back at rank 0 after p forwards. So a group must have at least p
// micro-batches: with fewer, rank 0 waits in every turn, or even deadlocks. If group does not divide m and
// the last group is planned shorter, ranks wait for forwards that others have after backwards: with v = 2,
// p = 8 deadlocks at m = 10 … 13, however many messages may be in flight, and p = 4 has a bubble of 100 at
// m = 9, for F = 10, B = 12, W = 8. So the last group is planned whole, and micro-batches that do not exist
// are left out: every m runs, and that bubble is 75.
Schedule schedule_interleaved(int p, int m, int v, int group) {
    Schedule s = schedule_new("interleaved", p, m, v * p, 1);
    int turns = (m + group - 1) / group * group * v;
    for (int r = 0; r < p; r++) {
        // One forward less ahead, on all ranks but the last, would hold one chunk less, and cost nothing if
        // a hop took no time. But with hops each rank would then wait for its neighbours in every turn: with
        // a hop of 1 the bubble of p = 4, m = 16, v = 2 would be 85 instead of 59.
        int ahead = 2 * (p - 1 - r) + (v - 1) * group;
        for (int k = -ahead; k < turns; k++) {
            int chunk, i;
            if (k + ahead < turns) {
                turn(k + ahead, v, group, &chunk, &i);
                schedule_add(&s, r, PASS_F, chunk * p + r, i);
            }
            if (k < 0) continue;
            turn(k, v, group, &chunk, &i);
            schedule_add(&s, r, PASS_BW, (v - 1 - chunk) * p + r, i);
        }
    }
    return s;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(
        argc, argv, "Interleaved stages: each rank has several, and the bubble is that many times shorter.",
        "interleaved");
}
#endif
