// sequence_tables.c: sequence parallelism beside tensor parallelism alone: what a block sends, the shapes of
// its tensors, and what it keeps. Playbook: "Sequence Parallelism", its table of shapes; Korthikanti et al.
// 2022.
//
// Bytes sent: the two halves of each all-reduce, and half as many again in backward, where W gathers.
// Memory per rank: the last table has GPT's formulas, in s b h bytes of a block, and this book's. All are dry
// runs. This file has no main: sequence_parallel prints the tables.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "00_single_gpu/formulas.h"
#include "tensor_parallel.h"

// ---- calls and bytes of a block ----

static Config layout_of(const Config *config, bool sp) {
    Config c = *config;
    c.recompute = RECOMPUTE_NONE;
    config_set(&c, "sp", sp);
    config_set(&c, "async-tp", 0);  // its messages are not what is compared, nor
    config_set(&c, "zero", 0);      // ZeRO's collectives
    return c;
}

static void compare_calls(Mesh mesh, const Config *config) {
    Config without = layout_of(config, false), with = layout_of(config, true);
    BlockCost tp = program_block_cost(&without, mesh, tensor_layouts),
              sp = program_block_cost(&with, mesh, tensor_layouts);
    say("\nOne block and micro-batch, tp %d, beside tensor parallelism without sequence parallelism:\n",
        mesh.tp.size);
    for (int pass = FORWARD; pass <= BACKWARD; pass++) {
        Sends alone = tp.pass[pass], both = sp.pass[pass];
        const char *name = pass == FORWARD ? "forward" : "backward";
        bool again = pass == BACKWARD;  // W's all-gathers
        double calls = mesh.tp.size > 1 ? 2 : 0;
        const struct {
            const char *what;
            double predicted, measured;
            const char *unit;
        } row[] = {
            {"all-gathers", again ? 2 * calls : calls, both.all_gather.calls, ""},
            {"reduce-scatters", calls, both.reduce_scatter.calls, ""},
            {"all-reduces", 0, both.all_reduce.calls, ""},
            {again ? "bytes, W gathers too" : "bytes of both", alone.all_reduce.bytes * (again ? 1.5 : 1),
             both.all_gather.bytes + both.reduce_scatter.bytes, "B"}};
        for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
            char *what = format_text("%s, %s", name, row[i].what);
            report_equal(what, row[i].predicted, row[i].measured, row[i].unit);
            free(what);
        }
    }
}

// ---- the playbook's table of shapes, read from the tensors of rank 0 ----

enum { STOPS = 8 };
static const char *const stop_name[STOPS] = {"embedding: table", "embedding: out", "SP region: norm",
                                             "enter TP: in",     "column: Wgate",  "TP region: act",
                                             "row: Wdown",       "exit TP: out"};

typedef struct Shapes {
    char stop[STOPS][48];
    int64_t largest;  // elements of the largest tensor of (part of) width h that a block keeps; f is wider
} Shapes;

// The call made since the last clock_reset, or nothing.
static const char *call_made(void) {
    const CommCount *counts;
    int kinds = comm_counts(&counts);
    for (int i = 0; i < kinds; i++)
        if (counts[i].calls > 0) return counts[i].name;
    return "";
}

// Notes the shape of a tensor at a stop, which by the playbook's table is (rows, columns).
static void at(Shapes *s, int stop, Tensor t, int64_t rows, int64_t columns) {
    report_that(tensor_rows(t) == rows && tensor_columns(t) == columns,
                "%s is (%lld, %lld), by the playbook's table (%lld, %lld)", stop_name[stop],
                (long long)tensor_rows(t), (long long)tensor_columns(t), (long long)rows,
                (long long)columns);
    snprintf(s->stop[stop], sizeof s->stop[stop], "(%lld, %lld) %s", (long long)tensor_rows(t),
             (long long)tensor_columns(t), call_made());
    clock_reset();
}

// One block's forward, stop by stop.
static Shapes shapes_of(const Config *config, Mesh mesh) {
    Shapes s = {.largest = 0};
    Trainer *t = trainer_new(config, mesh, tensor_layouts);
    Model *m = t->model;
    Sockets *sockets = &m->sockets;
    Batch batch = batch_new(t, 0);
    MicroBatch micro = micro_batch_new(m, 0, config->micro_batch, batch.tokens, batch.targets, 1);
    int64_t n = config->micro_batch * config->seq, h = config->hidden, f = config->ffn / config->tp, first;
    bool sp = config_number(config, "sp");
    int64_t rows = sp ? sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) : n;

    Tensor table = param_value(&m->params, m->embedding);
    clock_reset();
    at(&s, 0, table, tensor_rows(table), h);
    chunk_forward(m, &micro, (Chunk){0, 0, true, false});
    at(&s, 1, micro.x, rows, h);
    chunk_forward(m, &micro, (Chunk){0, 1, false, false});
    const BlockKept *kept = micro.block[0];
    clock_reset();
    at(&s, 2, kept->norm2, rows, h);
    Tensor inside = sockets->region.enter(sockets->region.context, &micro, kept->norm2);
    at(&s, 3, inside, n, h);
    at(&s, 4, param_value(&m->params, m->block[0].gate), f, h);
    at(&s, 5, kept->mlp.act, n, f);
    at(&s, 6, param_value(&m->params, m->block[0].down), h, f);
    void *keep = NULL;
    Tensor partial = tensor_new(MEMORY_ACTIVATION, inside.dtype, SHAPE(n, h));
    sockets->linear.forward(sockets->linear.context, m, 1, &m->block[0].down, &partial, kept->mlp.act,
                            &keep);
    Tensor y = sockets->region.leave(sockets->region.context, &micro, partial);
    at(&s, 7, y, rows, h);
    const Tensor wide[] = {kept->x, kept->norm1, kept->q, kept->o, kept->x2, kept->norm2};
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (tensor_count(wide[i]) > s.largest) s.largest = tensor_count(wide[i]);

    Tensor *const made[] = {&inside, &partial, &y};
    for (int i = 0; i < 3; i++) tensor_free(made[i]);
    micro_batch_free(m, &micro);
    batch_free(&batch);
    trainer_free(t);
    return s;
}

