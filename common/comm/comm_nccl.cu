// comm_nccl.cu: the data plane over NCCL, between GPUs.
//
// One communication stream beside the compute stream, joined to it by events:
//
//     compute   ... gradient | next layer's backward ...        | what uses the sum
//                            mark                                wait
//     NCCL                   '--> all-reduce -------------- end --'
//
// The mark is recorded at the call, so a collective waits for what was given to the device before it and
// for nothing later; comm_wait makes the compute stream wait for the end, and the host goes on. Memory is
// released in the order of the compute stream (device_cuda.h), that is after that end: a tensor freed
// behind comm_wait outlives its bytes' travel.
//
// Every communicator is non-blocking: a call of NCCL that needs other ranks says ncclInProgress, and
// transport_test asks again. So a rank that does not come is comm.c's to find, here as over MPI; and what
// waits on the device is looked at by transport_poll.
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
// Bytes are those of comm.h, which is what the algorithms of the book are charged with; NCCL may choose a
// tree, or the switch's own adders, and put other bytes on the wire.
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tensor/device.h"
#include "cuda/device_cuda.h"
#include "cuda/gpu.h"
#include "transport.h"

#ifdef __CUDACC__
#include <nccl.h>
#else
#include "tests/emulation/nccl_on_cpu.h"
#endif

// ncclCommSplit and non-blocking communicators.
enum { LEAST_VERSION = NCCL_VERSION(2, 18, 1) };
static_assert(NCCL_VERSION_CODE >= LEAST_VERSION,
              "NCCL 2.18 or later is needed: name its folder with NCCL_HOME=");

enum { CHUNK_BYTES = 4 << 20 };  // of a piece, that a member reduces at once: n of these are its scratch

typedef struct Communicator {
    ncclComm_t nccl;
    bool *met;  // by member: a transfer has connected us
    struct Communicator *next;
} Communicator;

// An operation on the device: begun when `mark` has happened.
typedef struct Flight {
    cudaEvent_t mark, end;
    double began;      // wall clock, as far as it was seen; 0: not yet
    bool over, ended;  // on the device; by transport_end
    struct Flight *next;
} Flight;

static struct {
    Place place;
    bool joined, sharing;  // sharing: ranks outnumber the GPUs here
    cudaStream_t stream;
    ncclUniqueId id;
    Communicator *communicators;  // the latest first
    Communicator **of_group;      // by handle
    int groups;
    cudaEvent_t *spare;
    int spares, room;
    Flight *first, *last;
    char *scratch;
    size_t scratch_bytes;
} state;

struct Operation {
    Collective call;
    Communicator *comm;  // NULL in a group of one
    ncclComm_t asked;    // has said ncclInProgress
    int64_t step, sent;
    bool over, flown;  // NCCL has been given all of it; and has taken it
    Flight *flight;
    bool direct;            // by members' pieces
    int64_t chunk, chunks;  // elements; how many of the longest piece
    // making a group
    bool is_group;
    int color, as;
    ncclComm_t child;
};

// ---- NCCL's answers ----

#define NCCL_CALL(call) check_nccl(call, #call)

static void check_nccl(ncclResult_t result, const char *call) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char *more = ncclGetLastError(NULL);
    fatal("NCCL failed in %.*s: %s%s%s; with NCCL_DEBUG=WARN it says more", (int)strcspn(call, "("), call,
          ncclGetErrorString(result), more && *more ? ": " : "", more ? more : "");
}

// Whether what was asked of NCCL is done.
static bool is_ready(Operation *o) {
    if (!o->asked) return true;
    ncclResult_t result;
    NCCL_CALL(ncclCommGetAsyncError(o->asked, &result));
    check_nccl(result, "a call under way");
    if (result == ncclInProgress) return false;
    o->asked = NULL;
    return true;
}

