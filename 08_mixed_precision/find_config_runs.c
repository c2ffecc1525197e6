// find_config_runs.c: reads tables of published runs, and predicts the time of each with the cost model.
// Playbook: "Benchmarking thousands of configurations".
//
// A table is a file of comma-separated values whose first line names the columns, as in published.csv.
// Settings that a source does not give are left empty, and assumed to be the fastest that fit into memory:
// its authors will have tuned them.
//
// A framework's name determines what it overlaps (habits_of): Megatron-LM in the days of the A100 reduces
// gradients after backward and hides no tensor parallelism; Megatron-Core and NeMo on H100 overlap both;
// FSDP gathers each layer's weights while the one before computes. This file has no main.
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "files.h"
#include "find_config.h"

// ---- comma-separated values ----

enum { MOST_COLUMNS = 128, MOST_BYTES = 1 << 24 };

typedef struct Table {
    char *text, *next;
    const char *path;
    char *name[MOST_COLUMNS], *cell[MOST_COLUMNS];
    int columns, line, lines;  // line: the row's first; lines: how many have been read
} Table;

// Splits the next row in place into cells, and returns how many. Quotes may hold commas, line breaks and
// doubled quotes.
static int next_row(Table *t, char **cell) {
    int count = 0;
    char *in = t->next, *out = in;
    if (!*in) return 0;
    t->line = ++t->lines;
    for (bool more = true; more;) {
        CHECK(count < MOST_COLUMNS, "--runs %s, line %d: more than %d columns", t->path, t->line,
              MOST_COLUMNS);
        cell[count++] = out;
        bool quoted = *in == '"';
        if (quoted) in++;
        while (*in && (quoted || (*in != ',' && *in != '\n' && *in != '\r'))) {
            if (quoted && *in == '"' && *++in != '"') quoted = false;
            else {
                t->lines += *in == '\n';
                *out++ = *in++;
            }
        }
        CHECK(!quoted, "--runs %s, line %d: a quotation mark is not closed", t->path, t->line);
        more = *in == ',';
        if (*in == '\r') in++;
        if (*in) in++;
        *out++ = '\0';
    }
    t->next = in;
    return count;
}

static const char *text_of(const Table *t, const char *column) {
    for (int i = 0; i < t->columns; i++)
        if (!strcmp(t->name[i], column)) return t->cell[i];
    fatal("--runs %s has no column %s: its first line must name the columns of published.csv", t->path,
          column);
}

// An empty cell gives `standard`. Bounded, so that products and ratios of a few stay finite.
static double number_of(const Table *t, const char *column, double standard) {
    const char *text = text_of(t, column);
    if (!*text) return standard;
    char *end;
    double number = strtod(text, &end);
    CHECK(!*end && (number == 0 || (number >= 1e-15 && number <= 1e15)),
          "--runs %s, line %d: column %s must be 0 or a number from 1e-15 to 1e15, and not \"%s\"", t->path,
          t->line, column, printable(text));
    return number;
}
static double needed(const Table *t, const char *column) {
    double number = number_of(t, column, 0);
    CHECK(number > 0, "--runs %s, line %d: column %s must be above 0", t->path, t->line, column);
    return number;
}
static int whole_of(const Table *t, const char *column, double standard, int least, int most) {
    double number = number_of(t, column, standard);
    CHECK(number >= least && number <= most && number == floor(number),
          "--runs %s, line %d: column %s must be a whole number from %d to %d, and not \"%s\"", t->path,
          t->line, column, least, most, printable(text_of(t, column)));
    return (int)number;
}
static int count_of(const Table *t, const char *column, double standard) {
    return whole_of(t, column, standard, 1, 100000000);
}

static bool has(const char *text, const char *part) { return strcasestr(text, part) != NULL; }

// ---- what a row says ----

static const struct Gpu {
    const char *name, *machine;
    double watts, node;  // bytes/s of NVLink where they are not the machine's
} gpus[] = {{"A100", "dgx-a100", 400, 0},
            {"A800", "dgx-a100", 400, 200e9},
            {"H100", "dgx-h100", 700, 0},
            {"H800", "dgx-h100", 700, 200e9},
            {"H200", "h200", 700, 0}};

static const struct Gpu *gpu_of(const Table *t) {
    const char *name = text_of(t, "gpu");
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++)
        if (!strcmp(name, gpus[i].name)) return &gpus[i];
    fatal("--runs %s, line %d: GPU %s is not known; there are A100, A800, H100, H800, H200", t->path,
          t->line, printable(name));
}

// "HBM2e 2.4TB/s": bytes/s.
static double memory_of(const char *text, double standard) {
    const char *unit = strstr(text, "TB/s");
    while (unit && unit > text && (isdigit((unsigned char)unit[-1]) || unit[-1] == '.')) unit--;
    double number = unit ? strtod(unit, NULL) : 0;
    return number > 0 ? number * 1e12 : standard;
}

