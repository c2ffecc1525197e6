// test_codec.c [--ranks N] [PATTERN]: fewer bits in flight: the result of an all-gather with a codec; and
// ZeRO-3 and sequence parallelism, which send 8 bits without being aware of it. TAP.
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "03_tensor_parallel/tensor_parallel.h"
#include "ranks.h"
#include "tensor/in_flight.h"
#include "tensor/rng.h"

// ---- two codecs: e4m3 with an f32 scale for each part; e5m2 with a common scale, which encode finds ----

typedef struct Encoded {
    DType codes;
    int times;      // that encode was called
    double shared;  // the scale of all, or 0
} Encoded;

static double largest_code(DType codes) { return codes == E4M3 ? 448 : 57344; }

static int64_t count_coded(const void *context, int tensor, int64_t count) {
    (void)context;
    return tensor == 0 ? count : 1;
}

static double amax_of(const double *x, int64_t count) {
    double most = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(x[i]));
    return most;
}

// codes = x / scale, so that the largest becomes the largest code.
static double scale_of(double amax, DType codes) {
    return (double)(float)(amax > 0 ? amax / largest_code(codes) : 1);
}

static double *doubles_of(Tensor t) {
    double *x = host_alloc((size_t)(tensor_count(t) + 1) * sizeof *x);
    tensor_to_doubles(x, t);
    return x;
}

static void encode(void *context, const Tensor *coded, Tensor part, Group group) {
    Encoded *e = context;
    int64_t count = tensor_count(part);
    double *x = doubles_of(part), amax = amax_of(x, count);
    bool shared = e->codes == E5M2;
    if (shared) amax = comm_max(amax, group);
    double scale = scale_of(amax, e->codes);
    if (shared) e->shared = scale;
    else if (count > 0) tensor_from_doubles(coded[1], &scale);
    for (int64_t i = 0; i < count; i++) x[i] /= scale;
    tensor_from_doubles(coded[0], x);
    e->times++;
    free(x);
}

static void decode(void *context, Tensor part, const Tensor *coded) {
    const Encoded *e = context;
    double *x = doubles_of(coded[0]), scale = e->shared;
    if (e->codes == E4M3) tensor_to_doubles(&scale, coded[1]);
    for (int64_t i = 0; i < tensor_count(part); i++) x[i] *= scale;
    tensor_from_doubles(part, x);
    free(x);
}

static Encoded of_part = {.codes = E4M3}, of_all = {.codes = E5M2};
static const Codec by_part = {"e4m3 by part", &of_part, 2, {E4M3, F32}, count_coded, encode, decode};
static const Codec by_all = {"e5m2 by all", &of_all, 1, {E5M2, F32}, count_coded, encode, decode};

// x after encoding and decoding with this scale, in `dtype`.
static double seen_as(double x, double scale, DType codes, DType dtype) {
    double code, back, divided = x / scale;
    uint8_t narrow[8];
    dtype_convert(narrow, codes, &divided, F64, 1);
    dtype_convert(&code, F64, narrow, codes, 1);
    back = code * scale;
    dtype_convert(narrow, dtype, &back, F64, 1);
    dtype_convert(&back, F64, narrow, dtype, 1);
    return back;
}

// ---- an all-gather ----

// Rank i has 3 i elements, so the first has none.
static double element(int rank, int64_t i) { return (rank + 1) * rng_normal(3, RNG_TEST, 100 * rank + i); }

static void try_gather(const Codec *codec, DType dtype) {
    int64_t counts[n], total = 0, own = 3 * me;
    double amax = 0, x[3 * n + 1];
    for (int i = 0; i < n; i++) total += counts[i] = 3 * i;
    Tensor in = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(own)),
           out = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(total));
    for (int64_t i = 0; i < own; i++) x[i] = element(me, i);
    tensor_from_doubles(in, x);
    clock_reset();
    Request *request = comm_all_gather_coded(out, in, counts, codec, world);
    op_fill(in, NAN);  // allowed: it has already been encoded
    comm_wait(request);
    CommCount sent = comm_count("all_gather");
    SAME(sent.calls, n > 1 ? codec->tensors : 0);
    SAME(sent.bytes, (n - 1) * (own + (own && codec->tensors == 2 ? 4 : 0)));
    double *got = doubles_of(out);
    for (int rank = 0; rank < n; rank++)
        for (int64_t i = 0; i < counts[rank]; i++) amax = fmax(amax, fabs(element(rank, i)));
    int64_t at = 0;
    for (int rank = 0; rank < n; rank++) {
        double most = 0;
        for (int64_t i = 0; i < counts[rank]; i++)
            most = fmax(most, fabs(seen_as(element(rank, i), 1, F64, dtype)));
        DType codes = ((const Encoded *)codec->context)->codes;
        double scale = scale_of(codec->tensors == 2 ? most : seen_as(amax, 1, F64, dtype), codes);
        for (int64_t i = 0; i < counts[rank]; i++)
            SAME(got[at++], seen_as(seen_as(element(rank, i), 1, F64, dtype), scale, codes, dtype));
    }
    free(got);
    tensor_free(&in), tensor_free(&out);
}