static const char *version_text(int version) {
    static char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

// ---- events ----

static cudaEvent_t event_new(void) {
    if (state.spares) return state.spare[--state.spares];
    cudaEvent_t event;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

static void event_free(cudaEvent_t event) {
    if (state.spares == state.room) {
        state.room = 2 * state.room + 16;
        state.spare = (cudaEvent_t *)realloc(state.spare, sizeof event * (size_t)state.room);
        CHECK(state.spare, "out of host memory for events");
    }
    state.spare[state.spares++] = event;
}

static bool has_happened(cudaEvent_t event) {
    cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) cudaGetLastError();  // no error; the next launch would take it for one
    else CUDA_CHECK(status);
    return status == cudaSuccess;
}

static cudaStream_t compute_stream(void) { return (cudaStream_t)device_stream(); }

// What `after` is given from now on waits for all that `before` has been given.
static void join_streams(cudaStream_t after, cudaStream_t before) {
    cudaEvent_t event = event_new();
    CUDA_CHECK(cudaEventRecord(event, before));
    CUDA_CHECK(cudaStreamWaitEvent(after, event, 0));
    event_free(event);
}

static cudaStream_t stream(void) {
    if (!state.stream) {
        compute_stream();  // the device has been chosen
        int least, greatest;
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        // Bytes first: a kernel of NCCL needs few multiprocessors, and keeps other GPUs waiting.
        CUDA_CHECK(cudaStreamCreateWithPriority(&state.stream, cudaStreamNonBlocking, greatest));
    }
    return state.stream;
}

// Device memory of the communication stream; it grows to the largest that was ever asked for.
static char *scratch(size_t bytes) {
    if (bytes > state.scratch_bytes) {
        join_streams(compute_stream(), stream());  // the old one is released when all that uses it is done
        if (state.scratch) device_free(MEMORY_COMMUNICATION, state.scratch, state.scratch_bytes);
        state.scratch = (char *)device_alloc(MEMORY_COMMUNICATION, bytes);
        state.scratch_bytes = bytes;
        join_streams(stream(), compute_stream());
    }
    return state.scratch;
}

// ---- start ----

bool transport_sums_in_rank_order(void) { return false; }

bool transport_prepares_groups(void) { return true; }

static int version(void) {
    int number = 0;
    NCCL_CALL(ncclGetVersion(&number));
    return number;
}

void transport_start(Place place, void (*look)(void)) {
    state.place = place;
    CHECK(version() >= LEAST_VERSION,
          "NCCL %s is loaded, and this program needs 2.18 or later: see LD_LIBRARY_PATH, or build it with "
          "another NCCL_HOME",
          version_text(version()));
    device_on_wait(look);
}

const char *transport_text(void) {
    static char text[128];
    snprintf(text, sizeof text, "NCCL %s%s", version_text(version()),
             state.sharing ? " in a test mode: ranks share GPUs, and their bytes go over sockets" : "");
    return text;
}

typedef struct Card {
    char host[64], bus[32];
} Card;

// NCCL refuses two ranks of one host on one GPU. It tells hosts apart by NCCL_HOSTID; so ranks that share
// a GPU say that each is a host of its own. All must be set before NCCL looks.
static void choose_mode(void) {
    int ranks = state.place.ranks, device;
    Card mine = {}, *all = (Card *)host_alloc(sizeof mine * (size_t)ranks);
    compute_stream();
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine.bus, sizeof mine.bus, device));
    gethostname(mine.host, sizeof mine.host - 1);
    control_share(&mine, all, sizeof mine);
    bool here = false;
    for (int a = 0; a < ranks; a++)
        for (int b = 0; b < a; b++)
            if (!strcmp(all[a].host, all[b].host) && !strcmp(all[a].bus, all[b].bus)) {
                state.sharing = true;
                here = here || !strcmp(all[a].host, mine.host);
            }
    free(all);
    if (!here) return;
    char name[96];
    snprintf(name, sizeof name, "%s-%d", mine.host, state.place.rank);
    setenv("NCCL_HOSTID", name, 1);
    setenv("NCCL_MNNVL_ENABLE", "0", 1);
    if (state.place.one_machine) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
}

// The communicator of all ranks, from which all others are split.
static void join(Operation *o) {
    ncclUniqueId mine = {}, *all = (ncclUniqueId *)host_alloc(sizeof mine * (size_t)state.place.ranks);
    choose_mode();
    if (state.place.rank == 0) NCCL_CALL(ncclGetUniqueId(&mine));
    control_share(&mine, all, sizeof mine);
    state.id = all[0];
    free(all);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    NCCL_CALL(ncclCommInitRankConfig(&o->child, state.place.ranks, state.id, state.place.rank, &config));
    o->asked = o->child;
    state.joined = true;
}

// ---- groups ----

