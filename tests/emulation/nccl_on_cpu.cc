// nccl_on_cpu.cc: NCCL for the tests of comm_nccl.cu, between processes of one machine. It moves bytes
// through shared memory, at nobody's best speed, and is as strict as NCCL, or more:
//
//   - every communicator is non-blocking: each call that needs others says ncclInProgress, moves on only
//     when asked (ncclCommGetAsyncError), and a call on a communicator that is not ready is refused
//   - the members of a collective must have called the same one, with equal counts, types, operations and
//     roots; a receive must have the size of its send. NCCL would hang, or write beyond an array
//   - all addresses are of device memory, whole
//   - two ranks of one host (NCCL_HOSTID, read when the first communicator is made) on one GPU are refused
//   - nothing works after ncclCommAbort; a peer that has died is ncclRemoteError
//   - two ranks that connect by transfers must ask for as many connections: see connect()
//   - two ranks launch what they share in one order, on whatever communicators: kernels of NCCL may wait
//     for each other
//   - sums are those of a ring, rounded at each hop, and begin with another member for each piece: so
//     they are not in rank order. A maximum forgets NaN
//
// The emulated streams run everything at once, so an operation is done when its bytes have been copied.
#include "nccl_on_cpu.h"

// Shared memory is the host's; cuda_on_cpu.h's look at each copy is for kernels.
#undef memcpy
#undef memset

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <map>
#include <string>
#include <vector>

typedef std::vector<char> Bytes;

// ---- shared memory of a communicator ----

enum { MOST_RANKS = 64, RING = 1 << 16, HOST = 96 };

struct Ring {  // bytes from one rank to another; both counts only grow
    std::atomic<int64_t> given, taken;
    char data[RING];

    // As many of the bytes as fit, or are there.
    int64_t put(const char *from, int64_t count) {
        int64_t at = given, room = RING - (at - taken), to_end = RING - at % RING;
        if (count > room) count = room;
        if (count > to_end) count = to_end;
        memcpy(data + at % RING, from, (size_t)count);
        given = at + count;
        return count;
    }
    int64_t take(char *to, int64_t count) {
        int64_t at = taken, there = given - at, to_end = RING - at % RING;
        if (count > there) count = there;
        if (count > to_end) count = to_end;
        memcpy(to, data + at % RING, (size_t)count);
        taken = at + count;
        return count;
    }
};

struct Member {
    std::atomic<int> pid;
    char host[HOST], bus[32];
    // Of split number `splits`; two slots, as nobody can be two splits ahead.
    std::atomic<int64_t> splits;
    int color[2], key[2];
};

struct Shared {
    std::atomic<int> here;  // ranks that have opened it
    Member member[MOST_RANKS];
    Ring ring[];  // (from, to)
};

// ---- a communicator ----

struct Message {
    Bytes bytes;
    size_t done = 0;
};

// Goes before the bytes of every message, for comparison.
struct Header {
    int32_t call, type, op, root;
    int64_t count;
};

// The place of an operation among all that this rank has launched with another: those of one group are
// launched at once.
struct Place {
    int64_t before, width;
};
enum Call { SEND = 1, BROADCAST, ALL_GATHER, ALL_REDUCE, REDUCE, REDUCE_SCATTER, CONNECT };
static const char *const call_names[] = {
    "?",          "ncclSend",          "ncclBroadcast",     "ncclAllGather", "ncclAllReduce",
    "ncclReduce", "ncclReduceScatter", "the first transfer"};

struct Op {
    Header header;
    int peer = -1;  // of a transfer
    const void *from = nullptr;
    void *to = nullptr;
    std::vector<Message> in;   // from each rank whose bytes are wanted
    std::vector<Place> place;  // with each rank
};

struct ncclComm {
    std::string name;
    Shared *shared = nullptr;
    size_t mapped = 0;
    int rank = 0, ranks = 0;
    bool opened = false, aborted = false, finalized = false;
    ncclResult_t state = ncclInProgress;
    std::vector<Op> ops;
    std::vector<std::deque<Message>> out;       // to each rank
    std::vector<std::deque<Message *>> want;    // from each
    std::vector<bool> sends_to, receives_from;  // connected
    // a split under way
    ncclComm_t *child = nullptr, made = nullptr;
    int64_t splits = 0;
};

