// comm_nccl_calls.cu: what each call of comm.h asks of NCCL.
// Sums. ncclAllReduce, ncclReduce and ncclReduceScatter add f32, f64 and i32. They would add 16-bit numbers
// in 16 bits (rounded at each hop of the ring, which loses small gradients), and their maximum ignores NaN.
// So sums of narrow dtypes and maxima of floats are done as in comm_mpi.c, where each member reduces a
// piece:
//
//     1. piece i of every member goes to member i        grouped ncclSend, ncclRecv
//     2. member i reduces the copies, 0 first, in f32    reduce_members, below
//     3. and sends the result to those who need it       grouped ncclSend, ncclRecv
// That sends as many bytes as a ring, 2 (n - 1) / n K for an all-reduce, in 2 steps instead of 2 (n - 1);
// on several nodes it forgoes what a tree would save. Long pieces are sent in chunks, all issued to the
// stream at once: the stream keeps their order, so that they can share one scratch buffer, and step 3 of a
// chunk is in one group with step 1 of the next.
//
// The bytes counted are those of comm.h, which this book charges for its algorithms; NCCL may choose a
// tree, or reductions in the switch, and put a different number of bytes on the wire.
#include <string.h>

#include "comm_nccl.h"
#include "cuda/ops_cuda.h"

enum { CHUNK_BYTES = 4 << 20 };  // of a piece, reduced by a member at once; its scratch holds n of these

// ---- moving bytes ----

static void copy(const Operation *o, void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from)
        CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, stream_of(o)));
}

// Both ends know the number of bytes, and both skip an empty transfer.
static void send(Operation *o, const void *from, int64_t bytes, int member) {
    if (bytes == 0) return;
    NCCL_CALL(ncclSend(from, (size_t)bytes, ncclInt8, member, o->comm->nccl, stream_of(o)));
    o->sent += bytes;
}

static void receive(Operation *o, void *to, int64_t bytes, int member) {
    if (bytes > 0) NCCL_CALL(ncclRecv(to, (size_t)bytes, ncclInt8, member, o->comm->nccl, stream_of(o)));
}

static void group_begin(void) { NCCL_CALL(ncclGroupStart()); }

static void group_end(void) {
    call_begin();
    NCCL_CALL(ncclGroupEnd());
    call_end();
}

// Sends parts of `in` to members, receives parts of `out` from them; NULL counts: nothing in that direction.
static void exchange(Operation *o, const int64_t *in_counts, const int64_t *out_counts) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    if (in_counts && out_counts)
        copy(o, part_at(c, c->out, out_counts, me), part_at(c, c->in, in_counts, me),
             part_bytes(c, in_counts, me));
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        if (in_counts) send(o, part_at(c, c->in, in_counts, i), part_bytes(c, in_counts, i), i);
        if (out_counts) receive(o, part_at(c, c->out, out_counts, i), part_bytes(c, out_counts, i), i);
    }
}

// Between the root and all others.
static void gather_or_scatter(Operation *o) {
    const Collective *c = &o->call;
    bool gather = c->kind == GATHER;
    const int64_t *counts = gather ? c->out_counts : c->in_counts;
    int me = c->group.rank;
    int64_t mine = part_bytes(c, counts, me);
    if (me != c->root && gather) send(o, c->in, mine, c->root);
    if (me != c->root && !gather) receive(o, c->out, mine, c->root);
    if (me != c->root) return;
    exchange(o, gather ? NULL : counts, gather ? counts : NULL);
    if (gather) copy(o, part_at(c, c->out, counts, me), c->in, mine);
    else copy(o, c->out, part_at(c, c->in, counts, me), mine);
}

// ---- transfers ----

// Two ranks connect at their first contact, where NCCL requires both to ask for the same connections. The
// batches in which they meet may differ (one may send and receive while the other only receives), so they
// first exchange a byte in each direction. Returns the number of new peers, or -1: not all have come yet.
static int new_peers(const Operation *o) {
    const Collective *c = &o->call;
    int count = 0;
    for (int i = 0; i < c->transfer_count; i++) {
        int peer = c->transfers[i].peer;
        if (peer == c->group.rank || o->comm->met[peer]) continue;
        bool open = false;
        for (int j = 0; j < c->transfer_count; j++)
            open = open || (c->transfers[j].peer == peer && c->open[j]);
        if (!open) return -1;
        count++;
    }
    return count;
}