// "(4 links stated)": a link of NVLink 3 or 4 carries 25 GB/s each way.
static double node_of(const char *text, double standard) {
    const char *links = strstr(text, " links");
    while (links && links > text && isdigit((unsigned char)links[-1])) links--;
    double number = links ? strtod(links, NULL) : 0;
    return number > 0 ? 25e9 * number : standard;
}

// "…; 500W cap": the first number that a W follows.
static double watts_of(const char *text, double standard) {
    for (const char *c = text; *c; c++)
        if (isdigit((unsigned char)*c) && (c == text || !isdigit((unsigned char)c[-1]))) {
            char *end;
            double number = strtod(c, &end);
            if (*end == 'W' && number > 0) return number;
        }
    return standard;
}

static CostModel model_of(const Table *t) {
    CostModel m = {.layers = count_of(t, "layers", 0),
                   .hidden = count_of(t, "hidden", 0),
                   .heads = count_of(t, "heads", 0),
                   .kv_heads = count_of(t, "kv_heads", 0),
                   .head_size = count_of(t, "head_dim", 0),
                   .ffn = count_of(t, "ffn", 0),
                   .matrices = whole_of(t, "ffn_mats", 3, 2, 3),
                   .vocab = count_of(t, "vocab", 0),
                   .seq = count_of(t, "seq", 0),
                   .experts = number_of(t, "experts", 0),
                   .top_k = number_of(t, "topk", 0),
                   .shared = number_of(t, "shared_experts", 0),
                   .expert_ffn = number_of(t, "expert_ffn", 0),
                   .dense_layers = number_of(t, "dense_layers", 0)};
    const char *latent = text_of(t, "attn_type");
    if (has(latent, "MLA"))
        CHECK(sscanf(latent, "MLA(q_lora%lf,kv_lora%lf,rope%lf)", &m.q_rank, &m.kv_rank, &m.rope_size) == 3,
              "--runs %s, line %d: attn_type must read MLA(q_lora1536,kv_lora512,rope64), not %s", t->path,
              t->line, printable(latent));
    return m;
}

// Zero-bubble schedules leave part of 1F1B's bubble: ZB-H1 about a third with the same memory; ZB-H2 none
// with twice the activations; ZB-V none with the same. DualPipe is assumed to leave a third.
static double bubble_of(const char *schedule) {
    if (has(schedule, "ZB-2p") || has(schedule, "ZB-H2") || has(schedule, "ZB-V")) return 0;
    return has(schedule, "ZB-1p") || has(schedule, "ZB-H1") || has(schedule, "DualPipe") ? 1.0 / 3 : 1;
}

// With a delayed scale the kernel that computes a tensor can write it in 8 bits; with a current scale the
// largest element must be found first, which a compiler fuses with that kernel.
static double cast_bytes_of(bool delayed_scale, bool compiled) {
    return delayed_scale ? 1 : compiled ? 3 : 5;
}

static CostHabits habits_of(const Table *t, bool hopper, bool half_gradients, int zero) {
    const char *framework = text_of(t, "framework"), *detail = text_of(t, "precision_detail"),
               *schedule = text_of(t, "schedule");
    bool flash = !has(text_of(t, "flash_attn"), "no");
    bool old = !hopper && !flash;
    bool core = hopper && (has(framework, "Megatron") || has(framework, "NeMo"));
    bool nanotron = has(framework, "nanotron");
    bool async = has(detail, "async TP") || has(schedule, "async TP");
    return (CostHabits){
        .hides_tp = core || async,
        .hides_dp = zero >= 2 || (!old && !nanotron),
        .hides_pp = !old,
        .hides_ep = has(schedule, "DualPipe"),
        .attention_slow = hopper && !core ? 1.5 : 1,
        .bubble = bubble_of(schedule),
        .flash = flash,
        .gradient_bytes = half_gradients ? 2 : 4,
        .cast_bytes = cast_bytes_of(core || has(detail, "delayed"), has(framework, "compile")),
        .one_ring = !hopper && zero >= 3 && has(framework, "DeepSpeed"),
        .attention_again = flash ? 2.5 : 2};
}

static void recompute_of(const Table *t, Published *r) {
    const char *how = text_of(t, "recompute"), *detail = text_of(t, "recompute_detail");
    r->open_recompute = !*how;
    if (has(how, "full")) r->layout.recompute = RECOMPUTE_FULL;
    if (has(how, "selective")) r->layout.recompute = RECOMPUTE_SELECTIVE;
    if (has(detail, "per op")) r->layout.again = 0.5;  // every second multiply is kept
    if (has(how, "modules") || has(how, "part")) r->layout.again = has(detail, "mlp") ? 0.9 : 0.3;
}

