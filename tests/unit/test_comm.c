// test_comm.c [--ranks N] [--types N] [PATTERN]: collectives and transfers on all ranks at once, against
// serial references that each rank computes for itself, in the first N of the dtypes (all). TAP. comm.t
// runs it with 1 to 8 ranks, and its scenarios of wrong use.
#include <math.h>
#include <signal.h>
#include <unistd.h>

#include "ranks.h"
#include "tensor/clock.h"

// ---- numbers ----

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// What rank r holds at element i: signs and sizes mixed, so that the order of a sum shows.
static double value(DType dtype, int r, int64_t i) {
    uint64_t bits = mix(mix((uint64_t)r * 1000003 + 17) + (uint64_t)i * 7919);
    double x = (double)(bits >> 11) * 0x1p-52 - 1;  // -1 … 1
    return dtype == I32 ? floor(1e6 * x) : x * (double)(1 << bits % 7);
}

// count elements of rank r, from its element `first` on, in the dtype's bytes. The caller frees them.
static void *values(DType dtype, int r, int64_t first, int64_t count) {
    double *wide = host_alloc(8 * (size_t)count);
    for (int64_t i = 0; i < count; i++) wide[i] = value(dtype, r, first + i);
    void *bytes = host_alloc(dtype_size(dtype) * (size_t)count);
    dtype_convert(bytes, dtype, wide, F64, count);
    free(wide);
    return bytes;
}

static Tensor tensor_of(DType dtype, int r, int64_t count) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(count));
    void *host = values(dtype, r, 0, count);
    tensor_from_host(t, host);
    free(host);
    return t;
}

static Tensor empty(DType dtype, int64_t count) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(count));
    void *host = host_alloc((size_t)tensor_bytes(t));
    memset(host, 0x5a, (size_t)tensor_bytes(t));
    tensor_from_host(t, host);
    free(host);
    return t;
}

// The sum or maximum of all members, the first first, in the dtype that comm.h states.
static void *reduced(DType dtype, ReduceOp op, Group group, int64_t first, int64_t count) {
    double *sum = host_alloc(8 * (size_t)count), *wide = host_alloc(8 * (size_t)count);
    void *result = host_alloc(dtype_size(dtype) * (size_t)count);
    for (int m = 0; m < group.size; m++) {
        void *x = values(dtype, group.member[m], first, count);
        dtype_convert(wide, F64, x, dtype, count);
        free(x);
        for (int64_t i = 0; i < count; i++) {
            if (m == 0) sum[i] = wide[i];
            else if (op == REDUCE_MAX) sum[i] = wide[i] > sum[i] ? wide[i] : sum[i];
            else if (dtype == F64 || dtype == I32) sum[i] += wide[i];
            else sum[i] = (float)sum[i] + (float)wide[i];
        }
    }
    dtype_convert(result, dtype, sum, F64, count);
    free(sum);
    free(wide);
    return result;
}

static void expect_bytes(const char *what, Tensor t, int64_t first, const void *expected, int64_t count) {
    size_t size = dtype_size(t.dtype);
    char *got = host_alloc((size_t)tensor_bytes(t));
    tensor_to_host(got, t);
    if (memcmp(got + (size_t)first * size, expected, size * (size_t)count)) {
        int64_t i = 0;
        while (!memcmp(got + (size_t)(first + i) * size, (const char *)expected + (size_t)i * size, size))
            i++;
        double a, b;
        dtype_convert(&a, F64, got + (size_t)(first + i) * size, t.dtype, 1);
        dtype_convert(&b, F64, (const char *)expected + (size_t)i * size, t.dtype, 1);
        note("%s of %s: element %lld is %.17g, expected %.17g", what, tensor_text(t),
             (long long)(first + i), a, b);
    }
    free(got);
}

// As expect_bytes, but for a sum in any order: within (n - 1) roundings of all that was added.
static void expect_sum_of_any_order(const char *what, Tensor t, int64_t at, Group group, int64_t first,
                                    const void *expected, int64_t count) {
    double *got = host_alloc(8 * (size_t)tensor_count(t)), *sum = host_alloc(8 * (size_t)count);
    double *x = host_alloc(8 * (size_t)count), *added = calloc((size_t)count + 1, 8);
    for (int m = 0; m < group.size; m++) {
        void *stored = values(t.dtype, group.member[m], first, count);
        dtype_convert(x, F64, stored, t.dtype, count);
        free(stored);
        for (int64_t i = 0; i < count; i++) added[i] += fabs(x[i]);
    }
    tensor_to_doubles(got, t);
    dtype_convert(sum, F64, expected, t.dtype, count);
    double unit = t.dtype == F64 ? 0x1p-53 : 0x1p-24;
    int wrong = 0;
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(got[at + i] - sum[i]) <= 2 * (group.size - 1) * unit * added[i]) && wrong++ == 0)
            note("%s of %s: element %lld is %.17g, expected about %.17g", what, tensor_text(t),
                 (long long)(at + i), got[at + i], sum[i]);
    free(got);
    free(sum);
    free(x);
    free(added);
}

// Elements [at, at + count) are the sum, or maximum, of what the members have from `first` on.
static void expect_reduction(const char *what, Tensor t, int64_t at, ReduceOp op, Group group,
                             int64_t first, int64_t count) {
    void *expected = reduced(t.dtype, op, group, first, count);
    if (op == REDUCE_SUM && !comm_sums_in_rank_order() && (t.dtype == F64 || t.dtype == F32))
        expect_sum_of_any_order(what, t, at, group, first, expected, count);
    else expect_bytes(what, t, at, expected, count);
    free(expected);
}

static void expect_reduced(const char *what, Tensor t, ReduceOp op, Group group, int64_t first) {
    expect_reduction(what, t, 0, op, group, first, tensor_count(t));
}