static void keep_communicator(int handle, Communicator *communicator) {
    while (state.groups <= handle) {
        state.of_group =
            (Communicator **)realloc(state.of_group, sizeof *state.of_group * (size_t)(state.groups + 1));
        CHECK(state.of_group, "out of host memory for groups");
        state.of_group[state.groups++] = NULL;
    }
    state.of_group[handle] = communicator;
}

static Communicator *communicator_new(ncclComm_t nccl, int members) {
    Communicator *c = (Communicator *)host_alloc(sizeof *c);
    *c = {nccl, (bool *)calloc((size_t)members, sizeof(bool)), state.communicators};
    CHECK(c->met, "out of host memory for groups");
    return state.communicators = c;
}

static Communicator *communicator_of(int handle) {
    return handle < state.groups ? state.of_group[handle] : NULL;
}

static Operation *operation_new(void) {
    Operation *o = (Operation *)host_alloc(sizeof *o);
    memset(o, 0, sizeof *o);
    return o;
}

Operation *transport_group(Group group, int color, int as) {
    Operation *o = operation_new();
    o->is_group = true;
    o->call.group = group;
    o->color = group.rank < 0 ? NCCL_SPLIT_NOCOLOR : color;
    o->as = as;
    return o;
}

static void next_of_group(Operation *o) {
    Group group = o->call.group;
    switch (o->step++) {
        case 0:
            if (!state.joined) join(o);
            break;
        case 1:
            if (o->child) keep_communicator(0, communicator_new(o->child, state.place.ranks));
            o->child = NULL;
            o->over = o->as >= 0;
            if (o->over) keep_communicator(group.handle, communicator_of(o->as));
            break;
        case 2:  // NCCL wants nothing else under way on the parent
            if (cudaStreamQuery(stream()) == cudaSuccess) break;
            cudaGetLastError();
            o->step = 2;
            break;
        case 3:
            o->asked = communicator_of(0)->nccl;
            NCCL_CALL(ncclCommSplit(o->asked, o->color, group.rank, &o->child, NULL));
            break;
        case 4:  // the parent is ready and has named the child
            o->asked = o->child;
            break;
        default:
            if (o->child) keep_communicator(group.handle, communicator_new(o->child, group.size));
            o->over = true;
    }
}

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

static void copy(void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from)
        CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, stream()));
}

// Both ends know the same number of bytes, and leave a transfer of none out.
static void send(Operation *o, const void *from, int64_t bytes, int member) {
    if (bytes == 0) return;
    NCCL_CALL(ncclSend(from, (size_t)bytes, ncclInt8, member, o->comm->nccl, stream()));
    o->sent += bytes;
}

