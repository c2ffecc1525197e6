// bench_attention.c: attention with stored scores compared with attention without them (flash) on one device,
// forward and backward: time and bytes. `make bench` runs it.
//
// The two take turns, in order and then in reverse order, and the medians of the pairs are printed. Bytes
// are the most that an attention adds to the account besides q, k, v, o and their gradients: probs if
// scores are stored, lse and dots in flash. A kernel's scratch is not included: on the CPU both copy keys
// and values, and keep some scores for each thread.
//     bench <name> <value> <unit>   quartiles <low> <high>
#include <math.h>
#include <stdlib.h>

#include "figures.h"
#include "tensor/clock.h"
#include "tensor/ops.h"
#include "tensor/rng.h"

enum { HEADS = 6, HEAD_SIZE = 64 };

static const double LIMIT = 1;  // seconds

typedef struct Bench {
    AttentionShape at;
    AttentionHeads heads;
    AttentionPositions positions;
    AttentionMask mask;
    Tensor q, k, v, o, d_o, dq, dk, dv;  // (s, h)
} Bench;

static Tensor random_tensor(int64_t rows, int64_t columns, uint64_t key) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(rows, columns));
    double *x = host_alloc((size_t)(rows * columns) * sizeof *x);
    for (int64_t i = 0; i < rows * columns; i++) x[i] = rng_normal(key, RNG_TEST, (uint64_t)i);
    tensor_from_doubles(t, x);
    free(x);
    return t;
}

static void bench_start(Bench *it, int64_t s) {
    *it = (Bench){.at = {1, s, HEADS, HEADS, HEAD_SIZE}, .heads = {HEADS, HEADS, HEAD_SIZE}};
    Tensor *const all[] = {&it->q, &it->k, &it->v, &it->o, &it->d_o, &it->dq, &it->dk, &it->dv};
    for (int i = 0; i < 8; i++) *all[i] = random_tensor(s, HEADS * HEAD_SIZE, (uint64_t)i);
    it->positions = attention_positions_whole(1, s);  // all layers share them
    it->mask = attention_mask(&it->positions, &it->positions);
}

static void bench_free(Bench *it) {
    Tensor *const all[] = {&it->q, &it->k, &it->v, &it->o, &it->d_o, &it->dq, &it->dk, &it->dv};
    for (int i = 0; i < 8; i++) tensor_free(all[i]);
    attention_positions_free(&it->positions);
}

// Both return the seconds of forward [0] and backward [1].
static void stored_scores(Bench *it, double *seconds) {
    int64_t s = it->at.s;
    double start = wall_seconds();
    Tensor probs = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(1, HEADS, s, s));
    op_attention_forward(it->o, probs, it->q, it->k, it->v, it->at);
    op_sum(tensor_rows_of(it->o, 0, 1));  // waits for the device
    double middle = wall_seconds();
    op_attention_backward(it->dq, it->dk, it->dv, it->d_o, it->q, it->k, it->v, probs, it->at);
    op_sum(tensor_rows_of(it->dq, 0, 1));
    tensor_free(&probs);
    seconds[0] = middle - start;
    seconds[1] = wall_seconds() - middle;
}

static void flash(Bench *it, double *seconds) {
    double start = wall_seconds();
    Tensor lse = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(it->at.s, HEADS));
    op_fill(it->o, 0);
    op_fill(lse, -INFINITY);
    op_attention_chunk_forward(it->o, lse, it->q, it->k, it->v, &it->mask, it->heads);
    op_sum(tensor_rows_of(it->o, 0, 1));
    double middle = wall_seconds();
    Tensor dots = tensor_like(MEMORY_ACTIVATION, lse);
    op_fill(it->dq, 0);
    op_fill(it->dk, 0);
    op_fill(it->dv, 0);
    op_attention_chunk_dots(dots, it->o, it->d_o, it->heads);
    op_attention_chunk_backward(it->dq, it->dk, it->dv, it->d_o, it->q, it->k, it->v, lse, dots, &it->mask,
                                it->heads);
    op_sum(tensor_rows_of(it->dq, 0, 1));
    seconds[0] = middle - start;
    seconds[1] = wall_seconds() - middle;
    tensor_free(&dots);
    tensor_free(&lse);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    static void (*const way[])(Bench *, double *) = {stored_scores, flash};
    static const char *const name[] = {"stored-scores", "flash"}, *const pass[] = {"forward", "backward"};
    static const int64_t lengths[] = {256, 1024, 4096};
    for (int length = 0; length < 3; length++) {
        const int64_t s = lengths[length];
        Bench it;
        bench_start(&it, s);
        double peak[2], warm[2];
        for (int w = 0; w < 2; w++) {
            const int64_t before = memory_account().now_total;
            memory_reset_peak();
            way[w](&it, warm);
            peak[w] = (double)(memory_account().peak_total - before);
        }
        double seconds[2][2][MOST_PAIRS], ratio[2][MOST_PAIRS];
        int pairs = 0;
        const double start = wall_seconds();
        for (bool more = true; more; pairs++) {
            double took[2][2];
            for (int turn = 0; turn < 2; turn++) {
                int w = pairs % 2 ? 1 - turn : turn;
                way[w](&it, took[w]);
            }
            more = false;
            for (int p = 0; p < 2; p++) {
                for (int w = 0; w < 2; w++) seconds[w][p][pairs] = took[w][p];
                ratio[p][pairs] = took[1][p] / took[0][p];
                more |= !measured(ratio[p], pairs + 1, wall_seconds() - start, LIMIT);
            }
        }
        for (int p = 0; p < 2; p++) {
            double flops = (p ? 8.0 : 4.0) * HEADS * HEAD_SIZE * (double)s * (double)(s + 1) / 2;
            for (int w = 0; w < 2; w++) {
                double took = median(seconds[w][p], pairs);
                say("bench attention-%s-%s-s%lld %.4g ms (%.3g GFLOP/s)", name[w], pass[p], (long long)s,
                    took * 1e3, flops / took / 1e9);
            }
            double middle = median(ratio[p], pairs);  // leaves them sorted
            say("bench attention-flash-%s-s%lld %.4g of-stored-scores' time   quartiles %.4g %.4g", pass[p],
                (long long)s, middle, ratio[p][pairs / 4], ratio[p][pairs - 1 - pairs / 4]);
        }
        for (int w = 0; w < 2; w++)
            say("bench attention-%s-peak-s%lld %s", name[w], (long long)s, bytes_text(peak[w]));
        bench_free(&it);
    }
    return 0;
}