// Every rank has the same bits.
static void expect_alike(const char *what, Tensor t) {
    unsigned char *bytes = host_alloc((size_t)tensor_bytes(t));
    tensor_to_host(bytes, t);
    uint32_t hash = 1;
    for (int64_t i = 0; i < tensor_bytes(t); i++) hash = hash * 16777619 ^ bytes[i];
    free(bytes);
    double greatest = comm_max(hash, world), least = -comm_max(-(double)hash, world);
    if (greatest != least) note("%s of %s differs between ranks", what, tensor_text(t));
}

static void expect_values(const char *what, Tensor t, int64_t at, int r, int64_t first, int64_t count) {
    void *expected = values(t.dtype, r, first, count);
    expect_bytes(what, t, at, expected, count);
    free(expected);
}

static void nap(int seed) {
    uint64_t bits = mix((uint64_t)seed * 977 + (uint64_t)me);
    if (bits % 3) usleep((useconds_t)(bits % 1500));
}

// ---- each collective ----

static int types = DTYPES;
static const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 1009, 40000};
enum { SIZES = sizeof sizes / sizeof *sizes };

// Uneven parts, some empty: 0, k, 2 k … in a turned order.
static int64_t uneven(int part, int64_t k) { return part % 3 == 1 ? 0 : k * ((part * 2 + 1) % 5); }

static int64_t parts(int64_t *counts, int64_t k) {
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += counts[i] = uneven(i, k);
    return total;
}

static int64_t offset_of(const int64_t *counts, int part) {
    int64_t offset = 0;
    for (int i = 0; i < part; i++) offset += counts[i];
    return offset;
}

static void all_reduce_adds_in_rank_order(void) {
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int op = REDUCE_SUM; op <= REDUCE_MAX; op++) {
                Tensor t = tensor_of((DType)d, me, sizes[s]);
                comm_wait(comm_all_reduce(t, (ReduceOp)op, world));
                expect_reduced(op ? "maximum" : "sum", t, (ReduceOp)op, world, 0);
                expect_alike(op ? "maximum" : "sum", t);
                tensor_free(&t);
            }
}

static void reduce_adds_at_the_root_alone(void) {
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int root = 0; root<n; root += n> 2 ? n - 2 : 1) {
                Tensor t = tensor_of((DType)d, me, sizes[s]);
                comm_wait(comm_reduce(t, REDUCE_SUM, root, world));
                if (me == root) expect_reduced("sum at the root", t, REDUCE_SUM, world, 0);
                else expect_values("what others keep", t, 0, me, 0, sizes[s]);
                tensor_free(&t);
            }
}

static void reduce_scatter_gives_each_its_part(void) {
    int64_t counts[n];
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int equal = 0; equal < 2; equal++) {
                int64_t total = equal ? sizes[s] * n : parts(counts, sizes[s]);
                int64_t first = equal ? sizes[s] * me : offset_of(counts, me);
                Tensor in = tensor_of((DType)d, me, total);
                Tensor out = empty((DType)d, equal ? sizes[s] : counts[me]);
                comm_wait(comm_reduce_scatter(out, in, equal ? NULL : counts, REDUCE_SUM, world));
                expect_reduced("part of the sum", out, REDUCE_SUM, world, first);
                expect_values("in", in, 0, me, 0, total);
                tensor_free(&in);
                tensor_free(&out);
            }
}

static void reduce_scatter_in_place(void) {
    Tensor in = tensor_of(F32, me, 20011 * n), out = tensor_view(in, 20011 * me, SHAPE(20011));
    comm_wait(comm_reduce_scatter(out, in, NULL, REDUCE_SUM, world));
    expect_reduced("own part", out, REDUCE_SUM, world, 20011 * me);
    tensor_free(&in);
}

static void all_gather_lines_up_the_parts(void) {
    int64_t counts[n];
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int equal = 0; equal < 2; equal++) {
                int64_t total = equal ? sizes[s] * n : parts(counts, sizes[s]);
                Tensor in = tensor_of((DType)d, me, equal ? sizes[s] : counts[me]),
                       out = empty((DType)d, total);
                comm_wait(comm_all_gather(out, in, equal ? NULL : counts, world));
                for (int i = 0; i < n; i++)
                    expect_values("gathered part", out, equal ? sizes[s] * i : offset_of(counts, i), i, 0,
                                  equal ? sizes[s] : counts[i]);
                tensor_free(&in);
                tensor_free(&out);
            }
    Tensor out = empty(F32, 30011 * n), own = tensor_of(F32, me, 30011);
    Tensor part = tensor_view(out, 30011 * me, SHAPE(30011));
    void *host = values(F32, me, 0, 30011);
    tensor_from_host(part, host);
    free(host);
    comm_wait(comm_all_gather(out, part, NULL, world));
    for (int i = 0; i < n; i++) expect_values("part gathered in place", out, 30011 * i, i, 0, 30011);
    tensor_free(&out);
    tensor_free(&own);
}

static void gather_and_scatter_know_their_root(void) {
    int64_t counts[n];
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int equal = 0; equal < 2; equal++) {
                int root = (d + s) % n;
                int64_t total = equal ? sizes[s] * n : parts(counts, sizes[s]);
                int64_t mine = equal ? sizes[s] : counts[me],
                        first = equal ? sizes[s] * me : offset_of(counts, me);
                Tensor in = tensor_of((DType)d, me, mine), whole = {0};
                if (me == root) whole = empty((DType)d, total);
                comm_wait(comm_gather(whole, in, equal ? NULL : counts, root, world));
                for (int i = 0; i < n && me == root; i++)
                    expect_values("gathered part", whole, equal ? sizes[s] * i : offset_of(counts, i), i, 0,
                                  equal ? sizes[s] : counts[i]);
                tensor_free(&in);
                tensor_free(&whole);
                Tensor out = empty((DType)d, mine);
                if (me == root) whole = tensor_of((DType)d, root, total);
                comm_wait(comm_scatter(out, whole, equal ? NULL : counts, root, world));
                expect_values("scattered part", out, 0, root, first, mine);
                tensor_free(&out);
                tensor_free(&whole);
            }
}