// Another word, as one with a capital letter, would be taken for none.
static void one_of(const Table *t, const char *column, const char *words) {
    CHECK(!*text_of(t, column) || word_among(words, text_of(t, column)),
          "--runs %s, line %d: column %s must be one of %s, and not \"%s\"", t->path, t->line, column,
          words, printable(text_of(t, column)));
}

static CostLayout layout_of(const Table *t) {
    int tp = count_of(t, "tp", 1);
    return (CostLayout){.tp = tp,
                        .cp = count_of(t, "cp", 1),
                        .pp = count_of(t, "pp", 1),
                        .dp = count_of(t, "dp", 0),
                        .ep = count_of(t, "ep", 1),
                        .etp = count_of(t, "etp", 1),
                        .sp = tp > 1 && has(text_of(t, "sp"), "yes"),
                        .fp8 = has(text_of(t, "precision"), "fp8"),
                        .gather_fp8 = has(text_of(t, "precision_detail"), "fp8 all-gather"),
                        .zero = whole_of(t, "zero", 1, 0, 3),
                        .chunks = count_of(t, "vpp", 1),
                        .micro_batch = count_of(t, "mbs", 1)};
}

static void check_run(const Table *t, const Published *r) {
    const CostLayout *l = &r->layout;
    double ranks = (double)l->tp * l->cp * l->pp * l->dp;
    int64_t shared = l->dp * l->micro_batch, experts = (int64_t)l->ep * l->etp;
    CHECK(ranks == r->cluster.gpus, "--runs %s, line %d: tp x cp x pp x dp is %.0f, and n_gpus is %d",
          t->path, t->line, ranks, r->cluster.gpus);
    CHECK(r->sequences % shared == 0, "--runs %s, line %d: dp x mbs, %lld, does not divide gbs %lld",
          t->path, t->line, (long long)shared, (long long)r->sequences);
    CHECK((int64_t)l->dp * l->cp * l->tp % experts == 0,
          "--runs %s, line %d: ep x etp, %lld, does not divide dp x cp x tp", t->path, t->line,
          (long long)experts);
    CHECK((int64_t)l->pp * l->chunks <= r->model.layers,
          "--runs %s, line %d: pp x vpp is %lld, more than layers %.0f", t->path, t->line,
          (long long)l->pp * l->chunks, r->model.layers);
    const CostModel *m = &r->model;
    CHECK(fmod(m->heads, m->kv_heads) == 0, "--runs %s, line %d: kv_heads %.0f does not divide heads %.0f",
          t->path, t->line, m->kv_heads, m->heads);
    CHECK(m->top_k <= m->experts || m->experts == 0,
          "--runs %s, line %d: topk %.0f is more than experts %.0f", t->path, t->line, m->top_k,
          m->experts);
    CHECK(m->dense_layers <= m->layers, "--runs %s, line %d: dense_layers %.0f is more than layers %.0f",
          t->path, t->line, m->dense_layers, m->layers);
    CHECK(!(m->experts > 0) || (m->top_k > 0 && m->expert_ffn > 0),
          "--runs %s, line %d: experts %.0f, without topk and expert_ffn", t->path, t->line, m->experts);
}

static void copy_text(char *to, size_t size, const char *from) {
    snprintf(to, size, "%s", printable(from));
}

static Published run_of(const Table *t) {
    const struct Gpu *gpu = gpu_of(t);
    one_of(t, "precision", "bf16 fp16 fp8");
    one_of(t, "recompute", "none selective full modules");
    one_of(t, "sp", "yes no");
    Published r = {.model = model_of(t), .layout = layout_of(t), .machine = *machine_find(gpu->machine)};
    bool hopper = gpu->watts > 400, half = !strcmp(text_of(t, "precision"), "fp16");
    r.habits = habits_of(t, hopper, half, r.layout.zero);
    copy_text(r.id, sizeof r.id, text_of(t, "id"));
    copy_text(r.kind, sizeof r.kind, text_of(t, "kind"));
    copy_text(r.series, sizeof r.series, text_of(t, "series"));
    copy_text(r.framework, sizeof r.framework, text_of(t, "framework"));
    copy_text(r.gpu, sizeof r.gpu, gpu->name);
    r.cluster = (Cluster){count_of(t, "n_gpus", 0), count_of(t, "gpus_per_node", 8),
                          number_of(t, "inter_gbps_per_gpu", 0) * 1e9 / 8};
    r.power = watts_of(text_of(t, "intra_link"), gpu->watts) / gpu->watts;
    r.peak = machine_peak_flops(&r.machine, BF16);
    double node = gpu->node > 0 ? gpu->node : r.machine.node_bytes_per_second;
    r.machine.node_bytes_per_second = node_of(text_of(t, "intra_link"), node);
    double standard = r.machine.memory_bytes_per_second;
    r.machine.memory_bytes_per_second = memory_of(text_of(t, "intra_link"), standard);
    r.memory = number_of(t, "gpu_mem_gb", 80) * 1e9;
    r.sequences = count_of(t, "gbs", 0);
    double tokens = (double)r.sequences * r.model.seq / r.cluster.gpus;
    r.seconds = number_of(t, "step_s", 0);
    if (r.seconds == 0) r.seconds = tokens / needed(t, "tok_s_gpu");
    r.open_micro_batch = !*text_of(t, "mbs");
    const char *schedule = text_of(t, "schedule");
    r.open_chunks = !*text_of(t, "vpp") && r.layout.pp > 1 &&
                    (!*schedule || has(schedule, "interleav") || has(schedule, "vpp"));
    recompute_of(t, &r);
    check_run(t, &r);
    return r;
}

