// five_d_plan.c: a plan of a run: who has what, what each rank holds and sends in a step, and how long the
// step takes on the model clock. Playbook: "5D parallelism in a nutshell".
//
// The plan is one dry step: every operation and message is counted and clocked, none is executed. The step
// that is then executed must give the same table, to the byte. With experts, routing decides how many tokens
// a rank gets; the plan deals them out evenly. Nor does it know where documents end: it clocks whole
// sequences. This file has no main.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "five_d.h"

// ---- of this rank ----

// What it stores of the model: units with elements here.
static void stored(RankPlan *row, const Config *config, Mesh mesh) {
    Trainer *t = trainer_new(config, mesh, five_d_layouts());
    const Model *m = t->model;
    row->embedding = m->params.unit[m->embedding_unit].count > 0;
    row->head = m->params.unit[m->head_unit].count > 0;
    for (int layer = 0; layer < config->layers && layer < PLAN_LAYERS; layer++)
        if (m->params.unit[m->first_block_unit + layer].count)
            row->layers[layer / PLAN_BITS] += ldexp(1, layer % PLAN_BITS);
    trainer_free(t);
}

static RankPlan row_of(Mesh mesh, const Config *config, bool dry) {
    bool was_dry = device_is_dry_run();
    device_dry_run(dry);
    // With --trust-calls a rank does not know when the others are ready: its clock runs ahead of the plan.
    bool was_checked = comm_set_check(true);
    StepCost cost = program_cost(config, mesh, five_d_layouts());
    comm_set_check(was_checked);
    const int64_t *peak = cost.memory.peak;
    RankPlan row = {.pp = mesh.pp.rank,
                    .dp = mesh.dp.rank,
                    .cp = mesh.cp.rank,
                    .tp = mesh.tp.rank,
                    .ep = mesh.ep.rank,
                    .weights = (double)peak[MEMORY_PARAMETER],
                    .gradients = (double)peak[MEMORY_GRADIENT],
                    .optimizer = (double)peak[MEMORY_OPTIMIZER],
                    .activations = (double)peak[MEMORY_ACTIVATION],
                    .step_seconds = cost.step_seconds,
                    .exposed = cost.comm.exposed_seconds};
    for (int i = 0; i < cost.counted.kinds; i++) row.sent[i] = (double)cost.counted.sent[i].bytes;
    device_dry_run(true);
    stored(&row, config, mesh);
    device_dry_run(was_dry);
    return row;
}

RankPlan *five_d_plan(Mesh mesh, const Config *config, bool dry) {
    Group world = mesh.world;
    RankPlan *plan = host_alloc((size_t)world.size * sizeof *plan);
    Config fresh = *config;  // a step is planned, whatever the run starts from
    fresh.init = fresh.resume = fresh.save = NULL;
    clock_push(dry ? "plan" : "measured");
    RankPlan mine = row_of(mesh, &fresh, dry);
    clock_pop();
    comm_values_of_all((const double *)&mine, PLAN_NUMBERS, (double *)plan, world);
    return plan;
}

// ---- printed ----

static bool has_layer(const RankPlan *row, int layer) {
    return fmod(floor(row->layers[layer / PLAN_BITS] / ldexp(1, layer % PLAN_BITS)), 2) == 1;
}

// "E 0-3", "4-7 H", "0 1 6 7"; "0 2 4 …" where there is no room for more.
static void layers_text(char text[static 64], const RankPlan *row, const Config *c) {
    int used = snprintf(text, 64, "%s", row->embedding ? "E" : "");
    int known = c->layers < PLAN_LAYERS ? (int)c->layers : PLAN_LAYERS;
    bool more = known < c->layers;
    for (int first = 0, end; first < known; first = end + 1) {
        for (end = first; end < known && has_layer(row, end);) end++;
        if (end == first) continue;
        more = more || used >= 40;
        if (used >= 40) break;
        used += snprintf(text + used, 64 - (size_t)used, end - first > 1 ? "%s%d-%d" : "%s%d",
                         used ? " " : "", first, end - 1);
    }
    if (more) used += snprintf(text + used, 64 - (size_t)used, " …");
    if (row->head) snprintf(text + used, 64 - (size_t)used, "%sH", used ? " " : "");
}