static void broadcast_comes_from_the_root(void) {
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int root = 0; root < n; root++) {
                Tensor t = tensor_of((DType)d, me, sizes[s]);
                comm_wait(comm_broadcast(t, root, world));
                expect_values("broadcast", t, 0, root, 0, sizes[s]);
                tensor_free(&t);
            }
}

// What a gives b.
static int64_t between(int a, int b, int64_t k) { return (a + 2 * b) % 4 * k; }

static void all_to_all_crosses_the_parts(void) {
    int64_t in_counts[n], out_counts[n];
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++)
            for (int equal = 0; equal < 2; equal++) {
                int64_t give = 0, take = 0, at = 0;
                for (int i = 0; i < n; i++) {
                    give += in_counts[i] = equal ? sizes[s] : between(me, i, sizes[s]);
                    take += out_counts[i] = equal ? sizes[s] : between(i, me, sizes[s]);
                }
                Tensor in = tensor_of((DType)d, me, give), out = empty((DType)d, take);
                comm_wait(
                    comm_all_to_all(out, equal ? NULL : out_counts, in, equal ? NULL : in_counts, world));
                for (int i = 0; i < n; at += out_counts[i++]) {
                    int64_t first = 0;  // of my part in i's `in`
                    for (int j = 0; j < me; j++) first += equal ? sizes[s] : between(i, j, sizes[s]);
                    expect_values("part of an all-to-all", out, at, i, first, out_counts[i]);
                }
                tensor_free(&in);
                tensor_free(&out);
            }
}

// ---- transfers ----

static void a_ring_passes_tensors_on(void) {
    for (int d = 0; d < types; d++)
        for (int s = 0; s < SIZES; s++) {
            Tensor give = tensor_of((DType)d, me, sizes[s]), take = empty((DType)d, sizes[s]);
            comm_wait(comm_send_receive(give, (me + 1) % n, take, (me + n - 1) % n, world));
            expect_values("from the left", take, 0, (me + n - 1) % n, 0, sizes[s]);
            tensor_free(&give);
            tensor_free(&take);
        }
}

static void sends_meet_receives_in_order_across_batches(void) {
    if (n < 2 || me > 1) return;
    const int64_t count[3] = {700001, 3, 50021};  // more and less than a segment
    Tensor t[3];
    for (int i = 0; i < 3; i++) t[i] = me == 0 ? tensor_of(F32, 10 + i, count[i]) : empty(F32, count[i]);
    if (me == 0) {
        Transfer batch[] = {{true, 1, t[0]}, {true, 1, t[1]}, {true, 1, t[2]}};
        comm_wait(comm_transfers(batch, 3, world));
    } else {
        Transfer batch[] = {{false, 0, t[1]}, {false, 0, t[2]}};
        comm_wait(comm_receive(t[0], 0, world));
        comm_wait(comm_transfers(batch, 2, world));
        for (int i = 0; i < 3; i++) expect_values("message", t[i], 0, 10 + i, 0, count[i]);
    }
    // Back one by one, received in one batch.
    for (int i = 0; i < 3 && me == 1; i++) comm_wait(comm_send(t[i], 0, world));
    if (me == 0) {
        Tensor back[3];
        for (int i = 0; i < 3; i++) back[i] = empty(F32, count[i]);
        Transfer batch[] = {{false, 1, back[0]}, {false, 1, back[1]}, {false, 1, back[2]}};
        comm_wait(comm_transfers(batch, 3, world));
        for (int i = 0; i < 3; i++) expect_values("message back", back[i], 0, 10 + i, 0, count[i]);
        for (int i = 0; i < 3; i++) tensor_free(&back[i]);
    }
    for (int i = 0; i < 3; i++) tensor_free(&t[i]);
}

static void a_batch_may_cross_anothers_single_calls(void) {
    if (n < 2 || me > 1) return;
    Tensor give = tensor_of(F32, me, 30011), take = empty(F32, 30011);
    if (me == 0) {
        comm_wait(comm_send_receive(give, 1, take, 1, world));
    } else {
        comm_wait(comm_receive(take, 0, world));
        comm_wait(comm_send(give, 0, world));
    }
    expect_values("the other's", take, 0, 1 - me, 0, 30011);
    tensor_free(&give);
    tensor_free(&take);
}

static void a_rank_may_send_to_itself(void) {
    Tensor a = tensor_of(F32, 1, 100), b = tensor_of(F32, 2, 200), c = empty(F32, 100), d = empty(F32, 200);
    Transfer batch[] = {{false, me, c}, {true, me, a}, {true, me, b}, {false, me, d}};
    comm_wait(comm_transfers(batch, 4, world));
    expect_values("first to myself", c, 0, 1, 0, 100);
    expect_values("second to myself", d, 0, 2, 0, 200);
    Tensor *all[] = {&a, &b, &c, &d};
    for (int i = 0; i < 4; i++) tensor_free(all[i]);
}

// ---- sums ----