static char last_error[256];
static char host_id[HOST];
static int depth;
static std::vector<Op> grouped;
static ncclComm_t grouped_on;

static ncclResult_t refuse(ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static ncclResult_t refuse(ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return result;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
    return texts[result];
}

const char *ncclGetLastError(ncclComm_t) { return last_error; }

ncclResult_t ncclGetVersion(int *version) {
    const char *text = getenv("NCCL_ON_CPU_VERSION");  // for the test of one that is too old
    *version = text ? atoi(text) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int count;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/nccl-on-cpu-%d-%d", (int)getpid(), count++);
    return ncclSuccess;
}

// ---- start ----

static ncclComm_t comm_new(const std::string &name, int ranks, int rank) {
    ncclComm_t c = new ncclComm;
    c->name = name;
    c->ranks = ranks;
    c->rank = rank;
    c->out.resize(ranks);
    c->want.resize(ranks);
    c->sends_to.resize(ranks);
    c->receives_from.resize(ranks);
    c->mapped = sizeof(Shared) + sizeof(Ring) * ranks * ranks;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)c->mapped) != 0) {
        refuse(ncclSystemError, "%s cannot be opened: %s", name.c_str(), strerror(errno));
        c->state = ncclSystemError;
        return c;
    }
    c->shared = (Shared *)mmap(NULL, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (!*host_id) {
        const char *given = getenv("NCCL_HOSTID");
        if (given) snprintf(host_id, sizeof host_id, "%s", given);
        else gethostname(host_id, sizeof host_id - 1);
    }
    Member *me = &c->shared->member[rank];
    memcpy(me->host, host_id, sizeof me->host);
    int device;
    cudaGetDevice(&device);
    cudaDeviceGetPCIBusId(me->bus, sizeof me->bus, device);
    me->pid = getpid();
    c->shared->here++;
    return c;
}

// When all have come; the name is not needed any more then.
static ncclResult_t open_comm(ncclComm_t c) {
    if (c->opened || !c->shared) return c->state;
    if (c->shared->here < c->ranks) return ncclInProgress;
    c->opened = true;
    shm_unlink(c->name.c_str());
    for (int a = 0; a < c->ranks; a++)
        for (int b = 0; b < a; b++) {
            const Member *x = &c->shared->member[a], *y = &c->shared->member[b];
            if (!strcmp(x->host, y->host) && !strcmp(x->bus, y->bus))
                return refuse(ncclInvalidUsage,
                              "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", b, a,
                              x->bus);
        }
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (config->magic != 0xcafebeef || config->blocking != 0)
        return refuse(ncclInvalidArgument, "communicators are non-blocking here");
    if (ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks)
        return refuse(ncclInvalidArgument, "rank %d of %d", rank, ranks);
    if (strncmp(id.internal, "/nccl-on-cpu-", 13))
        return refuse(ncclInvalidArgument, "this id was not made by ncclGetUniqueId");
    *comm = comm_new(id.internal, ranks, rank);
    return ncclInProgress;
}

static ncclResult_t check_ready(ncclComm_t c, const char *call) {
    if (!c) return refuse(ncclInvalidArgument, "%s: no communicator", call);
    if (c->aborted) return refuse(ncclInvalidUsage, "%s on a communicator that was aborted", call);
    if (c->finalized) return refuse(ncclInvalidUsage, "%s on a communicator that was finalized", call);
    if (c->state == ncclInProgress)
        return refuse(ncclInvalidArgument,
                      "%s: Attempt to use communicator before the previous operation returned ncclSuccess",
                      call);
    return c->state;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
    ncclResult_t ready = check_ready(comm, "ncclCommSplit");
    if (ready != ncclSuccess) return ready;
    if (config) return refuse(ncclInvalidArgument, "ncclCommSplit takes no configuration here");
    int64_t number = ++comm->splits;
    Member *me = &comm->shared->member[comm->rank];
    me->color[number % 2] = color;
    me->key[number % 2] = key;
    me->splits = number;
    *child = NULL;
    comm->child = child;
    return comm->state = ncclInProgress;
}

