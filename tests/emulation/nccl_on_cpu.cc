// nccl_on_cpu.cc: NCCL for the tests of comm_nccl.cu, between processes of one machine. It moves bytes
// through shared memory, without regard to speed, and is at least as strict as NCCL:
//
//   - a call on a blocking communicator returns when its bytes have been moved. NCCL's returns when the work
//     has been queued on the device; but its first call of a kind also waits until all members have arrived
//     and are connected
//   - on a non-blocking one, each call that needs others returns ncclInProgress and makes progress only when
//     asked (ncclCommGetAsyncError), and a call on a communicator that is not ready is refused
//   - the members of a collective must call the same one, with equal counts, types, operations and roots; a
//     receive must have the size of its send. NCCL would hang, or write beyond an array
//   - all arrays are entirely in device memory; those of a call are disjoint, or in place as NCCL defines it,
//     and no call writes what another of its group reads or writes: NCCL would give wrong results
//   - two ranks of one host (NCCL_HOSTID, read when the first communicator is made) on one GPU are refused
//   - nothing works after ncclCommAbort; a peer that has died is ncclRemoteError
//   - two ranks that connect for transfers must ask for the same number of connections: see connect()
//   - two ranks launch the operations that they share in the same order, on any communicators: kernels of
//     NCCL may wait for each other
//   - sums are those of a ring, rounded at each hop, and start at a different member for each piece, so they
//     are not in rank order. A maximum drops NaN
//
// Where the emulated streams have queues (CUDA_ON_CPU_STREAMS), a group of calls is queued on its stream, as
// NCCL does it; the stream waits for the other ranks, and the host does not. What goes wrong there is told by
// ncclCommGetAsyncError, and the stream gets no further.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nccl_on_cpu_inside.h"

const char *const call_names[] = {
    "?",          "ncclSend",          "ncclBroadcast",     "ncclAllGather", "ncclAllReduce",
    "ncclReduce", "ncclReduceScatter", "the first transfer"};

static char last_error[256];
static char host_id[HOST];
static int depth;
static std::vector<Op> grouped;
static ncclComm_t grouped_on;
static cudaStream_t grouped_in;

ncclResult_t refuse(ncclResult_t result, const char *format, ...) {
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
    const char *text = getenv("NCCL_ON_CPU_VERSION");  // for testing one that is too old
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

static ncclComm_t comm_new(const std::string &name, int ranks, int rank, bool blocking) {
    ncclComm_t c = new ncclComm;
    c->name = name;
    c->blocking = blocking;
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

// Once all have arrived; then the name is no longer needed.
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

// What a call returns that has started work on the communicator.
static ncclResult_t started(ncclComm_t c) {
    ncclResult_t result = ncclInProgress;
    while (c->blocking && result == ncclInProgress) {
        ncclCommGetAsyncError(c, &result);
        sched_yield();
    }
    return result;
}

// A communicator is blocking unless asked not to be.
static ncclResult_t check_config(const ncclConfig_t *config) {
    if (config->magic != 0xcafebeef)
        return refuse(ncclInvalidArgument, "ncclConfig_t argument not initialized");
    if (config->blocking != INT_MIN && config->blocking != 0 && config->blocking != 1)
        return refuse(ncclInvalidArgument, "Invalid config blocking attribute value %d", config->blocking);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    if (check_config(config) != ncclSuccess) return ncclInvalidArgument;
    if (ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks)
        return refuse(ncclInvalidArgument, "rank %d of %d", rank, ranks);
    if (strncmp(id.internal, "/nccl-on-cpu-", 13))
        return refuse(ncclInvalidArgument, "this id was not made by ncclGetUniqueId");
    const char *wanted = getenv("NCCL_COMM_BLOCKING");  // overrules the program
    const char *slow = getenv("NCCL_ON_CPU_SLOW");      // seconds, for testing a slow start
    if (slow) sleep((unsigned)atoi(slow));
    *comm = comm_new(id.internal, ranks, rank, wanted ? atoi(wanted) != 0 : config->blocking != 0);
    return started(*comm);
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
    comm->state = ncclInProgress;
    return started(comm);
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
        c->made = comm_new(c->name + "-" + std::to_string(c->splits) + "-" + std::to_string(color), size,
                           rank, c->blocking);
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

static void post(ncclComm_t c, int to, const Header &header, const Place &place, const void *from,
                 size_t bytes) {
    Message message;
    const Front front = {header, place};
    message.bytes.resize(sizeof front + bytes);
    memcpy(message.bytes.data(), &front, sizeof front);
    if (bytes) cudaMemcpy(message.bytes.data() + sizeof front, from, bytes, cudaMemcpyDeviceToHost);
    c->out[to].push_back(std::move(message));
}

static void await(ncclComm_t c, Op *op, int from, size_t bytes) {
    op->in[from].bytes.resize(sizeof(Front) + bytes);
    c->want[from].push_back(&op->in[from]);
}

// What this rank sends and receives in one call. A reduction receives every rank's whole array.
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
        // In a collective headers go to all ranks: calls are compared even if no bytes are sent.
        if (gives || h.call != SEND) post(c, r, h, op->place[r], op->from, gives ? bytes : 0);
        if (takes || h.call != SEND) await(c, op, r, takes ? bytes : 0);
    }
}

// NCCL makes the connections that a group needs before it starts, and two ranks opposite each other in the
// ring of ranks exchange all their requests at once, so they must want the same number of connections. Here
// that is required of every pair.
static void connect(ncclComm_t c, std::vector<Op> *ops) {
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
            ops->push_back(op);
        }
}