static void nan_and_infinity_survive(void) {
    double mine[4] = {1, 2, 3, me == 0 ? INFINITY : 1};
    if (me == n - 1) mine[0] = NAN;
    if (me == 0) mine[1] = INFINITY;
    if (me == n - 1 && n > 1) mine[1] = -INFINITY;
    if (me == n / 2) mine[2] = NAN;
    DType dtypes[] = {F64, F32, BF16, F16};
    for (int d = 0; d < 4; d++)
        for (int op = REDUCE_SUM; op <= REDUCE_MAX; op++) {
            Tensor t = tensor_new(MEMORY_ACTIVATION, dtypes[d], SHAPE(4));
            double got[4];
            tensor_from_doubles(t, mine);
            comm_wait(comm_all_reduce(t, (ReduceOp)op, world));
            tensor_to_doubles(got, t);
            if (!isnan(got[0]) || !isnan(got[2]) || !isinf(got[3]))
                note("%g %g %g", got[0], got[2], got[3]);
            if (op == REDUCE_SUM && n > 1 && !isnan(got[1])) note("infinity - infinity is %g", got[1]);
            if (op == REDUCE_MAX && !(got[1] == INFINITY)) note("the greatest of infinities is %g", got[1]);
            tensor_free(&t);
        }
}

static void small_gradients_survive_a_bf16_sum(void) {
    // In bf16, 256 + 1 is 256: 2 is the step there. All ones together are not lost.
    Tensor t = tensor_new(MEMORY_GRADIENT, BF16, SHAPE(5));
    double x[5], sum = 256 + (n - 1);
    for (int i = 0; i < 5; i++) x[i] = me == 0 ? 256 : 1;
    tensor_from_doubles(t, x);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    tensor_to_doubles(x, t);
    for (int i = 0; i < 5; i++) SAME(x[i], f32_from_bf16(bf16_from_f32((float)sum)));
    tensor_free(&t);
}

// Longer than what NCCL's direct sums take at once; over MPI it would only cost time.
static void long_sums_go_piece_by_piece(void) {
    if (n != 2 || comm_sums_in_rank_order()) return;
    int64_t count = 9000001;
    Tensor t = tensor_of(E5M2, me, count);
    comm_wait(comm_reduce(t, REDUCE_SUM, 0, world));
    if (me == 0) expect_reduced("long sum", t, REDUCE_SUM, world, 0);
    else expect_values("what the other keeps", t, 0, me, 0, count);
    tensor_free(&t);
}

static void a_sum_is_no_average(void) {
    Tensor t = tensor_new(MEMORY_GRADIENT, F32, SHAPE(3));
    double x[3] = {6, 6, 6};
    tensor_from_doubles(t, x);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    tensor_to_doubles(x, t);
    for (int i = 0; i < 3; i++) SAME(x[i], 6.0 * n);
    tensor_free(&t);
}

static void all_reduce_has_the_bits_of_reduce_scatter(void) {
    DType dtypes[] = {BF16, F64, F32};
    for (int d = 0; d < (comm_sums_in_rank_order() ? 3 : 1); d++)
        for (int turn = 0; turn < 4; turn++) {
            int64_t part = 20011;
            Tensor whole = tensor_of(dtypes[d], me, part * n), in = tensor_of(dtypes[d], me, part * n);
            Tensor out = empty(dtypes[d], part);
            nap(turn);
            Request *first = comm_all_reduce(whole, REDUCE_SUM, world);
            nap(turn + 10);
            comm_wait(comm_reduce_scatter(out, in, NULL, REDUCE_SUM, world));
            comm_wait(first);
            void *host = host_alloc((size_t)tensor_bytes(out));
            tensor_to_host(host, out);
            expect_bytes("all-reduce beside reduce-scatter", whole, part * me, host, part);
            free(host);
            tensor_free(&whole);
            tensor_free(&in);
            tensor_free(&out);
        }
}

static void host_sums_run_in_rank_order(void) {
    double sum = 0;
    for (int r = 0; r < n; r++) sum += value(F64, r, 0);
    SAME(comm_sum(value(F64, me, 0), world), sum);
    SAME(comm_max(me == n / 2 ? 5 : -3, world), 5);
    if (!isnan(comm_max(me == n - 1 ? NAN : 7, world))) note("the greatest hides a NaN");
    SAME(comm_sum(3, mesh_single().dp), 3);
}

// ---- many requests ----

static MeshShape a_grid(void) {
    return n == 8       ? (MeshShape){.dp = 2, .pp = 2, .tp = 2}
           : n % 2 == 0 ? (MeshShape){.dp = n / 2, .tp = 2}
                        : (MeshShape){.dp = n};
}

static void requests_of_several_groups_stand_open_at_once(void) {
    Mesh mesh = mesh_new(a_grid());
    Group groups[] = {mesh.world, mesh.dp, mesh.tp, mesh.pp, mesh.cp};
    enum { GROUPS = 5, EACH = 3 };
    for (int turn = 0; turn < 4; turn++) {
        Tensor t[GROUPS * EACH];
        Request *request[GROUPS * EACH];
        for (int i = 0; i < GROUPS * EACH; i++) {
            t[i] = tensor_of(F32, me, 1000 + 7001 * (i % 4));
            nap(100 * turn + i);
            request[i] = comm_all_reduce(t[i], REDUCE_SUM, groups[i % GROUPS]);
        }
        for (int i = GROUPS * EACH - 1; i >= 0; i--) {  // the last first
            comm_wait(request[i]);
            nap(100 * turn + 50 + i);
        }
        for (int i = 0; i < GROUPS * EACH; i++) {
            expect_reduced("sum over an axis", t[i], REDUCE_SUM, groups[i % GROUPS], 0);
            tensor_free(&t[i]);
        }
    }
}