static void meet_new_peers(Operation *o) {
    const Collective *c = &o->call;
    char *byte = scratch(o, (size_t)c->group.size + 1);
    group_begin();
    for (int i = 0; i < c->transfer_count; i++) {
        int peer = c->transfers[i].peer;
        if (peer == c->group.rank || o->comm->met[peer]) continue;
        NCCL_CALL(ncclSend(byte + c->group.size, 1, ncclInt8, peer, o->comm->nccl, stream_of(o)));
        NCCL_CALL(ncclRecv(byte + peer, 1, ncclInt8, peer, o->comm->nccl, stream_of(o)));
        o->comm->met[peer] = true;
    }
    group_end();
}

static void transfer_own(const Operation *o) {
    const Collective *c = &o->call;
    const Transfer *t = c->transfers;
    for (int i = 0, own = 0; i < c->transfer_count; i++) {
        if (t[i].peer != c->group.rank || t[i].send) continue;
        while (t[own].peer != c->group.rank || !t[own].send) own++;  // the next send to myself
        copy(o, tensor_address(t[i].t), tensor_address(t[own++].t), tensor_bytes(t[i].t));
    }
}

// The batch is one launch, so that all of it runs at once. It is launched when the first of its other ends
// has come: a rank that waits on its device for one part of the batch may call the next part only after
// that.
static void next_of_transfers(Operation *o) {
    const Collective *c = &o->call;
    bool others = false, open = false;
    for (int i = 0; i < c->transfer_count; i++) {
        others = others || c->transfers[i].peer != c->group.rank;
        open = open || c->open[i];
    }
    if (o->step == 0) {
        int strangers = others ? new_peers(o) : 0;
        if (strangers < 0) return;
        if (strangers > 0) meet_new_peers(o);
        o->step = 1;
        return;
    }
    if (others && !open) return;
    transfer_own(o);
    if (others) {
        group_begin();
        for (int i = 0; i < c->transfer_count; i++) {
            const Transfer *t = &c->transfers[i];
            if (t->peer == c->group.rank) continue;
            if (t->send) send(o, tensor_address(t->t), tensor_bytes(t->t), t->peer);
            else receive(o, tensor_address(t->t), tensor_bytes(t->t), t->peer);
        }
        group_end();
    }
    o->over = true;
}

// ---- sums by NCCL ----

static ncclDataType_t nccl_dtype(DType dtype) {
    return dtype == F64 ? ncclFloat64 : dtype == I32 ? ncclInt32 : ncclFloat32;
}

// Whether NCCL's own reduction does what comm.h promises.
static bool nccl_reduces(const Collective *c) {
    return c->dtype == I32 || (c->op == REDUCE_SUM && (c->dtype == F32 || c->dtype == F64));
}

static bool parts_are_equal(const int64_t *counts, int n) {
    for (int i = 1; i < n; i++)
        if (counts[i] != counts[0]) return false;
    return true;
}

static void reduce_by_nccl(Operation *o) {
    const Collective *c = &o->call;
    const int64_t *counts = c->in_counts;
    int n = c->group.size, me = c->group.rank;
    ncclDataType_t type = nccl_dtype(c->dtype);
    ncclRedOp_t op = c->op == REDUCE_MAX ? ncclMax : ncclSum;
    ncclComm_t comm = o->comm->nccl;
    size_t total = (size_t)c->in_bytes / dtype_size(c->dtype);
    int64_t k = part_bytes(c, counts, me);
    o->sent = c->in_bytes - k;
    if (total == 0) return;
    group_begin();
    if (c->kind == ALL_REDUCE) {
        NCCL_CALL(ncclAllReduce(c->out, c->out, total, type, op, comm, stream_of(o)));
        o->sent += (n - 1) * k;
    } else if (c->kind == REDUCE) {
        NCCL_CALL(ncclReduce(c->out, me == c->root ? c->out : NULL, total, type, op, c->root, comm,
                             stream_of(o)));
        o->sent += me == c->root ? 0 : k;
    } else if (parts_are_equal(counts, n)) {
        NCCL_CALL(ncclReduceScatter(c->in, c->out, (size_t)counts[me], type, op, comm, stream_of(o)));
    } else {
        for (int i = 0; i < n; i++)
            if (counts[i])
                NCCL_CALL(ncclReduce(part_at(c, c->in, counts, i), i == me ? c->out : NULL,
                                     (size_t)counts[i], type, op, i, comm, stream_of(o)));
    }
    group_end();
}

static void all_gather(Operation *o) {
    const Collective *c = &o->call;
    const int64_t *counts = c->out_counts;
    int n = c->group.size, me = c->group.rank;
    ncclComm_t comm = o->comm->nccl;
    o->sent = (n - 1) * c->in_bytes;
    group_begin();
    if (parts_are_equal(counts, n)) {
        if (counts[0])
            NCCL_CALL(ncclAllGather(c->in, c->out, (size_t)c->in_bytes, ncclInt8, comm, stream_of(o)));
    } else {
        for (int i = 0; i < n; i++)
            if (counts[i])
                NCCL_CALL(ncclBroadcast(i == me ? c->in : part_at(c, c->out, counts, i),
                                        part_at(c, c->out, counts, i), (size_t)part_bytes(c, counts, i),
                                        ncclInt8, i, comm, stream_of(o)));
    }
    group_end();
}

