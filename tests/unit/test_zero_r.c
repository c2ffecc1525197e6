// test_zero_r.c [--ranks N] [PATTERN]: checkpoints sharded over the ranks of real tensor parallelism, and
// buffers of every size. TAP.
#include "03_tensor_parallel/tensor_parallel.h"
#include "ranks.h"

static Config config_of(const char *more) {
    char *text = format_text(
        "layers=3 hidden=48 heads=24 kv-heads=24 ffn=48 vocab=257 seq=11 micro-batch=1 grad-acc=2 steps=2 "
        "%s",
        more);
    Config c = config_default(text);
    free(text);
    return c;
}

static void expect_same_bits(const char *what, const Record *x, const Record *y) {
    SAME(x->steps, y->steps);
    for (int64_t i = 0; i < x->steps; i++) SAME(x->loss[i], y->loss[i]);
    for (int i = 0; i < x->tensors; i++)
        if (memcmp(x->grad[i], y->grad[i], (size_t)x->count[i] * sizeof(double)) ||
            memcmp(x->param[i], y->param[i], (size_t)x->count[i] * sizeof(double)))
            note("%s: %s differs", what, x->name[i]);
}

// ---- checkpoints ----

static Record run_sharded(const Config *c, Mesh mesh, bool sharded, bool contiguous) {
    Trainer *t = trainer_new(c, mesh, tensor_layouts);
    ZeroR z = {.tp = mesh.tp, .contiguous = contiguous};
    if (sharded) zero_r_plug(t->model, &z);
    Record record = train_record(t, "run");
    if (sharded) zero_r_unplug(t->model, &z);
    trainer_free(t);
    return record;
}

// With real tensor parallelism, where each rank computes its heads of the same input.
static void cut_checkpoints_change_no_bit(void) {
    Mesh mesh = mesh_new((MeshShape){.tp = n});
    static const char *const dtypes[] = {"dtype=f64", "dtype=bf16"};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        for (int vocabulary = 0; vocabulary < 2; vocabulary++) {
            Config c = config_of(dtypes[i]);
            c.tp = n;
            config_set(&c, "zero", 0);
            config_set(&c, "vocab-parallel", vocabulary);
            c.recompute = RECOMPUTE_FULL;
            Record whole = run_sharded(&c, mesh, false, false);
            for (int contiguous = 0; contiguous < 2; contiguous++) {
                Record sharded = run_sharded(&c, mesh, true, contiguous);
                expect_same_bits(dtypes[i], &sharded, &whole);
                int64_t first, x = c.micro_batch * c.seq * c.hidden, each;
                each = zero_part(x, contiguous ? 0 : me, n, &first);
                SAME(whole.kept_bytes - sharded.kept_bytes,
                     c.layers * (x - each) * (int64_t)dtype_size((DType)c.dtype));
                record_free(&sharded);
            }
            record_free(&whole);
        }
}

// ---- buffers ----

static void buffers_change_no_bit(Mesh mesh, bool tied) {
    Config c = config_of("layers=1 dtype=bf16");
    c.tied = tied;
    config_set(&c, "bucket-mb", 1e-6);
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&ddp_no_sync, NULL});
    Record in_place = train_record(t, "in place");
    int64_t all = params_elements(&t->model->params);
    trainer_free(t);
    // Elements: a weight ends within the buffer, at its end, and far beyond it; all, and one more.
    const int64_t sizes[] = {97, 257 * 48, 257 * 48 + 1, all - 1, all, all + 1, INT64_MAX / 4};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        t = trainer_new(&c, mesh, NULL);
        ConstantBuffer b = {.bytes = 4 * sizes[i]};
        constant_buffer_plug(t->model, &b);
        SAME(tensor_count(b.buffer), sizes[i] < all ? sizes[i] : all);
        Record record = train_record(t, "through a buffer");
        expect_same_bits("buffer", &record, &in_place);
        constant_buffer_unplug(t->model, &b);
        record_free(&record);
        trainer_free(t);
    }
    record_free(&in_place);
}

static void buffers_of_every_size_change_no_bit(void) {
    Mesh mesh = mesh_new((MeshShape){.dp = n});
    for (int tied = 0; tied < 2; tied++) buffers_change_no_bit(mesh, tied);
}

// As where two ranks of tensor parallelism share each replica: sums are over every other rank.
static void buffers_sum_among_replicas(void) {
    if (n % 2 == 0) buffers_change_no_bit(mesh_new((MeshShape){.dp = n / 2, .tp = 2}), false);
}

static const RankTest tests[] = {
    TEST(cut_checkpoints_change_no_bit),
    TEST(buffers_of_every_size_change_no_bit),
    TEST(buffers_sum_among_replicas),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
