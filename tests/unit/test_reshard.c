// test_reshard.c [--ranks N] [PATTERN]: a run that was saved in one layout continues in any other, and on
// one device, as if it had not been interrupted: with the same bits in the same layout, and with another
// order of sums in another one. TAP.
//
// Every layout trains four steps and saves after two and four. From each one's second step, one device
// continues; and every layout continues from that of one device, of ZeRO-3, and of sequence parallelism.
#include <math.h>
#include <unistd.h>

#include "03_tensor_parallel/tensor_parallel.h"
#include "ranks.h"
#include "train/safetensors.h"

// ---- layouts ----

typedef struct Layout {
    const char *name;
    int dp, tp;  // 0: one device
    int zero;
    bool sp, vocab_parallel;
    Mesh mesh;
} Layout;

enum { MAX_LAYOUTS = 12 };

// Fewer than ranks if there are more than three ranks, so that some store copies.
static int heads_of_keys(void) { return n % 3 ? 2 : 3; }

static bool is_slow(void) {
#ifdef __SANITIZE_ADDRESS__
    return true;  // a layer and one source are enough to access everything that is ever accessed
#else
    return false;
#endif
}

// The layouts from whose checkpoints all continue.
static bool is_source(const Layout *l) { return l->dp == 0 || l->zero == 3 || (l->sp && l->dp == 1); }

// The same in the same order on all ranks; returns how many.
static int layouts(Layout *layout) {
    const int kv = heads_of_keys(), degree = n % kv ? 1 : kv;
    const Layout all[] = {
        {.name = "one device"},
        {.name = "DDP", .dp = n, .tp = 1},
        {.name = "ZeRO-1", .dp = n, .tp = 1, .zero = 1},
        {.name = "ZeRO-2", .dp = n, .tp = 1, .zero = 2},
        {.name = "ZeRO-3", .dp = n, .tp = 1, .zero = 3},
        {.name = "tensor parallel", .dp = 1, .tp = n},
        {.name = "sequence and vocabulary", .dp = 1, .tp = n, .sp = true, .vocab_parallel = true},
        {.name = "ZeRO-3 x tp, all sharded",
         .dp = n / degree,
         .tp = degree,
         .zero = 3,
         .sp = true,
         .vocab_parallel = true},
        {.name = "dp x tp, vocabulary", .dp = n / degree, .tp = degree, .vocab_parallel = true},
    };
    int count = sizeof all / sizeof *all;
    for (int i = 0; i < count; i++) {
        layout[i] = all[i];
        layout[i].mesh =
            all[i].dp ? mesh_new((MeshShape){.dp = all[i].dp, .tp = all[i].tp}) : mesh_single();
    }
    return count;
}

// ---- runs ----

static char *folder;

// Of one device, each rank has its own; rank 0's is as good as the others'.
static char *folder_of(const Layout *l, int rank) {
    return l->dp ? format_text("%s/%s", folder, l->name) : format_text("%s/%s %d", folder, l->name, rank);
}

// Two samples a rank in a step, however they are distributed. No number of ranks divides the vocabulary's
// 257 rows.
static Config config_of(const Layout *l, const char *more) {
    char *text = format_text(
        "layers=%d hidden=48 heads=24 kv-heads=%d ffn=48 vocab=257 seq=12 micro-batch=1 steps=4 lr=3e-3 "
        "warmup=2 %s",
        is_slow() || n > 4 ? 1 : 2, heads_of_keys(), more);
    Config c = config_default(text);
    free(text);
    int dp = l->dp ? l->dp : 1;
    c.grad_acc = 2 * n / dp;
    c.dp = dp;
    c.tp = l->dp ? l->tp : 1;
    config_set(&c, "zero", l->zero);
    config_set(&c, "sp", l->sp);
    config_set(&c, "vocab-parallel", l->vocab_parallel);
    return c;
}

static Record run(const Layout *l, const Config *config, const char *save, const char *resume) {
    Config c = *config;
    c.save = save;
    c.save_every = save ? 2 : 0;
    c.resume = resume;
    return program_record(&c, l->mesh, l->dp ? tensor_layouts : NULL, false, false, l->name);
}

// Four steps straight, saved after two and four.
static Record straight(const Layout *l, const Config *c) {
    char *dir = folder_of(l, me), *command = format_text("rm -rf '%s'", dir);
    // An earlier test's checkpoint there belongs to another run.
    if ((me == 0 || !l->dp) && system(command) != 0) note("%s stays", dir);
    comm_wait(comm_barrier(comm_world()));
    free(command);
    Record record = run(l, c, dir, NULL);
    free(dir);
    return record;
}