static void gathers_what_decode_makes_of_encode(void) {
    static const DType dtypes[] = {F64, F32, BF16};
    for (int i = 0; i < 3; i++) {
        try_gather(&by_part, dtypes[i]);
        try_gather(&by_all, dtypes[i]);
    }
}

static void look_at(const void *t) { in_flight_check("a test", *(const Tensor *)t, true, NO_LINE); }

// The number of the call that writes t.
static int64_t call_on(Tensor t) {
    const char *why = refusal(look_at, &t), *call = why ? strstr(why, "call ") : NULL;
    return call ? atoll(call + 5) : -1;
}

static void calls_are_numbered_in_order(void) {
    Tensor in = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(8)), out[2];
    op_fill(in, 1);
    for (int i = 0; i < 2; i++) out[i] = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(8 * n));
    Request *request[] = {comm_all_gather_coded(out[0], in, NULL, &by_part, world),
                          comm_all_gather(out[1], in, NULL, world)};
    if (call_on(out[0]) < 2) note("the coded call has no number");
    SAME(call_on(out[1]), call_on(out[0]) + 1);
    comm_wait_all(request, 2);
    tensor_free(&in), tensor_free(&out[0]), tensor_free(&out[1]);
}

// Until it is waited for, the tensor that is decoded into is in flight. On one rank, where a child process
// may break the rule.
static void what_is_decoded_into_is_in_flight(void) {
    if (n > 1) return;
    int ends[2], status = 0;
    char said[500] = "";
    if (pipe(ends)) note("no pipe");
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        Tensor in = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(5)), out = tensor_like(MEMORY_ACTIVATION, in);
        op_fill(in, 1);
        Request *request = comm_all_gather_coded(out, in, NULL, &by_part, world);
        op_fill(in, 2);
        op_scale(out, 2);
        comm_wait(request);
        _exit(0);
    }
    close(ends[1]);
    size_t size = 0;
    for (ssize_t got; (got = read(ends[0], said + size, sizeof said - 1 - size)) > 0;) size += (size_t)got;
    close(ends[0]);
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS_USAGE || !strstr(said, "op_scale writes"))
        note("status %x, said \"%s\"", (unsigned)status, said);
}

// ---- recipes: a record of a list sends 8 bits ----

static void send_8_bits(Recipe *recipe, const Config *config) {
    (void)config;
    recipe->send_weights = recipe->send_rows = &by_part;
    recipe->send_drows = &by_all;
}
static const Technique eight_bits = {.name = "eight bits", .recipe = send_8_bits};

static Config config_of(const char *more) {
    char *text = format_text(
        "layers=2 hidden=24 heads=12 kv-heads=12 ffn=36 vocab=257 seq=5 micro-batch=1 grad-acc=2 steps=2 "
        "optimizer=sgd lr=0.3 clip=0.5 %s",
        more);
    Config c = config_default(text);
    free(text);
    return c;
}

static void acquire(Model *m, int unit) {
    m->sockets.parameters.acquire(m->sockets.parameters.context, m, unit, FORWARD);
}
static void release(Model *m, int unit) {
    m->sockets.parameters.release(m->sockets.parameters.context, m, unit, FORWARD);
}

// A rank's part of a unit as others see it; `whole`: the unit's elements as stored.
static void see_parts(double *seen, const double *whole, const Unit *unit, DType dtype) {
    for (int rank = 0; rank < n; rank++) {
        int64_t first, count = zero_part(unit->count, rank, n, &first);
        double scale = scale_of(amax_of(whole + first, count), E4M3);
        for (int64_t i = first; i < first + count; i++) seen[i] = seen_as(whole[i], scale, E4M3, dtype);
    }
}

static double forward_loss(Trainer *t, const Batch *batch) {
    MicroBatch micro = micro_batch_new(t->model, -1, 1, batch->tokens, batch->targets, 1);
    double loss = t->model->sockets.schedule.evaluate(t->model->sockets.schedule.context, t->model, &micro);
    micro_batch_free(t->model, &micro);
    return loss;
}

// The bytes of a step's all-gathers equal the price, and `bytes`.
static void expect_sent(Trainer *t, double calls, double bytes) {
    Price price = trainer_price(t);
    clock_reset();
    train_step(t, NULL);
    CommCount sent = comm_count("all_gather");
    if (n == 1) calls = 0;
    SAME(sent.calls, calls);
    SAME(sent.bytes, bytes);
    for (int i = 0; i < price.kinds; i++) {
        if (strcmp(price.sent[i].call, "all_gather")) continue;
        SAME(price.sent[i].calls, calls);
        SAME(price.sent[i].bytes, bytes);
    }
}

