// token_rows.c: the rows of a mixture of experts: pairs of a token and an expert, sorted by expert, and
// back. Playbook: "Expert parallelism".
//
//     3 tokens, 4 experts, k = 2            rows, in the order of experts        place
//       token 0: experts 0, 2       ->      expert 0: rows 0 1, of tokens 0 1    token 0: 0 2
//       token 1: experts 0, 3               expert 1: none                       token 1: 1 4
//       token 2: experts 3, 2               expert 2: rows 2 3, of tokens 0 2    token 2: 5 3
//                                           expert 3: rows 4 5, of tokens 1 2
//
// With --capacity C an expert has room for ceil(C s k / e) rows of each sequence of s tokens, and takes the
// first of the sequence. (GShard places all first choices before any second one, so that a token may lose its
// second expert to a later token; here no token depends on later ones.) Pairs beyond that are dropped: their
// rows come after all others, are not computed, and count as zero. The weights of the token's other experts
// stay as they are; if all its experts drop a token, only the residual, and a shared expert, carry it on.
// Each sequence is treated by itself, so accumulation, data and expert parallelism do not change which pairs
// are dropped.
//
// Bytes sent: none. This file has no main: moe.c and the dispatches call it.
#include <math.h>
#include <stdlib.h>

#include "expert_parallel.h"

// ---- counts ----

static bool from_ledger(Ledger *ledger, int64_t *count, int64_t numbers) {
    if (!ledger->replay) return false;
    CHECK(ledger->next + numbers <= ledger->count, "the ledger of rows ends before the run that reads it");
    for (int64_t i = 0; i < numbers; i++) count[i] = ledger->number[ledger->next++];
    return true;
}

static void to_ledger(Ledger *ledger, const int64_t *count, int64_t numbers) {
    if (!ledger->keeps) return;
    ledger->number = realloc(ledger->number, (size_t)(ledger->count + numbers) * sizeof *ledger->number);
    CHECK(ledger->number, "out of host memory for %lld counts of rows", (long long)ledger->count);
    for (int64_t i = 0; i < numbers; i++) ledger->number[ledger->count++] = count[i];
}

bool moe_read_counts(Moe *moe, bool training, int64_t *count, Tensor counts) {
    int64_t numbers = tensor_count(counts);
    if (device_is_dry_run()) return from_ledger(&moe->ledger, count, numbers);
    int32_t *host = host_alloc(numbers * sizeof *host);
    tensor_to_host(host, counts);
    for (int64_t i = 0; i < numbers; i++) count[i] = host[i];
    free(host);
    if (training) to_ledger(&moe->ledger, count, numbers);
    return true;
}

void even_counts(int64_t *count, int64_t numbers, int64_t rows) {
    for (int64_t i = 0; i < numbers; i++) count[i] = rows / numbers + (i < rows % numbers);
}

int64_t sum_of_counts(const int64_t *count, int64_t numbers) {
    int64_t sum = 0;
    for (int64_t i = 0; i < numbers; i++) sum += count[i];
    return sum;
}

// ---- pairs ----

PairRows pair_rows_new(Tensor counts, Tensor chosen) {
    PairRows rows = {.tokens = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(tensor_count(chosen))),
                     .place = tensor_like(MEMORY_ACTIVATION, chosen)};
    op_route_order(rows.tokens, rows.place, counts, chosen);
    return rows;
}

void pair_rows_free(PairRows *pairs) {
    tensor_free(&pairs->tokens);
    tensor_free(&pairs->place);
}

// Rows an expert takes of a sequence of s tokens at most: ceil(capacity s k / e). What is above a whole
// number only by rounding is that number: 0.14 x 75 x 2 / 7 gives 3, where doubles make 3.0000000000000004.
static int64_t room_of(const Config *c, int64_t s) {
    double rows = config_number(c, "capacity") * (double)(s * c->top_k) / (double)c->experts;
    return (int64_t)ceil(rows * (1 - 1e-12));
}

void moe_order(Moe *moe, MoeKept *kept) {
    const Config *c = &moe->model->config;
    const Dispatch *dispatch = &moe->dispatch;
    Tensor chosen = tensor_share(kept->chosen);
    int64_t rows = tensor_count(chosen), e = c->experts, numbers = e + 1 + dispatch->more_counts;
    if (moe->capacity > 0) {
        int64_t room = room_of(c, kept->s), all = tensor_rows(chosen) / kept->s * e * room;
        tensor_free(&chosen);
        chosen = tensor_like(MEMORY_ACTIVATION, kept->chosen);
        op_route_capacity(chosen, kept->chosen, kept->s, e, room);
        rows = all < rows ? all : rows;
    }
    Tensor counts = tensor_new(MEMORY_ACTIVATION, I32, SHAPE(numbers));
    kept->pairs = pair_rows_new(tensor_view(counts, 0, SHAPE(e + 1)), chosen);
    tensor_free(&chosen);
    dispatch->count(dispatch->context, kept, tensor_view(counts, 0, SHAPE(e)),
                    tensor_view(counts, e + 1, SHAPE(dispatch->more_counts)));
    kept->own = host_alloc(numbers * sizeof *kept->own);
    if (!moe_read_counts(moe, kept->training, kept->own, counts)) even_counts(kept->own, e, rows);
    tensor_free(&counts);
    kept->pairs.real = sum_of_counts(kept->own, e);
}

// ---- tokens to rows, and back ----

Tensor pairs_gather(const PairRows *pairs, Tensor x) {
    Tensor rows = tensor_new(MEMORY_ACTIVATION, x.dtype, SHAPE(pairs->real, tensor_columns(x)));
    op_gather_rows(rows, x, tensor_view(pairs->tokens, 0, SHAPE(pairs->real)));
    return rows;
}

Tensor pairs_combine(const PairRows *pairs, Tensor z, Tensor weights) {
    Tensor y = tensor_new(MEMORY_ACTIVATION, z.dtype, SHAPE(tensor_rows(pairs->place), tensor_columns(z)));
    op_combine_forward(y, z, pairs->place, weights);
    return y;
}

Tensor pairs_gather_backward(const PairRows *pairs, Tensor drows) {
    return pairs_combine(pairs, drows, (Tensor){0});
}

Tensor pairs_combine_backward(const PairRows *pairs, Tensor dy, Tensor dweights, Tensor z, Tensor weights) {
    Tensor dz = tensor_like(MEMORY_ACTIVATION, z);
    op_combine_backward(dz, dweights, dy, z, pairs->place, weights);
    return dz;
}
