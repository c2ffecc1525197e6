// comm_nccl_calls.cu: what each call of comm.h asks of NCCL.
//
// Sums. ncclAllReduce, ncclReduce and ncclReduceScatter add f32, f64 and i32. They would add 16-bit
// numbers in 16 bits (rounded at each hop of the ring: small gradients are lost), and their maximum
// forgets NaN. So sums of narrow dtypes and maxima of floats go as comm_mpi.c's do, by members' pieces:
//
//     1. piece i of every member goes to member i        grouped ncclSend, ncclRecv
//     2. member i reduces the copies, 0 first, in f32    reduce_members, below
//     3. and gives the result to who is to have it       grouped ncclSend, ncclRecv
//
// That sends the very bytes of a ring, 2 (n - 1) / n K for an all-reduce, in 2 steps instead of 2 (n -
// 1); on several nodes it leaves out what a tree would save.
//
// Bytes are those of comm.h, which is what the algorithms of this book are charged with; NCCL may choose a
// tree, or the switch's own adders, and put other bytes on the wire.
#include <string.h>

#include "comm_nccl.h"

enum { CHUNK_BYTES = 4 << 20 };  // of a piece, that a member reduces at once: n of these are its scratch

// ---- moving bytes ----

static int64_t part_bytes(const Collective *c, const int64_t *counts, int i) {
    return counts[i] * (int64_t)dtype_size(c->dtype);
}

// Elements before part i.
static int64_t first_of(const int64_t *counts, int i) {
    int64_t first = 0;
    for (int j = 0; j < i; j++) first += counts[j];
    return first;
}

static char *part_at(const Collective *c, const void *whole, const int64_t *counts, int i) {
    return (char *)whole + first_of(counts, i) * (int64_t)dtype_size(c->dtype);
}

static void copy(const Operation *o, void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from)
        CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, stream_of(o)));
}

// Both ends know the same number of bytes, and leave a transfer of none out.
static void send(Operation *o, const void *from, int64_t bytes, int member) {
    if (bytes == 0) return;
    NCCL_CALL(ncclSend(from, (size_t)bytes, ncclInt8, member, o->comm->nccl, stream_of(o)));
    o->sent += bytes;
}

static void receive(Operation *o, void *to, int64_t bytes, int member) {
    if (bytes > 0) NCCL_CALL(ncclRecv(to, (size_t)bytes, ncclInt8, member, o->comm->nccl, stream_of(o)));
}

static void group_begin(void) { NCCL_CALL(ncclGroupStart()); }

static void group_end(Operation *o) {
    NCCL_CALL(ncclGroupEnd());
    o->asked = o->comm->nccl;
}

// Parts of `in` to members, parts of `out` from them; NULL counts: nothing that way.
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

// Between the root and everyone else.
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

// Two ranks connect at their first contact, and NCCL wants both to ask for the same connections then. The
// batches in which they meet may differ (one may send and receive where the other only receives), so they
// exchange a byte each way first. -1: not yet.
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
    group_end(o);
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

// The batch is one launch, so that all of it runs at once. It goes when the first of its other ends has
// come: a rank that waits on its device for one part of the batch may call for the next only after that.
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
        group_end(o);
    }
    o->over = true;
}

// ---- sums by NCCL ----

static ncclDataType_t nccl_dtype(DType dtype) {
    return dtype == F64 ? ncclFloat64 : dtype == I32 ? ncclInt32 : ncclFloat32;
}

// What NCCL itself adds, or compares, as comm.h promises.
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
    size_t total = (size_t)first_of(counts, n);
    int64_t K = (int64_t)total * (int64_t)dtype_size(c->dtype), k = part_bytes(c, counts, me);
    o->sent = K - k;
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
    group_end(o);
}

static void all_gather(Operation *o) {
    const Collective *c = &o->call;
    const int64_t *counts = c->out_counts;
    int n = c->group.size, me = c->group.rank;
    ncclComm_t comm = o->comm->nccl;
    o->sent = (n - 1) * part_bytes(c, counts, me);
    group_begin();
    if (parts_are_equal(counts, n)) {
        if (counts[0])
            NCCL_CALL(ncclAllGather(c->in, c->out, (size_t)part_bytes(c, counts, me), ncclInt8, comm,
                                    stream_of(o)));
    } else {
        for (int i = 0; i < n; i++)
            if (counts[i])
                NCCL_CALL(ncclBroadcast(i == me ? c->in : part_at(c, c->out, counts, i),
                                        part_at(c, c->out, counts, i), (size_t)part_bytes(c, counts, i),
                                        ncclInt8, i, comm, stream_of(o)));
    }
    group_end(o);
}

