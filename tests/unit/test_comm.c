// test_comm.c [--ranks N] [--types N] [PATTERN]: collectives and transfers on all ranks at once, against
// serial references that each rank computes for itself, in the first N of the dtypes (all). TAP. comm.t
// runs it with 1 to 8 ranks, and comm_errors.t its scenarios of wrong use.
#include <dlfcn.h>
#include <linux/futex.h>
#include <mpi.h>
#include <signal.h>
#include <sys/syscall.h>

#include "comm_values.h"

// ---- each collective ----

static int types = DTYPES;
static const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 1009, 40000};
enum { SIZES = sizeof sizes / sizeof *sizes };

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

// What rank a sends to rank b.
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
                    int64_t first = 0;  // start of my part in i's `in`
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
    // In bf16, 256 + 1 is 256, as the step there is 2; but the sum of all ones must not be lost.
    Tensor t = tensor_new(MEMORY_GRADIENT, BF16, SHAPE(5));
    double x[5], sum = 256 + (n - 1);
    for (int i = 0; i < 5; i++) x[i] = me == 0 ? 256 : 1;
    tensor_from_doubles(t, x);
    comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    tensor_to_doubles(x, t);
    for (int i = 0; i < 5; i++) SAME(x[i], f32_from_bf16(bf16_from_f32((float)sum)));
    tensor_free(&t);
}

// Longer than NCCL's direct sums handle at once; over MPI it would only cost time.
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
    // two numbers that an f64 cannot tell apart, and two whose lower halves are equal
    const uint64_t print = 0xfedcba9876543210;
    const bool odd = me == n - 1 && n > 1;
    if (!comm_same(print, world)) note("equal numbers are taken for different ones");
    if (comm_same(print + odd, world) != (n == 1)) note("a last bit that differs is not noticed");
    if (comm_same(print - ((uint64_t)odd << 40), world) != (n == 1)) note("a high bit is not noticed");
}

// ---- scenarios of wrong use, for comm.t: each ends the program, or says what it should not ----

// A rank that yields its core, as it does in each iteration of a waiting loop when it sleeps on its
// doorbell, gets it back only after so many microseconds, as on a busy machine. "late-busy": a timeout of a
// second is then 200 iterations. "late-starved": one look every few seconds, so no rank has really waited
// in vain.
static useconds_t away;

