// flash_work.h: what FlashAttention's gradients in 16 bits ask of a GPU, in closed form: by mma
// (flash_attention_2_tensor_backward.cu) and by wgmma (flash_attention_3_backward.cu). Both have blocks of
// 128 keys, and so s is a multiple of 128.
#ifndef FLASH_WORK_H
#define FLASH_WORK_H

#include "flash_tiles.h"

enum { WORK_KEYS = 128 };

// Rows of delta, by the kernel that runs before.
static inline void add_row_products(Work *w, double rows, double d) {
    w->load_requests += rows * d / 32;
    w->load_sectors += rows * d / 8;
    w->store_requests += rows / 4;
    w->store_sectors += rows / 4;
    w->memory_sectors += rows * d / 8 + rows / 8;
    w->flops += rows * (2 * d + 24);
    w->flop_instructions += rows / 4 * (d / 8 + 3);
}

// Numbers of dq, by the kernel that runs after.
static inline void add_narrow(Work *w, double numbers) {
    const double pairs = numbers / 2;
    w->load_requests += pairs / 32;
    w->load_sectors += pairs / 4;
    w->store_requests += pairs / 32;
    w->store_sectors += pairs / 8;
    w->memory_sectors += pairs / 4 + pairs / 8;
    w->flops += 2 * pairs;
    w->flop_instructions += 2 * pairs / 32;
}

// A block has 8 warps of 16 keys, and takes 64 queries at a time.
static inline Work work_of_tensor_backward(const Heads &shape, double d) {
    const double s = (double)shape.s, n = s / WORK_KEYS, heads = (double)(shape.b * shape.a);
    const double rows = heads * s, key_heads = (double)(shape.b * shape.kv), blocks = key_heads * n;
    const double own = 16, queries = 64, warps = 8;
    // tiles of queries that pass blocks of keys, and those that pass the first; on the diagonal half of the
    // warps see nothing
    const double steps = heads * (shape.causal ? n * n + n : 2 * n * n), first = heads * 2 * n;
    const double unseen = shape.causal ? heads * n * warps / 2 : 0, pairs = steps * warps - unseen;
    const double products = 8 * pairs;               // steps of 16 keys of the warps' dQ
    const double scores = own * queries / 32;        // of a lane
    const double copies = (blocks + steps / 2) * d;  // requests: K and V; Q and dO
    const double again = shape.causal ? s - WORK_KEYS
                         : n > 1      ? s
                                      : 0;                            // rows of a head's dq that come back
    const double left = d / 16 * 4, tile = queries / 16 * left;  // passes of ldmatrix
    Work w = {};
    add_row_products(&w, rows, d);
    add_narrow(&w, rows * d);
    // lse and delta; dq
    w.load_requests += copies + steps * 4 + (steps - first) * d;
    w.load_sectors += 16 * copies + steps * 16 + (steps - first) * 8 * d;
    // dq; turns, asked and passed on; dk and dv; tickets
    w.store_requests += steps * (d + 2) + blocks * (d + 1);
    w.store_sectors += steps * (8 * d + 2) + blocks * (16 * d + 1);
    // q, dO, k, v, dk, dv; dq in f32, and what comes back of it; lse and delta; counters
    w.memory_sectors += (2 * rows + 4 * key_heads * s) * d / 16 + (rows + heads * again) * d / 8 +
                        2 * rows / 8 + ceil((first + key_heads) / 8);
    // V, and K twice; dP' and S', dV and dK; lse and delta; dS. dQ, a quarter of the columns of 32 queries.
    // Copies; rows; dk and dv; the ticket
    w.shared_passes = pairs * (3 * left + 4 * tile + queries / 2 + queries / 4) +
                      products * 4 * (2 + d / 4 / 16) + 4 * copies + steps * 4 +
                      blocks * (warps * d + 1 + warps);
    // scale, exponent, dP - delta, P; c, twice; lse; dq; dk
    w.flops += pairs * 32 * (4 * scores + 2) + steps * (64 + queries * d) + blocks * WORK_KEYS * d;
    w.flop_instructions +=
        pairs * (3 * scores + 2) + steps * (2 + queries * d / 32) + blocks * WORK_KEYS * d / 32;
    w.special_instructions = pairs * scores;
    w.tensor_flops = pairs * 5 * 2 * own * queries * d;
    w.barriers = 2 * steps + 2 * blocks;
    return w;
}