// Member i of the turned group is rank n - 1 - i; of the halves, ranks of one parity, the last first.
static void groups_keep_their_own_order(void) {
    int turned[n], half[n], count = 0;
    for (int i = 0; i < n; i++) turned[i] = n - 1 - i;
    for (int r = n - 1; r >= 0; r--)
        if (r % 2 == me % 2) half[count++] = r;
    Group groups[] = {comm_group("turned", LINE_WORLD, turned, n),
                      comm_group("half", LINE_WORLD, half, count),
                      comm_group("turned again", LINE_WORLD, turned, n)};
    for (int g = 0; g < 3; g++) {
        Group group = groups[g];
        Tensor in = tensor_of(F32, me, 1009), out = empty(F32, 1009 * group.size),
               t = tensor_of(BF16, me, 1009);
        comm_wait(comm_all_gather(out, in, NULL, group));
        for (int i = 0; i < group.size; i++)
            expect_values("part of a member", out, 1009 * i, group.member[i], 0, 1009);
        comm_wait(comm_reduce(t, REDUCE_SUM, group.size - 1, group));
        if (group.rank == group.size - 1) expect_reduced("sum at the last member", t, REDUCE_SUM, group, 0);
        int next = (group.rank + 1) % group.size, last = (group.rank + group.size - 1) % group.size;
        Tensor from_last = empty(F32, 1009);
        comm_wait(comm_send_receive(in, next, from_last, last, group));
        expect_values("from the member before", from_last, 0, group.member[last], 0, 1009);
        Tensor *tensors[] = {&in, &out, &t, &from_last};
        for (int i = 0; i < 4; i++) tensor_free(tensors[i]);
    }
}

static void requests_on_one_tensor_run_in_order(void) {
    int64_t count = 30011;
    Tensor t = tensor_of(F32, me, count), parts_of_t = empty(F32, count * n);
    Request *sum = comm_all_reduce(t, REDUCE_SUM, world);
    Request *gather = comm_all_gather(parts_of_t, t, NULL, world);  // of the sums
    nap(1);
    comm_wait(gather);
    comm_wait(sum);
    for (int i = 0; i < n; i++)
        expect_reduction("gathered sums", parts_of_t, count * i, REDUCE_SUM, world, 0, count);
    tensor_free(&t);
    tensor_free(&parts_of_t);
}

static void a_tensor_freed_early_stays_until_the_wait(void) {
    enum { COUNT = 50021, OTHERS = 8 };
    static double fill[COUNT], got[COUNT];
    Tensor t = tensor_of(F32, me, COUNT), other[OTHERS];
    if (me == n - 1) usleep(30000);  // the others' data cannot leave before
    Request *request = comm_all_reduce(t, REDUCE_SUM, world);
    tensor_free(&t);
    // One of these takes its place, if it is free.
    for (int i = 0; i < COUNT; i++) fill[i] = 7;
    for (int j = 0; j < OTHERS; j++) {
        other[j] = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(COUNT));
        tensor_from_doubles(other[j], fill);
    }
    comm_wait(request);
    for (int j = 0; j < OTHERS; j++) {
        tensor_to_doubles(got, other[j]);
        int i = 0;
        while (i < COUNT && got[i] == 7) i++;
        if (i < COUNT) note("a new tensor's element %d became %g", i, got[i]);
        tensor_free(&other[j]);
    }
}

static void groups_of_one_take_the_same_road(void) {
    Mesh single = mesh_single();
    Tensor t = tensor_of(BF16, 3, 1009), out = empty(BF16, 1009);
    int64_t counts[1] = {1009};
    clock_reset();
    comm_wait(comm_all_reduce(t, REDUCE_SUM, single.dp));
    comm_wait(comm_reduce(t, REDUCE_MAX, 0, single.dp));
    comm_wait(comm_broadcast(t, 0, single.tp));
    comm_wait(comm_barrier(single.pp));
    expect_values("left alone", t, 0, 3, 0, 1009);
    Request *(*const copies[])(Tensor, Tensor, const int64_t *, int, Group) = {comm_gather, comm_scatter};
    for (int i = 0; i < 2; i++) {
        Tensor copy = empty(BF16, 1009);
        comm_wait(copies[i](copy, t, counts, 0, single.dp));
        expect_values("copied", copy, 0, 3, 0, 1009);
        tensor_free(&copy);
    }
    comm_wait(comm_reduce_scatter(out, t, counts, REDUCE_SUM, single.dp));
    expect_values("reduce-scatter", out, 0, 3, 0, 1009);
    comm_wait(comm_all_to_all(out, NULL, t, counts, single.ep));
    comm_wait(comm_all_gather(out, t, NULL, single.cp));
    expect_values("all-gather", out, 0, 3, 0, 1009);
    SAME(comm_total().calls, 9);
    SAME(comm_total().bytes, 0);
    SAME(comm_total().model_seconds, 0);
    tensor_free(&t);
    tensor_free(&out);
}

static void the_grid_is_numbered_with_tp_fastest(void) {
    if (n != 8) return;
    MeshShape shape = {.dp = 2, .pp = 2, .cp = 1, .tp = 2, .ep = 2};
    Mesh mesh = mesh_new(shape);
    SAME(mesh.tp.member[0], me - me % 2);
    SAME(mesh.tp.rank, me % 2);
    SAME(mesh.dp.member[0], me / 4 * 4 + me % 2);
    SAME(mesh.dp.member[1], me / 4 * 4 + me % 2 + 2);
    SAME(mesh.dp.rank, me / 2 % 2);
    SAME(mesh.pp.member[1], me % 4 + 4);
    SAME(mesh.pp.rank, me / 4);
    SAME(mesh.cp.size, 1);
    SAME(mesh.ep.member[0], mesh.dp.member[0]);
    mesh = mesh_new((MeshShape){.dp = 4, .pp = 1, .cp = 2, .tp = 1, .ep = 2});
    SAME(mesh.cp.member[1], me - me % 2 + 1);
    SAME(mesh.ep.member[0], me - me % 2);  // ep is the faster digit of dp x cp
    SAME(mesh.ep.rank, me % 2);
    SAME(mesh.expert_dp.member[1], me % 2 + 2);
}