Runs runs_read(const char *path) {
    Table t = {.path = path};
    size_t size;
    const char *fault = input_text(path, MOST_BYTES, &t.text, &size);
    CHECK(!fault, "--runs %s: %s", path, fault);
    t.next = t.text + (strncmp(t.text, "\xef\xbb\xbf", 3) ? 0 : 3);  // a table program's mark of UTF-8
    t.columns = next_row(&t, t.name);
    const char *twice = name_twice(t.name, t.columns);
    CHECK(!twice, "--runs %s: column %s stands there twice", path, printable(twice));
    Runs runs = {NULL, 0};
    for (int cells; (cells = next_row(&t, t.cell)) > 0;) {
        if (cells == 1 && !*t.cell[0]) continue;  // an empty line
        CHECK(cells == t.columns, "--runs %s, line %d: cells: %d; columns that the first line names: %d",
              path, t.line, cells, t.columns);
        runs.run = realloc(runs.run, (size_t)(runs.count + 1) * sizeof *runs.run);
        CHECK(runs.run, "out of host memory for the runs of %s", path);
        const Published run = run_of(&t);
        for (int i = 0; i < runs.count; i++)
            CHECK(strcmp(runs.run[i].id, run.id), "--runs %s, line %d: id %s stands there twice", path,
                  t.line, run.id);
        runs.run[runs.count++] = run;
    }
    CHECK(runs.count > 0, "--runs %s: no row follows the names of the columns", path);
    free(t.text);
    return runs;
}

// ---- what the cost model says of a run ----

// How many blocks are missing to fill p v chunks: at most two, whose places embedding and head take.
static double chunk_slack(const Published *r, int chunks) {
    double stages = r->layout.pp * chunks;
    return ceil(r->model.layers / stages) * stages - r->model.layers;
}

// The candidates for settings that are not given: micro-batches of 1 to 64, all recomputations, all chunks
// that divide.
CostTime run_predict(Published *r, const Factors *factors) {
    CostTable table = cost_table(&r->machine, factors, r->power);
    CostTime best = {.step = INFINITY};
    CostLayout chosen = r->layout, l = r->layout;
    int64_t own = r->sequences / l.dp;
    Cluster cluster = r->cluster;
    cluster.network = r->cluster.network * factors->value[FACTOR_LINKS];
    double least = INFINITY;
    for (int64_t b = r->open_micro_batch ? 1 : l.micro_batch;
         b <= (r->open_micro_batch ? 64 : l.micro_batch); b *= 2) {
        if (own % b) break;
        l.micro_batch = b, l.micro_batches = own / b;
        for (int v = r->open_chunks ? 1 : l.chunks; v <= (r->open_chunks ? 8 : r->layout.chunks); v++) {
            if (v > 1 && r->open_chunks && (l.micro_batches % l.pp || chunk_slack(r, v) > 2)) continue;
            l.chunks = v;
            for (int how = r->open_recompute ? RECOMPUTE_NONE : (int)l.recompute;
                 how <= (r->open_recompute ? RECOMPUTE_FULL : (int)r->layout.recompute); how++) {
                l.recompute = (Recompute)how;
                double bytes = cost_memory(&r->model, &l, &r->habits);
                CostTime time =
                    cost_time(&r->model, &l, &cluster, &table, &r->habits, factors->value[FACTOR_HIDDEN]);
                // If nothing fits, what needs the least memory.
                bool fits = bytes <= 1.15 * r->memory,
                     better = fits ? time.step < best.step || least > 1.15 * r->memory
                                   : bytes < least && least > 1.15 * r->memory;
                if (better) best = time, chosen = l, least = bytes;
                if (fits) least = fmin(least, 1.15 * r->memory);
            }
            l.recompute = r->layout.recompute;
        }
    }
    CHECK(isfinite(best.step), "--runs: run %s has no micro-batch that divides its batch", r->id);
    r->layout.micro_batches = chosen.micro_batches;
    if (r->open_micro_batch || r->open_chunks || r->open_recompute) r->layout = chosen;
    return best;
}