static ncclResult_t push_split(ncclComm_t c) {
    const Member *all = c->shared->member, *me = &all[c->rank];
    int slot = (int)(c->splits % 2), size = 0, rank = 0, color = me->color[slot];
    for (int r = 0; r < c->ranks; r++)
        if (all[r].splits < c->splits) return ncclInProgress;
    if (color == NCCL_SPLIT_NOCOLOR) {
        c->child = nullptr;
        return ncclSuccess;
    }
    if (!c->made) {
        for (int r = 0; r < c->ranks; r++)
            if (all[r].color[slot] == color) {
                size++;
                rank +=
                    all[r].key[slot] < me->key[slot] || (all[r].key[slot] == me->key[slot] && r < c->rank);
            }
        c->made =
            comm_new(c->name + "-" + std::to_string(c->splits) + "-" + std::to_string(color), size, rank);
    }
    ncclResult_t opened = open_comm(c->made);
    if (opened == ncclInProgress) return opened;
    c->made->state = opened;
    *c->child = c->made;
    c->child = nullptr;
    c->made = nullptr;
    return opened;
}

// ---- groups of calls ----

static size_t size_of(ncclDataType_t type) {
    return type == ncclInt8                              ? 1
           : type == ncclFloat16 || type == ncclBfloat16 ? 2
           : type == ncclFloat64                         ? 8
                                                         : 4;
}

static Ring *ring(ncclComm_t c, int from, int to) { return &c->shared->ring[from * c->ranks + to]; }

static void post(ncclComm_t c, int to, const Header &header, const Place &place, const void *from,
                 size_t bytes) {
    Message message;
    message.bytes.resize(sizeof header + sizeof place + bytes);
    memcpy(message.bytes.data(), &header, sizeof header);
    memcpy(message.bytes.data() + sizeof header, &place, sizeof place);
    if (bytes)
        cudaMemcpy(message.bytes.data() + sizeof header + sizeof place, from, bytes,
                   cudaMemcpyDeviceToHost);
    c->out[to].push_back(std::move(message));
}

static void await(ncclComm_t c, Op *op, int from, size_t bytes) {
    op->in[from].bytes.resize(sizeof(Header) + sizeof(Place) + bytes);
    c->want[from].push_back(&op->in[from]);
}

// What this rank gives and takes in one call. A reduction takes everybody's whole array.
static void plan(ncclComm_t c, Op *op) {
    const Header &h = op->header;
    size_t bytes = (size_t)h.count * size_of((ncclDataType_t)h.type);
    if (h.call == REDUCE_SCATTER) bytes *= c->ranks;
    op->in.resize(c->ranks);
    for (int r = 0; r < c->ranks; r++) {
        if (r == c->rank || (op->peer >= 0 && r != op->peer)) continue;
        bool gives = true, takes = true;
        if (h.call == SEND) gives = op->from, takes = op->to;
        if (h.call == BROADCAST) gives = c->rank == h.root, takes = r == h.root;
        if (h.call == REDUCE) gives = r == h.root, takes = c->rank == h.root;
        if (h.call == CONNECT) bytes = 0;
        // In a collective headers go to all: calls are compared even where no bytes go.
        if (gives || h.call != SEND) post(c, r, h, op->place[r], op->from, gives ? bytes : 0);
        if (takes || h.call != SEND) await(c, op, r, takes ? bytes : 0);
    }
}

// NCCL makes the connections that a group needs before it starts, and two ranks that are each other's
// opposite in the ring of ranks tell each other all at once: they must then want the same number of them.
// This one asks it of every pair.
static void connect(ncclComm_t c) {
    std::vector<int> wants(c->ranks);
    for (Op &op : grouped) {
        if (op.peer < 0) continue;
        std::vector<bool> &known = op.from ? c->sends_to : c->receives_from;
        wants[op.peer] += !known[op.peer];
        known[op.peer] = true;
    }
    for (int r = 0; r < c->ranks; r++)
        if (wants[r]) {
            Op op;
            op.header = {CONNECT, ncclInt8, 0, 0, wants[r]};
            op.peer = r;
            c->ops.push_back(op);
        }
}

