// zigzag_ring_attention.c: ring attention with balanced chunks. Playbook: "Zig-Zag Ring Attention – A
// Balanced Compute Implementation".
//
// Changes from ring_attention.c: only the layout of tokens. Of 2 N chunks rank r has an early one, r, and a
// late one, 2 N - 1 - r. The less the early one has to compute, the more the late one has (N = 4, eight
// chunks of queries and keys; the digit is the rank that computes):
//
//                     contiguous, keys 0 … 7    zig-zag, keys 0 … 7
//     queries 0       0                         0
//             1       0 0                       1 1
//             2       1 1 1                     2 2 2
//             3       1 1 1 1                   3 3 3 3
//             4       2 2 2 2 2                 3 3 3 3 3
//             5       2 2 2 2 2 2               2 2 2 2 2 2
//             6       3 3 3 3 3 3 3             1 1 1 1 1 1 1
//             7       3 3 3 3 3 3 3 3           0 0 0 0 0 0 0 0
//
// Score entries of a head, with m = s / N tokens on a rank: contiguous (r + 1/2) m^2 + m / 2 on rank r,
// zig-zag N m^2 / 2 + m / 2 on every rank. After hop 0 the slowest rank of a hop computes m^2 / 2, not m^2:
// in all, 2 - 1/N times faster.
// Bytes sent and memory per rank: as ring_attention.c.
// Run: build/04_context_parallel/zigzag_ring_attention   (--ranks 8, --dp 2 --zero 3, --machine dgx-a100 …)
// Last line: PASS zigzag_ring_attention: balanced ranks reproduce the single-device step …
#include "context_parallel.h"

static bool enabled(const Config *config) { return context_on(config, CONTEXT_ZIGZAG); }

const Technique zigzag_ring_attention = {.name = "zigzag_ring_attention",
                                         .option = context_options,
                                         .options = CONTEXT_OPTIONS,
                                         .asked = "--cp",
                                         .axes = 1u << AXIS_CP,
                                         .enabled = enabled,
                                         .check = context_check,
                                         .plug = ring_plug,
                                         .unplug = context_unplug,
                                         .price = ring_price};

#ifndef NO_MAIN
static void plan(Mesh mesh, const Config *config) {
    (void)mesh;
    context_only(config, CONTEXT_ZIGZAG);
}

static void more(Mesh mesh, const Config *config) {
    context_print_masks(mesh.cp.size);
    context_check_cost(mesh, CONTEXT_ZIGZAG, ring_formula);
    context_balance(mesh, config);
    context_compare(mesh, config);
}

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Zig-zag ring attention: each rank has an early and a late part of every sequence.",
        .claim = "balanced ranks reproduce the single-device step",
        .defaults = CONTEXT_MODEL "heads=6 seq=64 context=zigzag",
        .natural = 8,
        .axis = AXIS_CP,
        .before = {"ring_attention", NULL, "context", CONTEXT_RING},
        .techniques = context_layouts,
        .option = &zero_option,
        .options = 1,
        .plan = plan,
        .more = more};
    return program_main(argc, argv, &program);
}
#endif