static void broadcast(Operation *o) {
    const Collective *c = &o->call;
    int64_t bytes = c->in_bytes;
    if (c->group.rank == c->root) o->sent = (c->group.size - 1) * bytes;
    if (bytes == 0) return;
    group_begin();
    NCCL_CALL(ncclBroadcast(c->out, c->out, (size_t)bytes, ncclInt8, c->root, o->comm->nccl, stream_of(o)));
    group_end();
}

// ---- sums by members' pieces ----

template <class T>
struct SumOf {
    typedef float Type;
};
template <>
struct SumOf<double> {
    typedef double Type;
};

// out (N) = the reduction of all members' copies, in order; others (members, stride) holds all but mine.
template <int N, class T>
__device__ static void reduce_pack(T *out, const T *own, const T *others, int64_t stride, int members,
                                   int me, bool maximum) {
    typedef typename SumOf<T>::Type Sum;
    Sum sum[N] = {};
    for (int j = 0; j < members; j++) {
        const Pack<T, N> copy = load<N>(j == me ? own : others + j * stride);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const Sum x = (Sum)copy.x[i];
            if (j == 0) sum[i] = x;
            else if (!maximum) sum[i] += x;
            else if (!(sum[i] >= x) && sum[i] == sum[i])
                sum[i] = x;  // a NaN in sum stays, and one in x is taken
        }
    }
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; i++) result.x[i] = T(sum[i]);
    store<N>(out, result);
}

// Whole packs from element `head` on, and the elements before and after them singly; head < 0: all singly.
template <class T>
__global__ void reduce_members(T *out, const T *own, const T *others, int64_t stride, int members, int me,
                               int64_t count, int64_t head, bool maximum) {
    constexpr int N = pack_of<T>;
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
                  all = (int64_t)gridDim.x * blockDim.x;
    const int64_t packs = head < 0 || head > count ? 0 : (count - head) / N;
    for (int64_t p = first; p < packs; p += all) {
        const int64_t i = head + p * N;
        reduce_pack<N>(out + i, own + i, others + i, stride, members, me, maximum);
    }
    for (int64_t rest = first; rest < count - packs * N; rest += all) {
        const int64_t i = packs == 0 || rest < head ? rest : rest + packs * N;
        reduce_pack<1>(out + i, own + i, others + i, stride, members, me, maximum);
    }
}

// Bytes by which an address lies beyond a multiple of 16.
static int64_t beyond_pack(const void *address) { return (int64_t)((uintptr_t)address % PACK_BYTES); }

template <class T>
static void launch_reduction(const Operation *o, void *out, const char *own, const char *others,
                             int64_t count) {
    const int64_t beyond = beyond_pack(own), size = (int64_t)sizeof(T);
    // The copies are aligned like `own`, and so is `out`, usually.
    const bool packs = beyond_pack(out) == beyond && beyond_pack(others) == beyond;
    const int64_t head = packs ? (PACK_BYTES - beyond) % PACK_BYTES / size : -1;
    const int64_t blocks = ceil_div(count, pack_of<T> * MOST_THREADS);  // one pack per thread
    LAUNCH((reduce_members<T>), (unsigned)blocks, MOST_THREADS, 0, stream_of(o), (T *)out, (const T *)own,
           (const T *)others, o->row, o->call.group.size, o->call.group.rank, count, head,
           o->call.op == REDUCE_MAX);
}

static void launch_by_dtype(const Operation *o, void *out, const char *own, const char *others,
                            int64_t count) {
    switch (o->call.dtype) {
        case F64:
            return launch_reduction<double>(o, out, own, others, count);
        case F32:
            return launch_reduction<float>(o, out, own, others, count);
        case BF16:
            return launch_reduction<__nv_bfloat16>(o, out, own, others, count);
        case F16:
            return launch_reduction<__half>(o, out, own, others, count);
        case E4M3:
            return launch_reduction<__nv_fp8_e4m3>(o, out, own, others, count);
        case E5M2:
            return launch_reduction<__nv_fp8_e5m2>(o, out, own, others, count);
        default:
            fatal("NCCL adds %s itself", dtype_name(o->call.dtype));
    }
}

