// dualpipe_v.c: DualPipe folded in the middle: one direction and one copy of the weights. Playbook: "Zero
// Bubble and DualPipe"; DeepSeek's DualPipeV, after Sea AI Lab's "cut in half".
//
// Changes from dualpipe.c: there a rank and its mirror do the same with the directions swapped. So one of
// each pair of ranks is enough: what was sent to the mirrored half now turns on the last rank. Rank r has
// stages r and 2p - 1 - r, as in zero_bubble_v.c, and the list of rank r of DualPipe on 2p ranks; the second
// direction there is the way back up here (small letters):
//
//     rank 0  |F0F1F2F3F4F5F6f0b0w0f1b1w1f2b2w2f3F7+d3-......f4+D0-d4--..f5
//     rank 1  |..F0F1F2F3F4f0F5f1b0w0f2b1w1f3F6+d2-....f4+D0-F7+d3-f5+D1-d4
//     rank 2  |....F0F1F2f0F3f1F4f2b0w0f3F5+d1-..f4+D0-F6+d2-f5+D1-F7+d3-f6
//     rank 3  |......F0f0F1f1F2f2F3f3F4d0--f4+D0-F5+d1-f5+D1-F6+d2-f6+D2-F7
//
//            …|+D1-d5--..f6+D2-d6--..f7+D3-d7--B4W4B5W5B6W6B7W7
//            …|--..f6+D2-d5--..f7+D3-d6--D4--..b7B5w7B6W5B7W6W7
//            …|+D2-d4--..f7+D3-d5--D4--..d6--B5..b7B6W5B7w7W6W7
//            …|+d3-f7+D3-d4--D4--..d5--D5--..b6B6..b7B7w6W6w7W7
//
// Bubble: DualPipe's on 2p ranks, with stages half as long: (p - 1) (F&B + BW - 3W) / 2 for F = B, and less
// for F < B; exact for m >= 2p, even or odd. Held: p + 1/2 micro-batches of two stages, weights once.
// Messages: as with ZB-V.
// Run: build/05_pipeline_parallel/dualpipe_v
//      build/05_pipeline_parallel/schedule --schedule dualpipe_v --stages 4 --micro-batches 8
// Last line: PASS dualpipe_v: stages on several ranks reproduce the single-device step …
#include "schedule.h"

Schedule schedule_dualpipe_v(int p, int m) {
    Schedule s = schedule_new("dualpipe_v", p, m, 2 * p, 1);
    for (int r = 0; r < p; r++) s.place[r] = s.place[2 * p - 1 - r] = r;
    for (int r = 0; r < p; r++) {
        DualChunk chunk[2] = {{r, 0, m}, {2 * p - 1 - r, 0, m}};
        schedule_dual_rank(&s, r, p, r, chunk);
    }
    return s;
}

#ifndef NO_MAIN
#include "pipeline.h"

int main(int argc, char **argv) {
    return pipeline_program(argc, argv, "DualPipeV: the same on one copy of the weights, folded to a V.",
                            "dualpipe_v");
}
#endif