// ---- counts ----

static CommCount count_of(const char *name) {
    const CommCount *counts;
    int kinds = comm_counts(&counts);
    for (int i = 0; i < kinds; i++)
        if (!strcmp(counts[i].name, name)) return counts[i];
    note("nothing counts %s", name);
    return (CommCount){0};
}

// calls and bytes of one kind since the last clock_reset.
static void expect_count(const char *name, int64_t calls, int64_t bytes) {
    CommCount count = count_of(name);
    if (count.calls != calls || count.bytes != bytes)
        note("%s: %lld calls and %lld bytes, expected %lld and %lld", name, (long long)count.calls,
             (long long)count.bytes, (long long)calls, (long long)bytes);
}

static void bytes_are_those_of_the_formulas(void) {
    const int64_t count = 1009 * 3;
    int64_t piece = (count + n - 1) / n, k = count - piece * me;
    k = 4 * (k < 0 ? 0 : k < piece ? k : piece);
    int64_t counts[n], total = parts(counts, 1009), K = 4 * count;
    int root = n - 1;
    clock_reset();
    Tensor t = tensor_of(F32, me, count), whole = tensor_of(F32, me, total),
           part = tensor_of(F32, me, counts[me]);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    expect_count("all_reduce", 1, K - k + (n - 1) * k);
    comm_wait(comm_reduce(t, REDUCE_SUM, root, world));
    expect_count("reduce", 1, K - k + (me == root ? 0 : k));
    comm_wait(comm_reduce_scatter(part, whole, counts, REDUCE_SUM, world));
    expect_count("reduce_scatter", 1, 4 * (total - counts[me]));
    comm_wait(comm_all_gather(whole, part, counts, world));
    expect_count("all_gather", 1, 4 * (n - 1) * counts[me]);
    comm_wait(comm_gather(whole, part, counts, root, world));
    expect_count("gather", 1, me == root ? 0 : 4 * counts[me]);
    comm_wait(comm_scatter(part, whole, counts, root, world));
    expect_count("scatter", 1, me == root ? 4 * (total - counts[me]) : 0);
    comm_wait(comm_broadcast(t, root, world));
    expect_count("broadcast", 1, me == root ? (n - 1) * K : 0);
    Tensor all = tensor_of(F32, me, 50 * n), all_out = empty(F32, 50 * n);
    comm_wait(comm_all_to_all(all_out, NULL, all, NULL, world));
    expect_count("all_to_all", 1, 4 * 50 * (n - 1));
    comm_wait(comm_barrier(world));
    expect_count("barrier", 1, 0);
    comm_wait(comm_send_receive(all, (me + 1) % n, all_out, (me + n - 1) % n, world));
    expect_count("transfers", 1, n > 1 ? 4 * 50 * n : 0);
    comm_sum(1, world);
    expect_count("all_reduce", 2, K - k + (n - 1) * k + (n == 1 ? 0 : me == 0 ? 8 * (n - 1) : 8));
    SAME(comm_total().calls, 11);
    // Together an all-reduce sends 2 (n - 1) K: the sum over ranks of its formula.
    clock_reset();
    SAME(comm_total().calls, 0);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    double sent = (double)count_of("all_reduce").bytes;
    SAME(comm_sum(sent, world), 2.0 * (n - 1) * (double)K);
    Tensor *tensors[] = {&t, &whole, &part, &all, &all_out};
    for (int i = 0; i < 5; i++) tensor_free(tensors[i]);
}

// ---- the model clock ----

// An operation of this many seconds on the compute stream of an H100.
static void compute(double seconds) {
    clock_begin("work", BF16, seconds * 989e12, 0);
    clock_end();
}

static void collectives_start_when_the_last_is_ready(void) {
    for (int turn = 0; turn < 3; turn++) {
        nap(turn);
        comm_wait(comm_barrier(world));  // all clocks on one time
        double zero = comm_max(clock_model_now(), world);
        zero = clock_model_now();
        SAME(zero, comm_max(zero, world));
        zero = clock_model_now();
        Tensor t = tensor_of(F32, me, 1 << 18);
        compute(1e-3 * (me + 1));
        double last = comm_rank() == n - 1 ? clock_model_now() : 0,
               cost = clock_collective_seconds("all_reduce", 4 << 18, n, n < 8 ? n : 8);
        double mine = clock_model_now();
        clock_reset();
        Request *request = comm_all_reduce(t, REDUCE_SUM, world);
        nap(turn + 5);
        compute(0.5e-3);
        double before = clock_model_now();
        comm_wait(request);
        double end = clock_model_now();
        // The last rank's compute stream had come to its call at `last`.
        last = comm_max(last, world);
        double expected = last + cost > before ? last + cost : before;
        SAME(end, expected);
        CommCount count = count_of("all_reduce");
        SAME(count.exposed_seconds - (clock_model_now() - end), expected > before ? expected - before : 0);
        if (mine > before) note("the clock ran back");
        tensor_free(&t);
    }
}

static void requests_queue_on_the_communication_stream(void) {
    comm_wait(comm_barrier(world));
    double zero = clock_model_now(), cost = clock_collective_seconds("all_reduce", 4000, n, n);
    Tensor t[4];
    Request *request[4];
    for (int i = 0; i < 4; i++)
        request[i] = comm_all_reduce(t[i] = tensor_of(F32, me, 1000), REDUCE_SUM, world);
    double end = zero;
    for (int i = 0; i < 4; i++) {
        comm_wait(request[i]);
        end += cost;
        SAME(clock_model_now(), end);
        tensor_free(&t[i]);
    }
}