static void number_launches(ncclComm_t c, std::vector<Op> *ops) {
    static std::map<int, int64_t> launched;  // by process
    for (Op &op : *ops) op.place.resize(c->ranks);
    for (int r = 0; r < c->ranks; r++) {
        int64_t width = 0, &count = launched[c->shared->member[r].pid];
        for (Op &op : *ops) width += op.peer < 0 || op.peer == r;
        for (Op &op : *ops) op.place[r] = {count, width};
        count += width;
    }
}

ncclResult_t ncclGroupStart(void) {
    if (depth++ == 0) grouped_on = NULL;
    return ncclSuccess;
}

// What an operation reads and writes on this rank.
struct Arrays {
    const char *read, *write;
    size_t reads, writes;
};

static Arrays arrays_of(ncclComm_t c, const Op &op) {
    const Header &h = op.header;
    const size_t one = (size_t)h.count * size_of((ncclDataType_t)h.type), all = one * (size_t)c->ranks;
    const bool root = h.root == c->rank;
    Arrays a = {(const char *)op.from, (const char *)op.to, one, one};
    if (h.call == ALL_GATHER) a.writes = all;
    if (h.call == REDUCE_SCATTER) a.reads = all;
    if (!op.from || (h.call == BROADCAST && !root)) a.reads = 0;
    if (!op.to || (h.call == REDUCE && !root)) a.writes = 0;
    return a;
}

static bool overlap(const char *a, size_t of_a, const char *b, size_t of_b) {
    return of_a && of_b && a < b + of_b && b < a + of_a;
}

// NCCL does the operations of a group at the same time, and each of them piece by piece.
static ncclResult_t check_arrays(ncclComm_t c) {
    for (const Op &op : grouped) {
        const Arrays a = arrays_of(c, op);
        const size_t own = (size_t)c->rank * (a.reads < a.writes ? a.reads : a.writes);
        const bool in_place = op.header.call == ALL_GATHER       ? a.read == a.write + own
                              : op.header.call == REDUCE_SCATTER ? a.write == a.read + own
                                                                 : a.read == a.write;
        if (!in_place && overlap(a.read, a.reads, a.write, a.writes))
            return refuse(ncclInvalidUsage, "%s: its arrays overlap, and not as they do in place",
                          call_names[op.header.call]);
        for (const Op &other : grouped) {
            const Arrays b = arrays_of(c, other);
            if (&other != &op && (overlap(a.write, a.writes, b.read, b.reads) ||
                                  overlap(a.write, a.writes, b.write, b.writes)))
                return refuse(ncclInvalidUsage, "%s writes what %s of the same group reads or writes",
                              call_names[op.header.call], call_names[other.header.call]);
        }
    }
    return ncclSuccess;
}

// NCCL_ON_CPU_LOST=RANK:SIGNAL, for tests of what happens to the others: this rank is killed or stopped in
// its first call.
static void lose(ncclComm_t c) {
    int rank, signal;
    const char *text = getenv("NCCL_ON_CPU_LOST");
    if (text && sscanf(text, "%d:%d", &rank, &signal) == 2 && rank == c->rank) raise(signal);
}

// NCCL_ON_CPU_BUFFERS=BYTES, for tests with little memory: a communicator takes so much of it in its first
// call.
static ncclResult_t take_buffers(ncclComm_t c) {
    const char *text = getenv("NCCL_ON_CPU_BUFFERS");
    if (!text || c->buffers || cudaMalloc(&c->buffers, strtoull(text, NULL, 10)) == cudaSuccess)
        return ncclSuccess;
    return refuse(ncclUnhandledCudaError, "Failed to CUDA calloc %s bytes", text);
}

static void begin_ops(ncclComm_t c, const std::vector<Op> &ops) {
    StreamWork runs;
    c->ops = ops;
    for (Op &op : c->ops) plan(c, &op);
}