// The last two steps, from what `from` saved after two.
static Record resumed(const Layout *l, const Config *c, const Layout *from) {
    char *dir = folder_of(from, 0), *half = format_text("%s/step-000002", dir);
    comm_wait(comm_barrier(world));
    Record record = run(l, c, NULL, half);
    free(dir);
    free(half);
    return record;
}

// Losses and norms of x's steps must equal those of y from step `skip` on, and so must the last parameters;
// within a bound, or to the last bit if it is 0.
static void expect_same(const char *what, const Record *x, const Record *y, int64_t skip, double bound) {
    SAME(x->steps, y->steps - skip);
    double worst = 0;
    const char *where = "";
    for (int i = -2; i < x->tensors; i++) {
        const double *a = i == -2 ? x->loss : i == -1 ? x->grad_norm : x->param[i];
        const double *b = i == -2 ? y->loss + skip : i == -1 ? y->grad_norm + skip : y->param[i];
        int64_t count = i < 0 ? x->steps : x->count[i];
        double relative =
            memcmp(a, b, (size_t)count * sizeof *a) ? difference("", a, b, count).relative : 0;
        if (relative > worst || isnan(relative))
            where = i == -2 ? "losses" : i == -1 ? "norms" : x->name[i];
        if (!(relative <= worst)) worst = relative;
    }
    if (!(worst <= bound)) note("%s: %s differ by %.2e, and %.0e is allowed", what, where, worst, bound);
}

// ---- what is in the files ----

// All weights of the model, or so many tensors for each, unsharded and without padding.
static void expect_file(const Layout *l, const char *name, const Params *whole, int per_weight) {
    char *dir = folder_of(l, me), *path = format_text("%s/step-000004/%s", dir, name);
    SafeTensors file = safetensors_open(path);
    SAME(file.count, per_weight * whole->count);
    for (int i = 0; i < file.count; i++) {
        const SafeTensor *t = &file.tensor[i];
        char *weight = format_text("%s", t->name), *end = strrchr(weight, '.');
        if (strcmp(end, ".weight")) *end = '\0';  // .m, .v, .master
        const Param *p = params_find(whole, weight);
        if (!p) note("%s holds %s", path, t->name);
        else
            for (int d = 0; d < t->dims; d++) SAME(t->shape[d], p->full[d]);
        free(weight);
    }
    safetensors_close(&file);
    free(path);
    free(dir);
}

// ---- all ----

// Whether layout i continues from layout j's checkpoint: its own, and others'.
static bool goes_on(int i, int j, const Layout *from, bool others) {
    if (i == j) return !(others && is_slow());  // without others it does, too
    if (!others) return false;
    return is_slow() ? from->zero == 3 : i == 0 || is_source(from);
}

static void all_to_all(const char *more, bool others, double bound) {
    Layout layout[MAX_LAYOUTS];
    Record whole[MAX_LAYOUTS];
    Config config[MAX_LAYOUTS];
    int count = layouts(layout);
    for (int i = 0; i < count; i++) {
        config[i] = config_of(&layout[i], more);
        whole[i] = straight(&layout[i], &config[i]);
    }
    Model *model = model_new(&config[0], mesh_single());
    for (int i = 0; i < count; i++) {
        expect_file(&layout[i], "model.safetensors", &model->params, 1);
        expect_file(&layout[i], "optimizer.safetensors", &model->params, config[i].dtype == BF16 ? 3 : 2);
    }
    model_free(model);
    for (int i = 0; i < count; i++) {
        if (others) expect_same(layout[i].name, &whole[i], &whole[0], 0, bound);
        for (int j = 0; j < count; j++) {
            if (!goes_on(i, j, &layout[j], others)) continue;
            char *what = format_text("%s%s, from %s", more, layout[i].name, layout[j].name);
            Record record = resumed(&layout[i], &config[i], &layout[j]);
            expect_same(what, &record, i == j ? &whole[i] : &whole[0], 2, i == j ? 0 : bound);
            record_free(&record);
            free(what);
        }
    }
    for (int i = 0; i < count; i++) record_free(&whole[i]);
}

static void any_layout_goes_on_from_any_other(void) { all_to_all("dtype=f64 ", true, 1e-10); }

static void the_same_layout_goes_on_bit_for_bit(void) { all_to_all("dtype=bf16 ", false, 0); }