// A block has 2 warpgroups of 64 keys, and takes 8192 numbers of Q at a time: 64 or 128 queries.
static inline Work work_of_hopper_backward(const Heads &shape, double d) {
    const double s = (double)shape.s, n = s / WORK_KEYS, heads = (double)(shape.b * shape.a);
    const double rows = heads * s, key_heads = (double)(shape.b * shape.kv), blocks = key_heads * n;
    const double sums = 8192, queries = sums / d, tiles = heads * s / queries, warps = 8, groups = 2;
    // tiles of queries that pass blocks of keys; tiles of sums that come back, to the last block that adds
    const double steps = tiles * (shape.causal ? (n + 1) / 2 : n);
    const double again = shape.causal ? tiles * (n - 1) / n : n > 1 ? tiles : 0;
    const double scores = steps * queries * WORK_KEYS / 32;  // of a lane
    const double boxes = d / 64;                             // of a tile of Q, dO, K or V
    Work w = {};
    add_row_products(&w, rows, d);
    // of the same kernel, lse
    w.load_requests += rows / 4, w.load_sectors += rows / 4, w.store_requests += rows / 4;
    w.store_sectors += rows / 4, w.memory_sectors += rows / 4;
    w.flops += rows, w.flop_instructions += rows / 4;
    // Q and dO, lse and delta; K and V; the sums
    w.load_requests += steps * (2 * boxes + 1) + blocks * 2 * boxes + again * sums / 32;
    w.load_sectors += steps * (sums / 8 + queries / 4) + blocks * 16 * d + again * sums / 8;
    // the sums; dq; turns, asked and passed on; dk and dv; tickets
    w.store_requests += (steps - tiles) * sums / 32 + tiles * sums / 64 + steps * 2 + blocks * (d + 1);
    w.store_sectors += (steps - tiles) * sums / 8 + tiles * sums / 8 + steps * 2 + blocks * (16 * d + 1);
    // q, dO, dq; k, v, dk, dv; lse and delta; the sums, both ways; counters
    w.memory_sectors += (3 * rows + 4 * key_heads * s) * d / 16 + rows / 4 + again * sums / 4 +
                        ceil((tiles + key_heads) / 8);
    // S' and dP', dV and dK, dQ
    const double products = d / 8 * (64 + queries) / 4 + queries / 8 * d / 4 + 8 * (64 + 64) / 4;
    // TMA, of rows as well; products; lse and delta; dS; dk and dv; the ticket
    w.shared_passes = steps * (2 * boxes * queries + queries / 16) + blocks * 2 * boxes * WORK_KEYS +
                      steps * (groups * products + warps * (queries / 2 + queries / 4)) +
                      blocks * (warps * d + 1 + 12);
    // scale, exponent, dP - delta, P; c; dq; dk
    w.flops += 32 * (4 * scores + steps * warps) + 2 * tiles * sums + blocks * WORK_KEYS * d;
    w.flop_instructions += 3 * scores + steps * warps + 2 * tiles * sums / 32 + blocks * WORK_KEYS * d / 32;
    w.special_instructions = scores;
    w.tensor_flops = 32 * scores * 5 * 2 * d;
    w.barriers = blocks;
    return w;
}

// The last lines of the second of them: both, without a mask.
static inline int hopper_backward_verdict(const Heads &shape, double d) {
    const Work works[] = {work_of_tensor_backward(shape, d), work_of_hopper_backward(shape, d)};
    GpuTime times[2];
    double traffic[2];
    say("%-8s %9s  %9s  %9s  %9s", "", "L2 moves", "L2, ms", "shared", "tensor");
    for (int i = 0; i < 2; i++) {
        times[i] = gpu_time(kernels_gpu(), &works[i]);
        traffic[i] = 32 * (works[i].load_sectors + works[i].store_sectors);
        say("%-8s %9s  %9.4g  %9.4g  %9.4g", i ? "wgmma" : "mma", bytes_text(traffic[i]),
            times[i].part[PART_L2] * 1e3, times[i].part[PART_SHARED] * 1e3,
            times[i].part[PART_TENSOR] * 1e3);
    }
    return report_verdict("wgmma takes %.2f of the modelled time of mma, and %.2f of its traffic to L2",
                          times[1].seconds / times[0].seconds, traffic[1] / traffic[0]);
}

#endif