// What is queued on a communicator runs in the order of its calls, whatever the streams.
static ncclResult_t queue_ops(ncclComm_t c, const std::vector<Op> &ops) {
    const int64_t number = c->queued++;
    stream_add(grouped_in, [c, ops, number] {
        if (c->run != number || c->state != ncclSuccess) return false;
        if (c->ops.empty()) begin_ops(c, ops);
        const ncclResult_t result = push_ops(c);
        if (result != ncclInProgress) c->state = result;
        c->run += result == ncclSuccess;
        return result == ncclSuccess;
    });
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--depth > 0 || grouped.empty()) return ncclSuccess;
    ncclComm_t c = grouped_on;
    lose(c);
    ncclResult_t apart = check_arrays(c);
    if (apart == ncclSuccess) apart = take_buffers(c);
    if (apart != ncclSuccess) return grouped.clear(), apart;
    std::vector<Op> ops;
    connect(c, &ops);
    ops.insert(ops.end(), grouped.begin(), grouped.end());
    grouped.clear();
    number_launches(c, &ops);
    if (streams_defer() && c->blocking) return queue_ops(c, ops);
    // Without a queue. The book has only blocking communicators.
    if (streams_defer()) cudaStreamSynchronize(grouped_in);
    begin_ops(c, ops);
    c->state = ncclInProgress;
    return started(c);
}

static ncclResult_t add(ncclComm_t c, Call call, const void *from, void *to, size_t count,
                        ncclDataType_t type, int op, int root, int peer, cudaStream_t stream) {
    ncclResult_t ready = check_ready(c, call_names[call]);
    if (ready != ncclSuccess) return ready;
    if (grouped_on && grouped_on != c)
        return refuse(ncclInvalidUsage, "a group of calls on two communicators: not here");
    if (grouped_on && grouped_in != stream)
        return refuse(ncclInvalidUsage, "a group of calls on two streams: not here");
    if (peer >= c->ranks || root >= c->ranks || peer == c->rank || root < 0)
        return refuse(ncclInvalidArgument,
                      "%s: there is no rank %d in this communicator of %d, or it is this one",
                      call_names[call], peer >= 0 ? peer : root, c->ranks);
    grouped_on = c;
    grouped_in = stream;
    if (count == 0 && peer < 0) return ncclSuccess;
    Op one;
    one.header = {call, type, op, root, (int64_t)count};
    one.peer = peer;
    one.from = from;
    one.to = to;
    grouped.push_back(one);
    return ncclSuccess;
}

// A call outside a group is a group of its own.
static ncclResult_t enqueue(ncclComm_t c, Call call, const void *from, void *to, size_t count,
                            ncclDataType_t type, int op, int root, int peer, cudaStream_t stream) {
    if (depth > 0) return add(c, call, from, to, count, type, op, root, peer, stream);
    ncclGroupStart();
    ncclResult_t added = add(c, call, from, to, count, type, op, root, peer, stream),
                 ended = ncclGroupEnd();
    return added == ncclSuccess ? ended : added;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return enqueue(comm, SEND, from, nullptr, count, type, 0, 0, peer, stream);
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return enqueue(comm, SEND, nullptr, to, count, type, 0, 0, peer, stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, BROADCAST, from, to, count, type, 0, root, -1, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return enqueue(comm, ALL_GATHER, from, to, count, type, 0, 0, -1, stream);
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, ALL_REDUCE, from, to, count, type, op, 0, -1, stream);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, REDUCE, from, to, count, type, op, root, -1, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return enqueue(comm, REDUCE_SCATTER, from, to, count, type, op, 0, -1, stream);
}

// ---- progress ----

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *result) {
    if (c->aborted)
        return refuse(ncclInvalidUsage, "ncclCommGetAsyncError on a communicator that was aborted");
    if (c->state == ncclInProgress) {
        if (!c->opened) c->state = open_comm(c);
        else if (c->child) c->state = push_split(c);
        else c->state = push_ops(c);
    }
    // A device goes on, whatever its host waits for; hosts ask this some 50 times a second.
    for (int i = 0; i < 64; i++) streams_run_some();
    *result = c->state;
    return ncclSuccess;
}

// ---- the end ----

ncclResult_t ncclCommFinalize(ncclComm_t c) {
    ncclResult_t ready = check_ready(c, "ncclCommFinalize");
    if (ready != ncclSuccess) return ready;
    streams_run_until([c] { return c->run == c->queued || c->state != ncclSuccess; });
    c->finalized = true;
    return c->state;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c->state == ncclInProgress)
        return refuse(ncclInvalidArgument, "ncclCommDestroy of a communicator that is at work");
    munmap(c->shared, c->mapped);
    if (c->buffers) cudaFree(c->buffers);
    delete c;
    return ncclSuccess;
}

// The memory stays, so that later calls can be refused.
ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (!c->opened) shm_unlink(c->name.c_str());
    c->aborted = true;
    return ncclSuccess;
}
