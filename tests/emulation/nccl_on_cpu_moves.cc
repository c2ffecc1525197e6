// nccl_on_cpu_moves.cc: bytes in flight between the members of a communicator, and what each of them computes
// from what has arrived.
#include <errno.h>
#include <signal.h>

#include "nccl_on_cpu_inside.h"

static bool push_rings(ncclComm_t c) {
    bool moved = false;
    for (int r = 0; r < c->ranks; r++) {
        while (!c->out[r].empty()) {
            Message &m = c->out[r].front();
            int64_t count =
                ring(c, c->rank, r)->put(m.bytes.data() + m.done, (int64_t)(m.bytes.size() - m.done));
            m.done += count;
            if (m.done == m.bytes.size()) c->out[r].pop_front();
            else if (count == 0) break;
            moved = true;
        }
        while (!c->want[r].empty()) {
            Message &m = *c->want[r].front();
            int64_t count =
                ring(c, r, c->rank)->take(m.bytes.data() + m.done, (int64_t)(m.bytes.size() - m.done));
            m.done += count;
            if (m.done == m.bytes.size()) c->want[r].pop_front();
            else if (count == 0) break;
            moved = true;
        }
    }
    return moved;
}

static ncclResult_t compare(ncclComm_t c, const Op &op) {
    for (int r = 0; r < c->ranks; r++) {
        if (op.in[r].done < sizeof(Front)) continue;
        Front front;
        memcpy(&front, op.in[r].bytes.data(), sizeof front);
        const Header &theirs = front.header;
        const Place &there = front.place, &here = op.place[r];
        if (memcmp(&theirs, &op.header, sizeof theirs))
            return refuse(ncclInvalidUsage,
                          "rank %d: %s of %lld, type %d, operation %d, root %d, where rank %d has %s of "
                          "%lld, type %d, operation %d, root %d",
                          r, call_names[theirs.call], (long long)theirs.count, theirs.type, theirs.op,
                          theirs.root, c->rank, call_names[op.header.call], (long long)op.header.count,
                          op.header.type, op.header.op, op.header.root);
        if (here.before >= there.before + there.width || there.before >= here.before + here.width)
            return refuse(ncclInvalidUsage, "ranks %d and %d of %s launch what they share in two orders", r,
                          c->rank, call_names[op.header.call]);
    }
    return ncclSuccess;
}

template <class T>
static void reduce_as(T *sum, const T *x, int64_t count, int op) {
    for (int64_t i = 0; i < count; i++)
        sum[i] = op == ncclMax ? (x[i] > sum[i] ? x[i] : sum[i]) : T(sum[i] + x[i]);
}

static void reduce_into(char *sum, const char *x, int64_t count, int type, int op) {
    if (type == ncclFloat64) reduce_as((double *)sum, (const double *)x, count, op);
    if (type == ncclFloat32) reduce_as((float *)sum, (const float *)x, count, op);
    if (type == ncclInt32) reduce_as((int32_t *)sum, (const int32_t *)x, count, op);
    if (type == ncclFloat16) reduce_as((__half *)sum, (const __half *)x, count, op);
    if (type == ncclBfloat16) reduce_as((__nv_bfloat16 *)sum, (const __nv_bfloat16 *)x, count, op);
}

static ncclResult_t finish(ncclComm_t c, Op *op) {
    const Header &h = op->header;
    int64_t size = (int64_t)size_of((ncclDataType_t)h.type), bytes = h.count * size;
    cudaError_t status = cudaSuccess;
    auto from_rank = [&](int r) { return op->in[r].bytes.data() + sizeof(Front); };
    if (h.call == SEND && op->to && bytes)
        status = cudaMemcpy(op->to, from_rank(op->peer), bytes, cudaMemcpyHostToDevice);
    if (h.call == BROADCAST) {
        if (c->rank != h.root)
            status = cudaMemcpy(op->to, from_rank(h.root), bytes, cudaMemcpyHostToDevice);
        else if (op->to != op->from) status = cudaMemcpy(op->to, op->from, bytes, cudaMemcpyDeviceToDevice);
    }
    if (h.call == ALL_GATHER)
        for (int r = 0; r < c->ranks && status == cudaSuccess; r++) {
            char *to = (char *)op->to + r * bytes;
            if (r != c->rank) status = cudaMemcpy(to, from_rank(r), bytes, cudaMemcpyHostToDevice);
            else if (to != op->from) status = cudaMemcpy(to, op->from, bytes, cudaMemcpyDeviceToDevice);
        }
    bool reduces =
        h.call == ALL_REDUCE || h.call == REDUCE_SCATTER || (h.call == REDUCE && c->rank == h.root);
    if (reduces && status == cudaSuccess) {
        int n = c->ranks;
        int64_t whole = h.call == REDUCE_SCATTER ? h.count * n : h.count, piece = (whole + n - 1) / n;
        Bytes own((size_t)(whole * size)), sum((size_t)(whole * size));
        status = cudaMemcpy(own.data(), op->from, own.size(), cudaMemcpyDeviceToHost);
        for (int p = 0; p < n; p++) {  // piece p goes round from rank p + 1 to rank p
            int64_t first = p * piece, count = whole - first < piece ? whole - first : piece;
            for (int i = 1; i <= n && count > 0; i++) {
                int r = (p + i) % n;
                const char *x = (r == c->rank ? own.data() : from_rank(r)) + first * size;
                if (i == 1) memcpy(sum.data() + first * size, x, count * size);
                else reduce_into(sum.data() + first * size, x, count, h.type, h.op);
            }
        }
        if (status == cudaSuccess)
            status = cudaMemcpy(op->to, sum.data() + (h.call == REDUCE_SCATTER ? c->rank * bytes : 0),
                                bytes, cudaMemcpyHostToDevice);
    }
    return status == cudaSuccess
               ? ncclSuccess
               : refuse(ncclUnhandledCudaError, "%s: %s", call_names[h.call], cudaGetErrorString(status));
}

ncclResult_t push_ops(ncclComm_t c) {
    StreamWork runs;
    bool moved = push_rings(c);
    for (Op &op : c->ops) {
        ncclResult_t same = compare(c, op);
        if (same != ncclSuccess) return same;
    }
    bool done = true;
    for (int r = 0; r < c->ranks; r++) done = done && c->out[r].empty() && c->want[r].empty();
    static unsigned turn;
    bool look = !done && !moved && ++turn % 256 == 0;
    for (int r = 0; r < c->ranks && look; r++)
        if (kill(c->shared->member[r].pid, 0) < 0 && errno == ESRCH)
            return refuse(ncclRemoteError, "rank %d has gone", r);
    if (!done) return ncclInProgress;
    for (Op &op : c->ops) {
        ncclResult_t result = finish(c, &op);
        if (result != ncclSuccess) return result;
    }
    c->ops.clear();
    return ncclSuccess;
}