static void number_launches(ncclComm_t c) {
    static std::map<int, int64_t> launched;  // by process
    for (Op &op : c->ops) op.place.resize(c->ranks);
    for (int r = 0; r < c->ranks; r++) {
        int64_t width = 0, &count = launched[c->shared->member[r].pid];
        for (Op &op : c->ops) width += op.peer < 0 || op.peer == r;
        for (Op &op : c->ops) op.place[r] = {count, width};
        count += width;
    }
}

ncclResult_t ncclGroupStart(void) {
    if (depth++ == 0) grouped_on = NULL;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--depth > 0 || grouped.empty()) return ncclSuccess;
    ncclComm_t c = grouped_on;
    connect(c);
    for (Op &op : grouped) c->ops.push_back(op);
    grouped.clear();
    number_launches(c);
    for (Op &op : c->ops) plan(c, &op);
    return c->state = ncclInProgress;
}

static ncclResult_t add(ncclComm_t c, Call call, const void *from, void *to, size_t count,
                        ncclDataType_t type, int op, int root, int peer) {
    ncclResult_t ready = check_ready(c, call_names[call]);
    if (ready != ncclSuccess) return ready;
    if (depth == 0) return refuse(ncclInvalidUsage, "%s outside a group: not here", call_names[call]);
    if (grouped_on && grouped_on != c)
        return refuse(ncclInvalidUsage, "a group of calls on two communicators: not here");
    if (peer >= c->ranks || root >= c->ranks || peer == c->rank || root < 0)
        return refuse(ncclInvalidArgument,
                      "%s: there is no rank %d in this communicator of %d, or it is this one",
                      call_names[call], peer >= 0 ? peer : root, c->ranks);
    grouped_on = c;
    if (count == 0 && peer < 0) return ncclSuccess;
    Op one;
    one.header = {call, type, op, root, (int64_t)count};
    one.peer = peer;
    one.from = from;
    one.to = to;
    grouped.push_back(one);
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t) {
    return add(comm, SEND, from, nullptr, count, type, 0, 0, peer);
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t) {
    return add(comm, SEND, nullptr, to, count, type, 0, 0, peer);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t) {
    return add(comm, BROADCAST, from, to, count, type, 0, root, -1);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t) {
    return add(comm, ALL_GATHER, from, to, count, type, 0, 0, -1);
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t) {
    return add(comm, ALL_REDUCE, from, to, count, type, op, 0, -1);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t) {
    return add(comm, REDUCE, from, to, count, type, op, root, -1);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t) {
    return add(comm, REDUCE_SCATTER, from, to, count, type, op, 0, -1);
}

// ---- moving on ----

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
        if (op.in[r].done < sizeof(Header) + sizeof(Place)) continue;
        Header theirs;
        Place there, here = op.place[r];
        memcpy(&theirs, op.in[r].bytes.data(), sizeof theirs);
        memcpy(&there, op.in[r].bytes.data() + sizeof theirs, sizeof there);
        if (memcmp(&theirs, &op.header, sizeof theirs))
            return refuse(ncclInvalidUsage,
                          "rank %d: %s of %lld, type %d, operation %d, root %d, where rank %d has %s of "
                          "%lld, type %d, "
                          "operation %d, root %d",
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
    auto from_rank = [&](int r) { return op->in[r].bytes.data() + sizeof(Header) + sizeof(Place); };
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

static ncclResult_t push_ops(ncclComm_t c) {
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

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *result) {
    if (c->aborted)
        return refuse(ncclInvalidUsage, "ncclCommGetAsyncError on a communicator that was aborted");
    if (c->state == ncclInProgress) {
        if (!c->opened) c->state = open_comm(c);
        else if (c->child) c->state = push_split(c);
        else c->state = push_ops(c);
    }
    *result = c->state;
    return ncclSuccess;
}

// ---- the end ----

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    ncclResult_t ready = check_ready(c, "ncclCommFinalize");
    if (ready == ncclSuccess) c->finalized = true;
    return ready;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c->state == ncclInProgress)
        return refuse(ncclInvalidArgument, "ncclCommDestroy of a communicator that is at work");
    munmap(c->shared, c->mapped);
    delete c;
    return ncclSuccess;
}

// The memory stays, so that whatever comes after can be refused.
ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (!c->opened) shm_unlink(c->name.c_str());
    c->aborted = true;
    return ncclSuccess;
}