static void broadcast(Operation *o) {
    const Collective *c = &o->call;
    int64_t bytes = part_bytes(c, c->in_counts, 0);
    if (c->group.rank == c->root) o->sent = (c->group.size - 1) * bytes;
    if (bytes == 0) return;
    group_begin();
    NCCL_CALL(ncclBroadcast(c->out, c->out, (size_t)bytes, ncclInt8, c->root, o->comm->nccl, stream_of(o)));
    group_end(o);
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

// out[i] = the copies of all members, the first first; others (members, stride) holds all but mine.
template <class T>
__global__ void reduce_members(T *out, const T *own, const T *others, int64_t stride, int members, int me,
                               int64_t count, bool maximum) {
    typedef typename SumOf<T>::Type Sum;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        Sum sum = (Sum)(me == 0 ? own[i] : others[i]);
        for (int j = 1; j < members; j++) {
            Sum x = (Sum)(j == me ? own[i] : others[j * stride + i]);
            if (!maximum) sum += x;
            else if (!(sum >= x) && sum == sum) sum = x;  // a NaN in sum stays, and one in x is taken
        }
        out[i] = T(sum);
    }
}

template <class T>
static void launch_reduction(const Operation *o, void *out, const char *own, const char *others,
                             int64_t count) {
    int64_t blocks = (count + 8 * 256 - 1) / (8 * 256);  // about 8 elements a thread
    LAUNCH((reduce_members<T>), (unsigned)blocks, 256, 0, stream_of(o), (T *)out, (const T *)own,
           (const T *)others, o->chunk, o->call.group.size, o->call.group.rank, count,
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
    o->over = o->chunks == 0;
    scratch(o, (size_t)(n * o->chunk) * dtype_size(c->dtype));
}

// Of member i's piece, in the chunk that begins at `first`: bytes, and where they stand in the whole.
static int64_t chunk_bytes(const Operation *o, int i, int64_t first) {
    int64_t rest = o->call.in_counts[i] - first;
    return (rest < 0 ? 0 : rest < o->chunk ? rest : o->chunk) * (int64_t)dtype_size(o->call.dtype);
}

static char *chunk_at(const Operation *o, int i, int64_t first) {
    const Collective *c = &o->call;
    return part_at(c, c->kind == REDUCE_SCATTER ? c->in : c->out, c->in_counts, i) +
           first * (int64_t)dtype_size(c->dtype);
}

// Two steps a chunk: its copies are sent; they are reduced, and the result is sent.
static void next_of_direct(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    int64_t size = (int64_t)dtype_size(c->dtype), row = o->chunk * size, first = o->step / 2 * o->chunk;
    int64_t mine = chunk_bytes(o, me, first);
    bool copies = o->step % 2 == 0, back = !copies && c->kind != REDUCE_SCATTER;
    char *result = chunk_at(o, me, first), *copies_at = scratch(o, 0);
    if (c->kind == REDUCE_SCATTER) result = (char *)c->out + first * size;
    if (c->kind == REDUCE && me != c->root)
        result = copies_at + me * row;  // who is not the root keeps its own
    if (!copies && mine) launch_by_dtype(o, result, chunk_at(o, me, first), copies_at, mine / size);
    if (copies || back) group_begin();
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        if (copies) {
            send(o, chunk_at(o, i, first), chunk_bytes(o, i, first), i);
            receive(o, copies_at + i * row, mine, i);
        } else if (back) {
            if (c->kind == ALL_REDUCE || i == c->root) send(o, result, mine, i);
            if (c->kind == ALL_REDUCE || me == c->root)
                receive(o, chunk_at(o, i, first), chunk_bytes(o, i, first), i);
        }
    }
    if (copies || back) group_end(o);
    o->over = ++o->step == 2 * o->chunks;
}

// ---- which ----

// A group of one: what it has for itself.
static void move_own(Operation *o) {
    const Collective *c = &o->call;
    if (c->kind == TRANSFERS) transfer_own(o);
    else if (c->kind != ALL_REDUCE && c->kind != REDUCE && c->kind != BROADCAST)
        copy(o, c->out, c->in, part_bytes(c, c->in_counts ? c->in_counts : c->out_counts, 0));
}

void next_of_call(Operation *o) {
    const Collective *c = &o->call;
    if (o->comm && o->direct) return next_of_direct(o);
    if (o->comm && c->kind == TRANSFERS) return next_of_transfers(o);
    o->over = true;
    if (!o->comm) return move_own(o);
    if (c->kind == ALL_GATHER) return all_gather(o);
    if (c->kind == BROADCAST) return broadcast(o);
    if (c->kind == ALL_TO_ALL || c->kind == GATHER || c->kind == SCATTER) {
        group_begin();
        if (c->kind == ALL_TO_ALL) exchange(o, c->in_counts, c->out_counts);
        else gather_or_scatter(o);
        return group_end(o);
    }
    reduce_by_nccl(o);
}