long syscall(long number, ...) {
    static long (*next)(long, ...);
    static int turns;
    if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long given[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(arguments, long);
    va_end(arguments);
    bool waits = number == SYS_futex && given[1] == FUTEX_WAIT;
    if (away && waits && ++turns > 1000) _exit(STATUS_FAIL);
    if (away && waits) usleep(away);
    return next(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

// "stops": a rank is stopped after it has announced that it leaves.
static bool stops;
int MPI_Finalize(void) {
    if (stops) raise(SIGSTOP);
    return PMPI_Finalize();
}

static void scenario(const char *name) {
#define IS(text) (!strcmp(name, text))
    Tensor t = tensor_of(F32, me, 1024), wide = tensor_of(F32, me, 1024 * n);
    int odd = 2;  // the rank in error
    if (IS("kind") && me == odd) comm_wait(comm_all_gather(wide, t, NULL, world));
    else if (IS("kind")) comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    if (IS("root")) comm_wait(comm_broadcast(t, me == odd ? 1 : 0, world));
    if (IS("op")) comm_wait(comm_all_reduce(t, me == odd ? REDUCE_MAX : REDUCE_SUM, world));
    if (IS("dtype") && me == odd) comm_wait(comm_all_reduce(tensor_of(BF16, me, 1024), REDUCE_SUM, world));
    else if (IS("dtype")) comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    if (IS("count"))
        comm_wait(comm_all_reduce(tensor_of(F32, me, me == odd ? 1023 : 1024), REDUCE_SUM, world));
    if (IS("host-count")) comm_sum_all((double[100]){0}, me == odd ? 2 : 100, world);
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
    if (IS("unmade")) {
        Group all = me ? comm_group("red", LINE_WORLD, (int[]){0, 1, 2, 3}, 4) : world;
        comm_wait(comm_barrier(all));
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
    away = IS("late-busy") ? 5000 : IS("late-starved") ? 2600000 : 0;
    if (IS("late") || IS("late-busy")) usleep(me == odd ? 60000000 : 0);
    stops = IS("stops") && me == odd;
    if (IS("late-starved")) usleep(me == odd ? 6000000 : 0);
    if (IS("lost") && me == odd) comm_all_reduce(t, REDUCE_SUM, mesh_single().world);
    if (IS("killed") && me == odd) raise(SIGKILL);
    if (IS("killed-in-sum")) {
        if (me == odd) raise(SIGKILL);
        comm_wait(comm_all_reduce(t, REDUCE_SUM, world));
    }
    if (IS("killed-in-work")) {  // no rank waits, all compute
        if (me == odd) raise(SIGKILL);
        usleep(60000000);
    }
    if (IS("exits") && me == odd) exit(0);
    if (IS("exits-at-once") && me == odd) _exit(0);
    if (IS("finishes") && me == odd) exit(comm_finish(0));
    if (IS("fatal-one") && me == odd) fatal("something broke");
    if (IS("fatal-all")) fatal("something broke");
    if (IS("root-9")) comm_wait(comm_broadcast(t, 9, world));
    if (IS("in-is-out")) comm_wait(comm_all_to_all(wide, NULL, wide, NULL, world));
    if (IS("no-tensor")) comm_wait(comm_all_reduce((Tensor){0}, REDUCE_SUM, world));
    if (IS("no-part")) comm_wait(comm_all_gather(wide, (Tensor){0}, NULL, world));
    if (IS("no-message")) comm_wait(comm_receive((Tensor){0}, me ^ 1, world));
    if (IS("no-request")) comm_wait(NULL);
    if (IS("waited-twice")) {
        Request *request = comm_all_reduce(t, REDUCE_SUM, world);
        comm_wait(request);
        comm_wait(request);
    }
    if (IS("part-of-another")) {
        Tensor not_mine = tensor_view(wide, 1024 * ((me + 1) % n), SHAPE(1024));
        comm_wait(comm_all_gather(wide, not_mine, NULL, world));
    }
    if (IS("sent-and-overwritten"))
        comm_wait(comm_send_receive(tensor_view(wide, 0, SHAPE(1024)), (me + 1) % n,
                                    tensor_view(wide, 1023, SHAPE(1024)), (me + n - 1) % n, world));
    if (IS("stranger")) {
        int two[2] = {0, 1};
        Group pair = comm_group("pair", LINE_WORLD, two, 2);
        comm_wait(comm_barrier(pair));
    }
    if (IS("grid")) mesh_new((MeshShape){.dp = 3, .pp = 1, .cp = 1, .tp = 2, .ep = 1});
    if (IS("grid-tp")) mesh_new((MeshShape){.dp = 1, .pp = 1, .cp = 1, .tp = 3, .ep = 1});
    if (IS("grid-ep")) mesh_new((MeshShape){.dp = 4, .pp = 1, .cp = 1, .tp = 1, .ep = 3});
    if (IS("status")) exit(comm_finish(me == odd ? STATUS_FAIL : STATUS_PASS));
    for (int i = 0; IS("prints") && i < 3000; i++) say("%099d", i);  // more than a pipe holds
    if (IS("full")) {  // someone fills /dev/shm during the run
        while (access("/dev/shm/full", F_OK) != 0) usleep(10000);
        Tensor long_one = tensor_of(F32, me, 1 << 20);
        comm_wait(comm_all_reduce(long_one, REDUCE_SUM, world));
        tensor_free(&long_one);
    }
    if (IS("header")) {
        MeshShape shape = a_grid();
        Mesh mesh = mesh_new(shape);
        mesh_print(&mesh, shape);
    }
    tensor_free(&t);
    tensor_free(&wide);
    comm_wait(comm_barrier(world));
    away = 0;
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