static void print_shapes(Mesh mesh, const Config *config) {
    Config without = layout_of(config, false), with = layout_of(config, true);
    Shapes tp = shapes_of(&without, mesh), sp = shapes_of(&with, mesh);
    int64_t n = config->micro_batch * config->seq, h = config->hidden, size = mesh.tp.size, first;
    say("\nShapes on rank 0 in forward, for (b s, h) = (%lld, %lld) and f = %lld:\n", (long long)n,
        (long long)h, (long long)config->ffn);
    say("  %-24s %-26s %s\n", "", "TP only", "TP with SP");
    for (int i = 0; i < STOPS; i++) say("  %-24s %-26s %s\n", stop_name[i], tp.stop[i], sp.stop[i]);
    say("  %-24s %-26lld %lld\n", "largest kept, of width h", (long long)tp.largest, (long long)sp.largest);
    int64_t own = sequence_rows(n, mesh.tp.rank, mesh.tp.size, &first) * h;
    int64_t share = n * config->heads * config_head_size(config) / size;  // of q and o, usually h wide
    report_equal("kept with TP only: b s h", (double)(n * h > share ? n * h : share), (double)tp.largest,
                 "");
    report_equal("kept with SP: ceil(b s / tp) h", (double)(own > share ? own : share), (double)sp.largest,
                 "");
}

// ---- activations that a block keeps: Llama 3 8B's shape, 16 bits ----

static void compare_memory(Mesh mesh) {
    int tp = mesh.tp.size;
    if (32 % tp || 14336 % tp) return;
    Config c = config_of_model("llama-3-8b", "layers=2 vocab=1024 seq=2048 micro-batch=1 dtype=bf16");
    double sbh = (double)(c.micro_batch * c.seq * c.hidden),
           as_h = 5.0 * (double)(c.heads * c.seq) / (double)c.hidden;
    const struct {
        const char *name, *formula;
        int64_t tp;
        bool sp;
        double gpt;  // of the playbook's block
    } row[] = {{"one device", "34 + 5 a s / h", 1, false, 34 + as_h},
               {"TP", "10 + 24 / t + 5 a s / (h t)", tp, false, 10 + (24 + as_h) / tp},
               {"TP with SP", "34 / t + 5 a s / (h t)", tp, true, (34 + as_h) / tp}};
    double kept[3], predicted[3];
    say("\nWhat a block of Llama 3 8B keeps for backward, bf16, s = 2,048, t = %d, in s b h bytes:\n", tp);
    say("  %-12s %12s %14s   %s\n", "", "this book's", "GPT's block",
        "GPT's formula (Korthikanti et al. 2022)");
    for (int i = 0; i < 3; i++) {
        Config here = layout_of(&c, row[i].sp);
        here.tp = row[i].tp;
        MemoryPlan plan = {
            .model = here, .tp = here.tp, .dp = 1, .sp = row[i].sp, .whole_vocabulary = true};
        kept[i] = program_block_cost(&here, i ? mesh : mesh_single(), tensor_layouts).kept;
        predicted[i] = memory_block_activations(&plan);
        plan.gpt = true;
        plan.model.kv_heads = plan.model.heads;
        plan.model.ffn = 4 * c.hidden;
        double gpt = memory_block_activations(&plan) / sbh;
        say("  %-12s %12.3f %14.3f   %s\n", row[i].name, kept[i] / sbh, gpt, row[i].formula);
        report_that(fabs(gpt / row[i].gpt - 1) < 1e-12, "GPT's block: %s is %.6f, and here %.6f",
                    row[i].formula, row[i].gpt, gpt);
    }
    for (int i = 0; i < 3; i++) {
        char *what = format_text("this book's, %s", row[i].name);
        report_equal(what, predicted[i], kept[i], "B");
        free(what);
    }
}

void sequence_tables(Mesh mesh, const Config *config) {
    device_dry_run(true);
    compare_calls(mesh, config);
    print_shapes(mesh, config);
    compare_memory(mesh);
    device_dry_run(false);
}