// The run in f64 that measures the error of one in bf16 starts from the same checkpoint as that one.
static void a_resumed_run_is_measured_by_a_resumed_one(void) {
    Layout one = {.name = "measured", .mesh = mesh_single()};
    Config c = config_of(&one, "dtype=bf16");
    Record whole = straight(&one, &c), half = resumed(&one, &c, &one);
    char *dir = folder_of(&one, me);
    double bound = train_bound(&c, false, &whole).others;
    char *from = format_text("%s/step-000002", dir);
    c.resume = from;
    double resumed_bound = train_bound(&c, false, &half).others;
    free(from);
    if (!(resumed_bound > 0.01 * bound && resumed_bound < 10 * bound))
        note("the bound is %g for a whole run, and %g for its second half", bound, resumed_bound);
    record_free(&whole);
    record_free(&half);
    free(dir);
}

// ---- memory ----

// The peak memory of this process in bytes since the last call.
static double most_memory(void) {
    double kilobytes = 0;
    char line[128];
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %lf", &kilobytes);
    if (file) fclose(file);
    file = fopen("/proc/self/clear_refs", "w");
    if (!file || fputs("5", file) < 0 || fclose(file) != 0) note("/proc/self/clear_refs is closed");
    return 1024 * kilobytes;
}

// One weight of 64 MB, of which each of n ranks has 1 / n: what it writes and reads of it is copied once in
// host memory, besides the pages of the file.
static void a_rank_has_no_whole_weight_while_it_saves_and_resumes(void) {
    if (n < 3) return;  // a part and its pages are as large as the whole
    const Layout zero3 = {.name = "large", .mesh = mesh_new((MeshShape){.dp = n})};
    const double whole = 64 << 20;
    Model model = {.config = config_of(&zero3, ""), .mesh = zero3.mesh};
    params_begin(&model.params, &zero3.mesh);
    params_add_unit(&model.params, "embedding");
    params_add(&model.params, &(ParamSpec){.name = "large", .out = 1 << 24});
    params_measure(&model.params);
    zero_shard(&model, SHARD_VALUES);
    params_allocate(&model.params, recipe_standard(F32), 7);
    char *dir = folder_of(&zero3, 0), *saved = format_text("%s/step-000000", dir);
    most_memory();
    double before = most_memory(), most = (2.0 / n + 0.1) * whole;
    checkpoint_save(dir, &model.config, &model.params, NULL, (Progress){0});
    double saving = most_memory() - before;
    if (!(saving < most)) note("saving takes %.0f bytes beside the weights", saving);
    op_fill(model.params.own_values, 0);
    before = most_memory();
    checkpoint_load_weights(saved, &model.params);
    double resuming = most_memory() - before;
    if (!(resuming < most)) note("resuming takes %.0f bytes beside the weights", resuming);
    if (op_sum_squares(model.params.own_values) != (double)tensor_count(model.params.own_values))
        note("the weights are not those that were saved");
    params_free(&model.params);
    free(dir);
    free(saved);
}

// Of a long run they are many: no rank but the first keeps any, and they are sent in pieces.
static void the_first_rank_gets_the_logits_of_all_routers(void) {
    enum { COUNT = 2500000, MOST_AT_ONCE = 6 << 20 };  // bytes: a piece, and what carries it
    Record record = {.routing = {.count = COUNT, .logits = calloc(COUNT, sizeof(float))}};
    for (int64_t i = me; i < COUNT; i += n) record.routing.logits[i] = (float)(i % 1000);
    Memory before = memory_account();
    memory_reset_peak();
    record_routing(&record, world);
    int64_t peak = memory_account().peak[MEMORY_COMMUNICATION] - before.now[MEMORY_COMMUNICATION];
    if (peak > MOST_AT_ONCE) note("%lld bytes are taken to send them", (long long)peak);
    if (me > 0 && record.routing.logits) note("a rank that runs no baseline keeps the logits of all");
    int64_t wrong = 0;
    for (int64_t i = 0; i < COUNT && me == 0; i++) wrong += record.routing.logits[i] != (float)(i % 1000);
    SAME(wrong, 0);
    record_free(&record);
}

static const RankTest tests[] = {
    TEST(any_layout_goes_on_from_any_other),
    TEST(the_same_layout_goes_on_bit_for_bit),
    TEST(a_resumed_run_is_measured_by_a_resumed_one),
    TEST(a_rank_has_no_whole_weight_while_it_saves_and_resumes),
    TEST(the_first_rank_gets_the_logits_of_all_routers),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    // One place, chosen by rank 0; in memory if possible, where flushing files costs nothing.
    const char *where = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    folder = format_text("%s/test_reshard.%.0f", where, comm_sum(me == 0 ? getpid() : 0, world));
    int status = ranks_run(tests, sizeof tests / sizeof *tests, pattern);
    char *command = format_text("rm -rf %s", folder);
    if (me == 0 && system(command)) status = STATUS_FAIL;
    free(command);
    free(folder);
    return status;
}