// A run that uses everything, with sleeps by `seed`: returns its model time.
static double a_run(int seed) {
    Mesh mesh = mesh_new(a_grid());
    comm_wait(comm_barrier(world));
    double zero = clock_model_now();
    Tensor big = tensor_of(F32, me, 100003), small = tensor_of(BF16, me, 1009), in = empty(BF16, 1009);
    Tensor other = tensor_of(BF16, me, 1009);
    for (int step = 0; step < 5; step++) {
        compute(1e-6 * (double)(mix((uint64_t)(me * 31 + step)) % 100));
        nap(seed + step);
        Request *a = comm_all_reduce(big, REDUCE_SUM, mesh.dp);
        compute(1e-6 * (double)(mix((uint64_t)(me * 57 + step)) % 50));
        nap(seed + step + 30);
        Request *b = comm_send_receive(small, (mesh.dp.rank + 1) % mesh.dp.size, in,
                                       (mesh.dp.rank + mesh.dp.size - 1) % mesh.dp.size, mesh.dp);
        Request *c = comm_broadcast(other, 0, mesh.tp);
        comm_wait(c);
        comm_wait(a);
        nap(seed + step + 60);
        comm_wait(b);
        comm_sum(1, world);
    }
    tensor_free(&big);
    tensor_free(&small);
    tensor_free(&other);
    tensor_free(&in);
    return clock_model_now() - zero;
}

static void the_model_clock_knows_no_load(void) {
    double wall[4], first = 0;
    for (int turn = 0; turn < 4; turn++) {
        // From the same start, so that not even rounding differs.
        clock_model_wait(turn + 1 > clock_model_now() ? turn + 1 : clock_model_now());
        wall[turn] = a_run(turn * 1000);
        if (turn == 0) first = wall[0];
        if (!(fabs(wall[turn] - first) < 1e-12))
            note("run %d took %.17g, the first %.17g", turn, wall[turn], first);
    }
    if (!(first > 0)) note("no time passed");
}

static void expect_near(const char *what, double got, double expected) {
    if (!(fabs(got - expected) <= 1e-14 * expected))
        note("%s: %.17g s, expected %.17g", what, got, expected);
}

static void costs_follow_their_formulas(void) {
    const double K = 1e9, near = 3.4e-6, far = 9.6e-6;
    expect_near("all-reduce in a node", clock_collective_seconds("all_reduce", K, 8, 8),
                14 * near + 2 * 7 * K / 8 / 450e9);
    expect_near("reduce-scatter in a node", clock_collective_seconds("reduce_scatter", K, 8, 8),
                7 * near + 7 * K / 8 / 450e9);
    // Two nodes of 8 have 8 ports each: 400 GB/s are less than NVLink's 450.
    expect_near("all-gather across nodes", clock_collective_seconds("all_gather", K, 16, 8),
                14 * near + far + 15 * K / 16 / 400e9);
    // One member a node: one port.
    expect_near("all-reduce, one member a node", clock_collective_seconds("all_reduce", K, 4, 1),
                6 * far + 2 * 3 * K / 4 / 50e9);
    expect_near("broadcast", clock_collective_seconds("broadcast", K, 8, 8), 7 * near + K / 450e9);
    expect_near("barrier", clock_collective_seconds("barrier", 0, 8, 8), 14 * near);
    // In an all-to-all each GPU's own port carries what leaves the node.
    expect_near("all-to-all across nodes", clock_collective_seconds("all_to_all", K, 16, 8),
                7 * near + 8 * far + 8 * K / 16 / 50e9);
    expect_near("all-to-all in a node", clock_collective_seconds("all_to_all", K, 8, 8),
                7 * near + 7 * K / 8 / 450e9);
    expect_near("transfers in a node", clock_transfers_seconds((Traffic){2, K, 2 * K}, (Traffic){0}),
                near + 2 * K / 450e9);
    expect_near("transfers across", clock_transfers_seconds((Traffic){1, K, 0}, (Traffic){1, 0, K}),
                far + K / 50e9);
    SAME(clock_collective_seconds("all_reduce", K, 1, 1), 0);
    clock_set_machine(machine_find("dgx-a100"));
    expect_near("A100", clock_collective_seconds("all_gather", K, 16, 8),
                14 * near + far + 15 * K / 16 / 200e9);
    clock_set_cluster(4, 0.5, 0.8);
    expect_near("at 80 %", clock_collective_seconds("reduce", K, 4, 4), 3 * near + K / 240e9);
    SAME(clock_node(7), 1);
    double now = clock_model_now();
    clock_begin("work", BF16, 312e12, 0);
    clock_end();
    expect_near("compute at 50 %", clock_model_now() - now, 2 + 0 * now);
    clock_set_machine(machine_find("dgx-h100"));
    clock_set_cluster(0, 1, 1);
    comm_wait(comm_barrier(world));
}

// ---- scenarios of wrong use, for comm.t: each ends the program, or says what it should not ----

