// router_replay.c: in a proof, the run on one device takes the experts that the ranks took.
//
// A choice of experts is not a sum. Where two scores of a token are almost equal, another order of sums may
// decide for another expert, and then no gradient after it can be compared. So a recorded run keeps its
// logits, and the baseline chooses by them; weights, outputs and gradients come from its own. Where its own
// logits would have chosen others, the report holds the distance of the two against the bound of the proof
// (report.h): an error of a router, which is no rounding, fails. In f64 nothing is replayed.
// Bytes sent: one reduce of the logits to rank 0 after the recorded steps (record_routing), outside of them.
// This file has no main: router.c and token_by_token.c call it.
#include <math.h>
#include <stdlib.h>

#include "expert_parallel.h"

int64_t *routing_places(const Model *m, const MicroBatch *micro, int layer, int64_t n) {
    const Config *c = &m->config;
    if (!m->routing || micro->index < 0) return NULL;
    int64_t rows = micro->b * micro->s, first = 0, samples = c->micro_batch * c->grad_acc;
    if (n < rows) sequence_rows(rows, m->mesh.tp.rank, m->mesh.tp.size, &first);
    int32_t *position = host_alloc(rows * sizeof *position);
    int64_t *place = host_alloc(n * sizeof *place);
    tensor_to_host(position, micro->positions);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = first + i, sample = micro->index * micro->b + row / micro->s;
        sample += (m->routing->step * m->mesh.dp.size + m->mesh.dp.rank) * samples;
        place[i] = ((sample * c->seq + position[row]) * c->layers + layer) * c->experts;
    }
    free(position);
    return place;
}

static bool takes(const int32_t *chosen, int64_t k, int64_t expert) {
    for (int64_t j = 0; j < k; j++)
        if (chosen[j] == expert) return true;
    return false;
}

// Of one token's logits in two runs.
static double distance(const double *own, const float *there, int64_t e) {
    double square = 0;
    for (int64_t i = 0; i < e; i++) square += (own[i] - (double)there[i]) * (own[i] - (double)there[i]);
    return sqrt(square);
}

void routing_follow(Routing *routed, double *own, const float *there, int64_t e, const int32_t *mine,
                    const int32_t *taken, int64_t k, double size) {
    bool same = true;
    double apart = distance(own, there, e) / size;
    for (int64_t i = 0; i < e; i++) {
        bool takes_it = takes(taken, k, i);
        same = same && takes_it == takes(mine, k, i);
        if (!takes_it) own[i] = -INFINITY;
    }
    routed->choices++;
    if (same) return;
    routed->ties++;
    if (!(apart <= routed->apart)) routed->apart = apart;
}

void routing_keep(Routing *r, const int64_t *place, const double *own, int64_t n, int64_t e) {
    for (int64_t i = 0; r->logits && i < n * e; i++) r->logits[place[i / e] + i % e] = (float)own[i];
    if (!r->beside) return;
    double size = difference_norm(own, n * e) / sqrt((double)n);
    for (int64_t i = 0; i < n; i++)
        r->off = fmax(r->off, distance(own + i * e, r->beside + place[i], e) / size);
}

void routing_count(const Model *m, const Routing *routed) {
    Routing *r = m->routing;
    if (!r) return;
    r->choices += routed->choices;
    r->ties += routed->ties;
    if (!(routed->apart <= r->apart)) r->apart = routed->apart;
}

// Chooses by the other run's logits, in f32 as there, and then among them by the run's own.
static void choose_as_there(const Moe *moe, const int64_t *place, MoeKept *kept, double *own, Tensor bias) {
    int64_t n = tensor_rows(kept->logits), e = tensor_columns(kept->logits),
            k = tensor_columns(kept->chosen);
    const float *followed = moe->model->routing->followed;
    double size = difference_norm(own, n * e) / sqrt((double)n);
    float *there = host_alloc(n * e * sizeof *there);
    int32_t *mine = host_alloc(2 * n * k * sizeof *mine), *taken = mine + n * k;
    Tensor logits = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(n, e)),
           weights = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(n, k)), narrow = bias,
           chosen = tensor_like(MEMORY_ACTIVATION, kept->chosen),
           left = tensor_like(MEMORY_ACTIVATION, kept->logits);
    if (tensor_exists(bias)) narrow = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(e)), op_copy(narrow, bias);
    for (int64_t i = 0; i < n * e; i++) there[i] = followed[place[i / e] + i % e];
    tensor_from_host(logits, there);
    op_route_forward(chosen, weights, logits, narrow, moe->rule);
    tensor_to_host(taken, chosen);
    tensor_to_host(mine, kept->chosen);
    kept->routed = (Routing){0};
    for (int64_t i = 0; i < n; i++)
        routing_follow(&kept->routed, own + i * e, there + i * e, e, mine + i * k, taken + i * k, k, size);
    tensor_from_doubles(left, own);
    op_route_forward(kept->chosen, kept->weights, left, (Tensor){0}, moe->rule);
    if (tensor_exists(bias)) tensor_free(&narrow);
    Tensor *const all[] = {&logits, &weights, &chosen, &left};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tensor_free(all[i]);
    free(there);
    free(mine);
}

void router_replay(const Moe *moe, const MicroBatch *micro, int layer, MoeKept *kept, Tensor bias) {
    Routing *r = moe->model->routing;
    int64_t n = tensor_rows(kept->logits), e = tensor_columns(kept->logits);
    int64_t *place = routing_places(moe->model, micro, layer, n);
    if (!place || !(r->logits || r->followed)) {
        free(place);
        return;
    }
    double *own = host_alloc(n * e * sizeof *own);
    tensor_to_doubles(own, kept->logits);
    routing_keep(r, place, own, n, e);
    if (r->followed) choose_as_there(moe, place, kept, own, bias);
    free(own);
    free(place);
}