void prepare_call(Operation *o) {
    const Collective *c = &o->call;
    bool reduces = c->kind == ALL_REDUCE || c->kind == REDUCE || c->kind == REDUCE_SCATTER;
    if (!o->comm || !reduces || nccl_reduces(c)) return;
    int n = c->group.size;
    int64_t longest = 0, most = CHUNK_BYTES / (int64_t)dtype_size(c->dtype);
    for (int i = 0; i < n; i++)
        if (c->in_counts[i] > longest) longest = c->in_counts[i];
    o->direct = true;
    o->chunk = longest < most ? longest : most;
    o->chunks = o->chunk ? (longest + o->chunk - 1) / o->chunk : 0;
    o->row = ceil_div(o->chunk, PACK_BYTES) * PACK_BYTES;  // whole packs of every dtype
    scratch(o, (size_t)(n * o->row) * dtype_size(c->dtype) + PACK_BYTES);
}

// Member i's piece within the chunk that begins at `first`: its bytes, and its place in the whole.
static int64_t chunk_bytes(const Operation *o, int i, int64_t first) {
    int64_t rest = o->call.in_counts[i] - first;
    return (rest < 0 ? 0 : rest < o->chunk ? rest : o->chunk) * (int64_t)dtype_size(o->call.dtype);
}

static char *chunk_at(const Operation *o, int i, int64_t first) {
    const Collective *c = &o->call;
    return part_at(c, c->kind == REDUCE_SCATTER ? c->in : c->out, c->in_counts, i) +
           first * (int64_t)dtype_size(c->dtype);
}

// Member i's copy in the scratch, aligned relative to 16 bytes like this rank's own piece.
static char *copy_at(const Operation *o, int i, const char *own) {
    return scratch(o, 0) + beyond_pack(own) + i * o->row * (int64_t)dtype_size(o->call.dtype);
}

static char *result_at(const Operation *o, int64_t first) {
    const Collective *c = &o->call;
    char *own = chunk_at(o, c->group.rank, first);
    if (c->kind == REDUCE_SCATTER) return (char *)c->out + first * (int64_t)dtype_size(c->dtype);
    // Only the root's tensor may change.
    return c->kind == REDUCE && c->group.rank != c->root ? copy_at(o, c->group.rank, own) : own;
}

// Sends the chunk that begins at `first` to the members whose pieces it has; receives their copies of mine.
static void exchange_copies(Operation *o, int64_t first) {
    int n = o->call.group.size, me = o->call.group.rank;
    const char *own = chunk_at(o, me, first);
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        send(o, chunk_at(o, i, first), chunk_bytes(o, i, first), i);
        receive(o, copy_at(o, i, own), chunk_bytes(o, me, first), i);
    }
}

// … and sends back what was reduced.
static void exchange_results(Operation *o, int64_t first) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        if (c->kind == ALL_REDUCE || i == c->root)
            send(o, result_at(o, first), chunk_bytes(o, me, first), i);
        if (c->kind == ALL_REDUCE || me == c->root)
            receive(o, chunk_at(o, i, first), chunk_bytes(o, i, first), i);
    }
}

static void reduce_directly(Operation *o) {
    const Collective *c = &o->call;
    int me = c->group.rank;
    for (int64_t i = 0; i <= o->chunks; i++) {
        int64_t first = i * o->chunk, before = first - o->chunk;
        int64_t count = i > 0 ? chunk_bytes(o, me, before) / (int64_t)dtype_size(c->dtype) : 0;
        if (count) {
            const char *own = chunk_at(o, me, before);
            launch_by_dtype(o, result_at(o, before), own, copy_at(o, 0, own), count);
        }
        if (i == o->chunks && c->kind == REDUCE_SCATTER) break;
        group_begin();
        if (i > 0 && c->kind != REDUCE_SCATTER) exchange_results(o, before);
        if (i < o->chunks) exchange_copies(o, first);
        group_end();
    }
}

// ---- which ----

// A group of one: copies what it sends to itself.
static void move_own(Operation *o) {
    const Collective *c = &o->call;
    if (c->kind == TRANSFERS) transfer_own(o);
    else copy(o, c->out, c->in, c->in_bytes);
}

void next_of_call(Operation *o) {
    const Collective *c = &o->call;
    if (o->comm && c->kind == TRANSFERS) return next_of_transfers(o);
    o->over = true;
    if (!o->comm) return move_own(o);
    if (o->direct) return reduce_directly(o);
    if (c->kind == ALL_GATHER) return all_gather(o);
    if (c->kind == BROADCAST) return broadcast(o);
    if (c->kind == ALL_TO_ALL || c->kind == GATHER || c->kind == SCATTER) {
        group_begin();
        if (c->kind == ALL_TO_ALL) exchange(o, c->in_counts, c->out_counts);
        else gather_or_scatter(o);
        return group_end();
    }
    reduce_by_nccl(o);
}