static void scenario(const char *name) {
#define IS(text) (!strcmp(name, text))
    Tensor t = tensor_of(F32, me, 1024), wide = tensor_of(F32, me, 1024 * n);
    int odd = 2;  // the rank that errs
    if (IS("kind") && me == odd) comm_wait(comm_all_gather(wide, t, NULL, world));
    else if (IS("kind")) comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    if (IS("root")) comm_wait(comm_broadcast(t, me == odd ? 1 : 0, world));
    if (IS("op")) comm_wait(comm_all_reduce(t, me == odd ? REDUCE_MAX : REDUCE_SUM, world));
    if (IS("dtype") && me == odd) comm_wait(comm_all_reduce(tensor_of(BF16, me, 1024), REDUCE_SUM, world));
    else if (IS("dtype")) comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    if (IS("count"))
        comm_wait(comm_all_reduce(tensor_of(F32, me, me == odd ? 1023 : 1024), REDUCE_SUM, world));
    if (IS("parts")) {
        int64_t even[4] = {1, 1, 1, 1}, other[4] = {2, 0, 1, 1};
        comm_wait(
            comm_all_gather(tensor_of(F32, 0, 4), tensor_of(F32, me, 1), me == odd ? other : even, world));
    }
    if (IS("all-to-all")) {
        int64_t counts[4] = {1, 1, 1, 1};
        counts[0] += me == odd;
        comm_wait(comm_all_to_all(tensor_of(F32, 0, 4), NULL, tensor_of(F32, me, 4 + (me == odd)), counts,
                                  world));
    }
    if (IS("order")) {  // two groups of the same ranks, in another order on one of them
        int all[4] = {0, 1, 2, 3};
        Group a = comm_group("red", LINE_WORLD, all, 4), b = comm_group("blue", LINE_WORLD, all, 4);
        Request *first = comm_all_reduce(t, REDUCE_SUM, me == odd ? b : a);
        Request *second = comm_all_reduce(wide, REDUCE_SUM, me == odd ? a : b);
        comm_wait(first);
        comm_wait(second);
    }
    if (IS("skipped") && me != odd) comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    if (IS("sends")) comm_wait(comm_send(t, me ^ 1, world));
    if (IS("receives")) comm_wait(comm_receive(t, me ^ 1, world));
    if (IS("send-size")) {
        if (me == 0) comm_wait(comm_send(t, 1, world));
        if (me == 1) comm_wait(comm_receive(tensor_of(F32, 0, 1000), 0, world));
    }
    if (IS("send-all")) {
        if (me == 0) comm_wait(comm_send(t, 1, world));
        else comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    }
    if (IS("circle")) {
        comm_wait(comm_send(t, (me + 1) % n, world));
        comm_wait(comm_receive(wide, (me + n - 1) % n, world));
    }
    if (IS("late")) usleep(me == odd ? 60000000 : 0);
    if (IS("lost") && me == odd) comm_all_reduce(t, REDUCE_SUM, mesh_single().world);
    if (IS("killed") && me == odd) raise(SIGKILL);
    if (IS("killed-in-work")) {  // nobody waits, all compute
        if (me == odd) raise(SIGKILL);
        usleep(60000000);
    }
    if (IS("exits") && me == odd) exit(0);
    if (IS("exits-at-once") && me == odd) _exit(0);
    if (IS("finishes") && me == odd) exit(comm_finish(0));
    if (IS("fatal-one") && me == odd) fatal("something broke");
    if (IS("fatal-all")) fatal("something broke");
    if (IS("root-9")) comm_wait(comm_broadcast(t, 9, world));
    if (IS("stranger")) {
        int two[2] = {0, 1};
        Group pair = comm_group("pair", LINE_WORLD, two, 2);
        comm_wait(comm_barrier(pair));
    }
    if (IS("grid")) mesh_new((MeshShape){.dp = 3, .pp = 1, .cp = 1, .tp = 2, .ep = 1});
    if (IS("grid-tp")) mesh_new((MeshShape){.dp = 1, .pp = 1, .cp = 1, .tp = 3, .ep = 1});
    if (IS("grid-ep")) mesh_new((MeshShape){.dp = 4, .pp = 1, .cp = 1, .tp = 1, .ep = 3});
    if (IS("status")) exit(comm_finish(me == odd ? STATUS_FAIL : STATUS_PASS));
    if (IS("header")) {
        MeshShape shape = a_grid();
        Mesh mesh = mesh_new(shape);
        mesh_print(&mesh, shape);
    }
    if (IS("clock")) {
        double seconds = a_run(1);
        say("model clock %.17g s, %lld bytes", comm_max(seconds, world), (long long)comm_total().bytes);
    }
    tensor_free(&t);
    tensor_free(&wide);
    comm_wait(comm_barrier(world));
}

// ---- all of them ----

static const RankTest tests[] = {
    TEST(all_reduce_adds_in_rank_order),
    TEST(reduce_adds_at_the_root_alone),
    TEST(reduce_scatter_gives_each_its_part),
    TEST(reduce_scatter_in_place),
    TEST(all_gather_lines_up_the_parts),
    TEST(gather_and_scatter_know_their_root),
    TEST(broadcast_comes_from_the_root),
    TEST(all_to_all_crosses_the_parts),
    TEST(a_ring_passes_tensors_on),
    TEST(sends_meet_receives_in_order_across_batches),
    TEST(a_batch_may_cross_anothers_single_calls),
    TEST(a_rank_may_send_to_itself),
    TEST(nan_and_infinity_survive),
    TEST(small_gradients_survive_a_bf16_sum),
    TEST(long_sums_go_piece_by_piece),
    TEST(a_sum_is_no_average),
    TEST(all_reduce_has_the_bits_of_reduce_scatter),
    TEST(host_sums_run_in_rank_order),
    TEST(requests_of_several_groups_stand_open_at_once),
    TEST(groups_keep_their_own_order),
    TEST(requests_on_one_tensor_run_in_order),
    TEST(a_tensor_freed_early_stays_until_the_wait),
    TEST(groups_of_one_take_the_same_road),
    TEST(the_grid_is_numbered_with_tp_fastest),
    TEST(bytes_are_those_of_the_formulas),
    TEST(collectives_start_when_the_last_is_ready),
    TEST(requests_queue_on_the_communication_stream),
    TEST(the_model_clock_knows_no_load),
    TEST(costs_follow_their_formulas),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *wrong = NULL;
    for (int i = 1; i + 1 < argc; i++) {
        if (!strcmp(argv[i], "--scenario")) wrong = argv[i + 1];
        if (!strcmp(argv[i], "--types")) types = atoi(argv[i + 1]);
    }
    const char *pattern = ranks_start(argc, argv, 4);
    if (wrong) {
        scenario(wrong);
        return comm_finish(0);
    }
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