static void receive(Operation *o, void *to, int64_t bytes, int member) {
    if (bytes > 0) NCCL_CALL(ncclRecv(to, (size_t)bytes, ncclInt8, member, o->comm->nccl, stream()));
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
        copy(part_at(c, c->out, out_counts, me), part_at(c, c->in, in_counts, me),
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
    if (gather) copy(part_at(c, c->out, counts, me), c->in, mine);
    else copy(c->out, part_at(c, c->in, counts, me), mine);
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
    char *byte = scratch((size_t)c->group.size + 1);
    group_begin();
    for (int i = 0; i < c->transfer_count; i++) {
        int peer = c->transfers[i].peer;
        if (peer == c->group.rank || o->comm->met[peer]) continue;
        NCCL_CALL(ncclSend(byte + c->group.size, 1, ncclInt8, peer, o->comm->nccl, stream()));
        NCCL_CALL(ncclRecv(byte + peer, 1, ncclInt8, peer, o->comm->nccl, stream()));
        o->comm->met[peer] = true;
    }
    group_end(o);
}

static void transfer_own(const Collective *c) {
    const Transfer *t = c->transfers;
    for (int i = 0, own = 0; i < c->transfer_count; i++) {
        if (t[i].peer != c->group.rank || t[i].send) continue;
        while (t[own].peer != c->group.rank || !t[own].send) own++;  // the next send to myself
        copy(tensor_address(t[i].t), tensor_address(t[own++].t), tensor_bytes(t[i].t));
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
    transfer_own(c);
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
        NCCL_CALL(ncclAllReduce(c->out, c->out, total, type, op, comm, stream()));
        o->sent += (n - 1) * k;
    } else if (c->kind == REDUCE) {
        NCCL_CALL(
            ncclReduce(c->out, me == c->root ? c->out : NULL, total, type, op, c->root, comm, stream()));
        o->sent += me == c->root ? 0 : k;
    } else if (parts_are_equal(counts, n)) {
        NCCL_CALL(ncclReduceScatter(c->in, c->out, (size_t)counts[me], type, op, comm, stream()));
    } else {
        for (int i = 0; i < n; i++)
            if (counts[i])
                NCCL_CALL(ncclReduce(part_at(c, c->in, counts, i), i == me ? c->out : NULL,
                                     (size_t)counts[i], type, op, i, comm, stream()));
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
            NCCL_CALL(
                ncclAllGather(c->in, c->out, (size_t)part_bytes(c, counts, me), ncclInt8, comm, stream()));
    } else {
        for (int i = 0; i < n; i++)
            if (counts[i])
                NCCL_CALL(ncclBroadcast(i == me ? c->in : part_at(c, c->out, counts, i),
                                        part_at(c, c->out, counts, i), (size_t)part_bytes(c, counts, i),
                                        ncclInt8, i, comm, stream()));
    }
    group_end(o);
}

static void broadcast(Operation *o) {
    const Collective *c = &o->call;
    int64_t bytes = part_bytes(c, c->in_counts, 0);
    if (c->group.rank == c->root) o->sent = (c->group.size - 1) * bytes;
    if (bytes == 0) return;
    group_begin();
    NCCL_CALL(ncclBroadcast(c->out, c->out, (size_t)bytes, ncclInt8, c->root, o->comm->nccl, stream()));
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
    LAUNCH((reduce_members<T>), (unsigned)blocks, 256, 0, stream(), (T *)out, (const T *)own,
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

static void start_direct(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size;
    int64_t longest = 0, most = CHUNK_BYTES / (int64_t)dtype_size(c->dtype);
    for (int i = 0; i < n; i++)
        if (c->in_counts[i] > longest) longest = c->in_counts[i];
    o->direct = true;
    o->chunk = longest < most ? longest : most;
    o->chunks = o->chunk ? (longest + o->chunk - 1) / o->chunk : 0;
    scratch((size_t)(n * o->chunk) * dtype_size(c->dtype));
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

// Two steps a chunk: its copies travel; they are reduced, and the result travels.
static void next_of_direct(Operation *o) {
    const Collective *c = &o->call;
    int n = c->group.size, me = c->group.rank;
    int64_t size = (int64_t)dtype_size(c->dtype), row = o->chunk * size, first = o->step / 2 * o->chunk;
    int64_t mine = chunk_bytes(o, me, first);
    bool copies = o->step % 2 == 0, back = !copies && c->kind != REDUCE_SCATTER;
    char *result = chunk_at(o, me, first);
    if (c->kind == REDUCE_SCATTER) result = (char *)c->out + first * size;
    if (c->kind == REDUCE && me != c->root)
        result = state.scratch + me * row;  // who is not the root keeps its own
    if (!copies && mine) launch_by_dtype(o, result, chunk_at(o, me, first), state.scratch, mine / size);
    if (copies || back) group_begin();
    for (int i = 0; i < n; i++) {
        if (i == me) continue;
        if (copies) {
            send(o, chunk_at(o, i, first), chunk_bytes(o, i, first), i);
            receive(o, state.scratch + i * row, mine, i);
        } else if (back) {
            if (c->kind == ALL_REDUCE || i == c->root) send(o, result, mine, i);
            if (c->kind == ALL_REDUCE || me == c->root)
                receive(o, chunk_at(o, i, first), chunk_bytes(o, i, first), i);
        }
    }
    if (copies || back) group_end(o);
    o->over = ++o->step == 2 * o->chunks;
}

// ---- operations ----

void *transport_mark(void) {
    cudaEvent_t mark = event_new();
    CUDA_CHECK(cudaEventRecord(mark, compute_stream()));
    return mark;
}

Operation *transport_run(const Collective *collective) {
    Operation *o = operation_new();
    const Collective *c = collective;
    o->call = *c;
    o->flight = (Flight *)host_alloc(sizeof *o->flight);
    *o->flight = {(cudaEvent_t)(c->mark ? c->mark : transport_mark()), event_new(), 0, false, false, NULL};
    CUDA_CHECK(cudaStreamWaitEvent(stream(), o->flight->mark, 0));
    if (c->group.size == 1) return o;
    o->comm = communicator_of(c->group.handle);
    CHECK(o->comm, "group %s has no communicator: it was not made by comm_group while bytes could move",
          c->group.name ? c->group.name : "?");
    bool reduces = c->kind == ALL_REDUCE || c->kind == REDUCE || c->kind == REDUCE_SCATTER;
    if (reduces && !nccl_reduces(c)) {
        start_direct(o);
        o->over = o->chunks == 0;
    }
    return o;
}

// A group of one: what it has for itself.
static void move_own(Operation *o) {
    const Collective *c = &o->call;
    if (c->kind == TRANSFERS) transfer_own(c);
    else if (c->kind != ALL_REDUCE && c->kind != REDUCE && c->kind != BROADCAST)
        copy(c->out, c->in, part_bytes(c, c->in_counts ? c->in_counts : c->out_counts, 0));
}

static void next(Operation *o) {
    const Collective *c = &o->call;
    if (o->is_group) return next_of_group(o);
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

// The device has been given all of it.
static void take_off(Operation *o) {
    o->flown = true;
    CUDA_CHECK(cudaEventRecord(o->flight->end, stream()));
    if (state.last) state.last->next = o->flight;
    else state.first = o->flight;
    state.last = o->flight;
}

bool transport_test(Operation *o) {
    for (int64_t before = -1; !o->over && is_ready(o) && before != o->step;) {
        before = o->step;
        next(o);
    }
    if (!o->over || !is_ready(o)) return false;
    if (o->flight && !o->flown) take_off(o);
    return true;
}

int64_t transport_bytes(const Operation *o) { return o->sent; }

static void flight_free(Flight *flight) {
    if (!flight->over || !flight->ended) return;
    event_free(flight->mark);
    event_free(flight->end);
    free(flight);
}

static void land_flights(void) {
    while (state.first && has_happened(state.first->end)) {
        Flight *landed = state.first;
        state.first = landed->next;
        if (!state.first) state.last = NULL;
        landed->over = true;
        flight_free(landed);
    }
}

void transport_end(Operation *o) {
    if (o->flight) {
        CUDA_CHECK(cudaStreamWaitEvent(compute_stream(), o->flight->end, 0));
        o->flight->ended = true;
        flight_free(o->flight);
        land_flights();
    }
    free(o);
}

double transport_poll(void) {
    for (Communicator *c = state.communicators; c; c = c->next) {
        ncclResult_t result;
        NCCL_CALL(ncclCommGetAsyncError(c->nccl, &result));
        check_nccl(result, "a call under way");
    }
    land_flights();
    Flight *first = state.first;
    if (first && first->began == 0 && has_happened(first->mark)) first->began = wall_seconds();
    return first && first->began > 0 ? wall_seconds() - first->began : 0;
}

// ---- the end ----

void transport_finish(void) {
    if (!state.stream && !state.joined) return;
    device_wait();
    for (Communicator *c = state.communicators, *next; c; c = next) {
        Operation close = {};
        NCCL_CALL(ncclCommFinalize(c->nccl));
        close.asked = c->nccl;
        for (double until = wall_seconds() + 10; !is_ready(&close) && wall_seconds() < until;) usleep(100);
        NCCL_CALL(ncclCommDestroy(c->nccl));
        next = c->next;
        free(c->met);
        free(c);
    }
    state.communicators = NULL;
    land_flights();
    if (state.scratch) device_free(MEMORY_COMMUNICATION, state.scratch, state.scratch_bytes);
    while (state.spares) cudaEventDestroy(state.spare[--state.spares]);
    free(state.spare);
    free(state.of_group);
    state.scratch = NULL;
    if (state.stream) cudaStreamDestroy(state.stream);
}

static void leave(int signal) {
    (void)signal;
    _exit(STATUS_USAGE);
}

// Ends the kernels that wait for other ranks. NCCL may hang in it, the alarm does not.
void transport_abort(void) {
    signal(SIGALRM, leave);
    alarm(3);
    for (Communicator *c = state.communicators; c; c = c->next) ncclCommAbort(c->nccl);
}