// Each unit that ZeRO-3 gathers consists of all ranks' parts after 8-bit coding; forward computes with
// exactly that; and only codes and the parts' scales are sent.
static void zero3_sends_8_bits(void) {
    Mesh mesh = mesh_new((MeshShape){.dp = n});
    Config c = config_of("dtype=f32");
    c.dp = n;
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&zero3, &eight_bits, NULL});
    Config alone = c;
    alone.dp = 1;
    Trainer *one = trainer_new(&alone, mesh_single(), NULL);
    Batch batch = batch_new(one, me);
    double exact = forward_loss(one, &batch), gathers = 0, bytes = 0;
    for (int i = 0; i < t->model->params.units; i++) {
        Unit *unit = &t->model->params.unit[i];
        const Unit *same = &one->model->params.unit[i];
        double *whole = doubles_of(same->values), *seen = host_alloc((size_t)unit->count * sizeof *seen);
        see_parts(seen, whole, unit, F32);
        tensor_from_doubles(same->values, seen);
        acquire(t->model, i);
        double *got = doubles_of(unit->values);
        release(t->model, i);
        bool changed = false;
        for (int64_t j = 0; j < unit->count; j++) {
            SAME(got[j], seen[j]);
            changed = changed || seen[j] != whole[j];
        }
        if (!changed) note("8 bits leave no trace in %s", unit->name);
        free(whole), free(seen), free(got);
        bool end = i == t->model->embedding_unit || i == t->model->head_unit;
        gathers += end ? 1 : 2;
        bytes += (end ? 1 : 2) * (n - 1) * (double)(unit->own_count + (unit->own_count ? 4 : 0));
    }
    t->model->sockets.parameters.complete(t->model->sockets.parameters.context, t->model);
    SAME(forward_loss(t, &batch), forward_loss(one, &batch));
    if (forward_loss(one, &batch) == exact) note("8 bits leave no trace in the loss");
    t->model->sockets.parameters.complete(t->model->sockets.parameters.context, t->model);
    expect_sent(t, 2 * 2 * gathers, 2 * bytes);  // codes and scales, two micro-batches
    batch_free(&batch);
    trainer_free(t);
    trainer_free(one);
}

// Activations use one codec, their gradients the other; W gathers again what forward gathered.
static void sequence_parallelism_sends_8_bits(void) {
    Mesh mesh = mesh_new((MeshShape){.tp = n});
    Config c = config_of("dtype=f32");
    c.tp = n;
    config_set(&c, "sp", 1);
    Trainer *plain = trainer_new(&c, mesh, (const Technique *[]){&sequence_parallel, NULL});
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&sequence_parallel, &eight_bits, NULL});
    int64_t first, own = sequence_rows(c.micro_batch * c.seq, me, n, &first) * c.hidden;
    double regions = 2 * (double)(c.layers * c.grad_acc);
    of_part.times = of_all.times = 0;
    expect_sent(t, (2 * 2 + 1) * regions, (n - 1) * regions * (double)(2 * (own + (own ? 4 : 0)) + own));
    SAME(of_part.times, 2 * regions);
    SAME(of_all.times, regions);
    train_step(plain, NULL);
    double off = fabs(t->loss - plain->loss) / plain->loss;
    double norm_off = fabs(t->grad_norm - plain->grad_norm) / plain->grad_norm;
    if (!(off > 0 && off < 0.01 && norm_off > 0 && norm_off < 0.1))
        note("8 bits change the loss by %.2g and the norm by %.2g of it", off, norm_off);
    trainer_free(t);
    trainer_free(plain);
}

// The recipe decides which dtype has which role: here gradients of f32 weights are summed in f64.
static void widen_sums(Recipe *recipe, const Config *config) {
    (void)config;
    recipe->sum = F64;
}
static const Technique wide_sums = {.name = "wide sums", .recipe = widen_sums};

static void a_recipe_chooses_the_dtype_of_sums(void) {
    Mesh mesh = mesh_new((MeshShape){.dp = n});
    Config c = config_of("dtype=f32");
    c.dp = n;
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&ddp_no_sync, &wide_sums, NULL});
    Trainer *plain = trainer_new(&c, mesh, (const Technique *[]){&ddp_no_sync, NULL});
    Price price = trainer_price(t);
    train_step(t, NULL);
    train_step(plain, NULL);
    SAME(t->model->params.accumulated.dtype, F64);
    SAME(price_states(&price, t->model, MEMORY_GRADIENT), (4 + 8) * config_parameters(&c));
    double off = fabs(t->grad_norm - plain->grad_norm) / plain->grad_norm;
    if (!(off > 0 && off < 1e-5)) note("sums in f64 change the norm by %.2g of it", off);
    trainer_free(t);
    trainer_free(plain);
}

static const RankTest tests[] = {
    TEST(gathers_what_decode_makes_of_encode),
    TEST(calls_are_numbered_in_order),
    TEST(what_is_decoded_into_is_in_flight),
    TEST(zero3_sends_8_bits),
    TEST(sequence_parallelism_sends_8_bits),
    TEST(a_recipe_chooses_the_dtype_of_sums),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 3);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