// Kinds of calls with which some rank sends bytes.
static int kinds_sent(const RankPlan *plan, int ranks, int *kind) {
    const CommCount *counts;
    int all = comm_counts(&counts), kinds = 0;
    for (int i = 0; i < all; i++) {
        double bytes = 0;
        for (int rank = 0; rank < ranks; rank++) bytes += plan[rank].sent[i];
        if (bytes > 0) kind[kinds++] = i;
    }
    return kinds;
}

void five_d_plan_print(const RankPlan *plan, Mesh mesh, const Config *c) {
    enum { LINE = 256 };
    const CommCount *counts;
    int kind[MOST_CALLS], kinds = kinds_sent(plan, mesh.world.size, kind);
    comm_counts(&counts);
    char line[LINE], layers[64];
    int used =
        snprintf(line, LINE, "  rank pp dp cp tp ep layers   weights gradients optimizer activations");
    for (int i = 0; i < kinds; i++)
        used += snprintf(line + used, LINE - (size_t)used, " %*s", (int)strlen(counts[kind[i]].name),
                         counts[kind[i]].name);
    say("%s", line);
    for (int rank = 0; rank < mesh.world.size; rank++) {
        const RankPlan *row = &plan[rank];
        layers_text(layers, row, c);
        used =
            snprintf(line, LINE, "  %4d %2.0f %2.0f %2.0f %2.0f %2.0f %-7s %8s %9s %9s %11s", rank, row->pp,
                     row->dp, row->cp, row->tp, row->ep, layers, bytes_text(row->weights),
                     bytes_text(row->gradients), bytes_text(row->optimizer), bytes_text(row->activations));
        for (int i = 0; i < kinds; i++)
            used += snprintf(line + used, LINE - (size_t)used, " %*s", (int)strlen(counts[kind[i]].name),
                             bytes_text(row->sent[kind[i]]));
        say("%s", line);
    }
    double step = 0, exposed = 0;
    for (int rank = 0; rank < mesh.world.size; rank++) {
        step = fmax(step, plan[rank].step_seconds);
        exposed = fmax(exposed, plan[rank].exposed);
    }
    say("  a step on %s: %.3f ms, of which communication exposes at most %.3f ms on a rank", c->machine,
        1e3 * step, 1e3 * exposed);
}

void five_d_plan_compare(const RankPlan *plan, const RankPlan *run, Mesh mesh, const Config *c) {
    const CommCount *counts;
    int kinds = comm_counts(&counts);
    for (int rank = 0; rank < mesh.world.size; rank++) {
        const RankPlan *p = &plan[rank], *r = &run[rank];
        const struct {
            const char *what;
            double predicted, measured;
        } row[] = {{"weights", p->weights, r->weights},
                   {"gradients", p->gradients, r->gradients},
                   {"optimizer", p->optimizer, r->optimizer},
                   {"activations", p->activations, r->activations}};
        for (int i = 0; i < (c->experts ? 3 : 4); i++) {
            char *what = format_text("rank %d: peak of %s", rank, row[i].what);
            report_equal(what, row[i].predicted, row[i].measured, "B");
            free(what);
        }
        // The model clock adds up from the start of the program, so the two round differently.
        report_that(c->experts || config_document_end(c) >= 0 ||
                        fabs(p->step_seconds - r->step_seconds) <= 1e-9 * p->step_seconds,
                    "rank %d: a step takes %.9g ms on the model clock, and by the plan %.9g ms", rank,
                    1e3 * r->step_seconds, 1e3 * p->step_seconds);
        for (int i = 0; i < kinds; i++) {
            if (!counted_in_steps(counts[i].name) || !strcmp(counts[i].name, "all_to_all")) continue;
            if (p->sent[i] == 0 && r->sent[i] == 0) continue;
            char *what = format_text("rank %d: %s, a step", rank, counts[i].name);
            report_equal(what, p->sent[i], r->sent[i], "B");
            free(what);
        }
    }
}
