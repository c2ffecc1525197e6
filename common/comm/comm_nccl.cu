// comm_nccl.cu: the data plane over NCCL, between GPUs.
//
// Each line has its own communication stream and communicators, synchronized with the compute stream by
// events:
//
//     compute   ... gradient | next layer's backward ...        | what uses the sum
//                            mark                                wait
//     NCCL                   '--> all-reduce -------------- end --'
// The mark is recorded in the call, so a collective waits for what was issued to the device before it and
// for nothing later; comm_wait makes the compute stream wait for the end, and the host goes on. Memory is
// released in the order of the compute stream (device_cuda.h), that is, after that end: a tensor that is
// freed after comm_wait outlives the transfer of its bytes.
// Communicators are blocking: a call returns when the work has been issued to the device, which takes
// microseconds. (With a non-blocking one NCCL starts a thread for each group of calls, and for each call
// outside a group.) But where communicators are made, and where a first call connects members, NCCL waits
// for the other ranks, and nothing checks on them meanwhile. Usually they have all sent their notices by
// then; if one is lost nevertheless, a timer ends this rank after twice --timeout (call_begin), or mpirun
// ends it when it learns of the death. Waits on the device are checked by transport_poll.
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm_nccl.h"
#include "tensor/device.h"

// ncclCommSplit.
enum { LEAST_VERSION = NCCL_VERSION(2, 18, 1) };
static_assert(NCCL_VERSION_CODE >= LEAST_VERSION,
              "NCCL 2.18 or later is needed: name its folder with NCCL_HOME=");

static struct {
    Place place;
    bool joined, sharing;  // sharing: ranks outnumber the GPUs here
    ncclUniqueId id;
    Communicator *communicators;  // the latest first
    Communicator **of_group;      // by handle
    int groups;
    cudaEvent_t *spare;
    int spares, room;
    struct {
        cudaStream_t stream;
        Flight *first, *last;
        char *scratch;
        size_t scratch_bytes;
    } line[COMM_LINES];
} state;

// ---- NCCL's answers ----

// NCCL takes its buffers from the driver when communicators are made, at the first call of each, and at the
// first transfer between two ranks. By then the tensors may have taken the GPU's memory, and NCCL calls this
// a CUDA error. It takes hundreds of MB at once, of which part may have been available.
constexpr size_t LITTLE_MEMORY = 1 << 30;

// Nothing where memory is not the likely cause: what a network does is a system error.
static const char *text_of_memory(ncclResult_t result) {
    size_t available, total;
    if (result != ncclUnhandledCudaError) return "";
    if (cudaMemGetInfo(&available, &total) != cudaSuccess || available >= LITTLE_MEMORY) return "";
    return format_text(
        "; only %s of the GPU's %s are available, and NCCL needs some for its buffers: a smaller "
        "--micro-batch leaves it more, and NCCL_BUFFSIZE=1048576 makes them smaller; held now: %s",
        bytes_text((double)available), bytes_text((double)total), memory_text());
}

void check_nccl(ncclResult_t result, const char *call) {
    if (result == ncclSuccess) return;
    CHECK(result != ncclInProgress,
          "NCCL's communicators are not to be non-blocking: unset NCCL_COMM_BLOCKING");
    const char *more = ncclGetLastError(NULL);
    fatal("NCCL failed in %.*s: %s%s%s%s; with NCCL_DEBUG=WARN it says more", (int)strcspn(call, "("), call,
          ncclGetErrorString(result), more && *more ? ": " : "", more ? more : "", text_of_memory(result));
}

static const char *version_text(int version) {
    static char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

// ---- calls in which NCCL may wait for other ranks ----

// The watch that call_begin replaced: control_part watches all of transport_finish at the end of a run.
static Watch before_call;

// Where communicators are made, every rank loads NCCL's code and looks at its machine, which takes seconds
// if ranks share a GPU.
enum { START = 20 };

static void begin(double more) {
    static char sentence[256];
    if (!*sentence)
        snprintf(sentence, sizeof sentence,
                 "%s: rank %d: NCCL waits for a rank that does not come (twice --timeout, and %d s more at "
                 "its start)\n",
                 base_program(), base_rank(), START);
    before_call = control_watch(2 * comm_timeout() + more, sentence);
}

void call_begin(void) { begin(0); }

void call_end(void) { control_watch_end(before_call); }

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

// Whether the device has come this far, by the status of a query.
static bool is_done(cudaError_t status) {
    if (status == cudaErrorNotReady) cudaGetLastError();  // or the next launch reports it as an error
    else CUDA_CHECK(status);
    return status == cudaSuccess;
}

static bool has_happened(cudaEvent_t event) { return is_done(cudaEventQuery(event)); }

static cudaStream_t compute_stream(void) { return (cudaStream_t)device_stream(); }

// What is issued to `after` from now on waits for all that has been issued to `before`.
static void join_streams(cudaStream_t after, cudaStream_t before) {
    cudaEvent_t event = event_new();
    CUDA_CHECK(cudaEventRecord(event, before));
    CUDA_CHECK(cudaStreamWaitEvent(after, event, 0));
    event_free(event);
}

static cudaStream_t stream(Line line) {
    if (!state.line[line].stream) {
        compute_stream();  // the device has been chosen
        int least, greatest;
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        // Communication has priority: a kernel of NCCL needs few multiprocessors, and other GPUs wait for it.
        CUDA_CHECK(cudaStreamCreateWithPriority(&state.line[line].stream, cudaStreamNonBlocking, greatest));
    }
    return state.line[line].stream;
}

static Line line_of(const Operation *o) { return o->call.group.line; }

cudaStream_t stream_of(const Operation *o) { return stream(line_of(o)); }

char *scratch(const Operation *o, size_t bytes) {
    char **memory = &state.line[line_of(o)].scratch;
    size_t *held = &state.line[line_of(o)].scratch_bytes;
    if (bytes > *held) {
        if (*memory) {  // released when all that uses it is done
            join_streams(compute_stream(), stream_of(o));
            device_free(MEMORY_COMMUNICATION, *memory, *held);
        }
        *memory = (char *)device_alloc(MEMORY_COMMUNICATION, bytes);
        *held = bytes;
        join_streams(stream_of(o), compute_stream());
    }
    return *memory;
}

// ---- start ----

bool comm_sums_in_rank_order(void) { return false; }

bool transport_launches(void) { return true; }

// A kernel that waits for ranks that never come can block a host that calls the driver (comm_agreement.c).
bool transport_runs_early(const Collective *c) { return (void)c, false; }

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

const char *comm_carrier(void) {
    static char text[128];
    snprintf(text, sizeof text, "NCCL %s%s", version_text(version()),
             state.sharing ? " in a test mode: ranks share GPUs, and their bytes go over sockets" : "");
    return text;
}

typedef struct Card {
    uint64_t machine;
    char bus[32];  // its PCI address
} Card;

static bool same_card(Card a, Card b) { return a.machine == b.machine && !strcmp(a.bus, b.bus); }

// NCCL refuses two ranks of one host on one GPU. It identifies hosts by NCCL_HOSTID; so ranks that share a
// GPU each claim to be a host of their own. All variables must be set before NCCL reads them.
static void choose_mode(void) {
    int ranks = state.place.ranks, device;
    Card mine = {}, *all = (Card *)host_alloc(sizeof mine * (size_t)ranks);
    compute_stream();
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine.bus, sizeof mine.bus, device));
    mine.machine = state.place.machine;
    control_share(&mine, all, sizeof mine);
    bool here = false;
    for (int a = 0; a < ranks; a++)
        for (int b = 0; b < a; b++)
            if (same_card(all[a], all[b])) {
                state.sharing = true;
                here = here || all[a].machine == mine.machine;
            }
    free(all);
    if (!here) return;
    char name[64];
    snprintf(name, sizeof name, "%llx-%d", (unsigned long long)mine.machine, state.place.rank);
    setenv("NCCL_HOSTID", name, 1);
    setenv("NCCL_MNNVL_ENABLE", "0", 1);
    if (state.place.one_machine) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_NET", "Socket", 0);  // neither InfiniBand nor what a plugin brings
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

// The communicator of all ranks, from which all others are split.
static void join(void) {
    ncclComm_t nccl;
    ncclUniqueId mine = {}, *all = (ncclUniqueId *)host_alloc(sizeof mine * (size_t)state.place.ranks);
    choose_mode();
    if (state.place.rank == 0) NCCL_CALL(ncclGetUniqueId(&mine));
    control_share(&mine, all, sizeof mine);
    state.id = all[0];
    free(all);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    begin(START);
    NCCL_CALL(ncclCommInitRankConfig(&nccl, state.place.ranks, state.id, state.place.rank, &config));
    call_end();
    keep_communicator(0, communicator_new(nccl, state.place.ranks));
    state.joined = true;
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

// NCCL allows nothing else in flight on the parent of a split, so this may take several steps.
static void next_of_group(Operation *o) {
    Group group = o->call.group;
    if (!state.joined) join();
    o->over = o->as >= 0;
    if (o->over) return keep_communicator(group.handle, communicator_of(o->as));
    if (!is_done(cudaStreamQuery(stream(LINE_WORLD)))) return;
    ncclComm_t nccl = NULL;
    begin(START);
    NCCL_CALL(ncclCommSplit(communicator_of(0)->nccl, o->color, group.rank, &nccl, NULL));
    call_end();
    if (nccl) keep_communicator(group.handle, communicator_new(nccl, group.size));
    o->over = true;
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
    CUDA_CHECK(cudaStreamWaitEvent(stream_of(o), o->flight->mark, 0));
    if (c->group.size == 1) return o;
    o->comm = communicator_of(c->group.handle);
    CHECK(o->comm, "group %s has no communicator: it was not made by comm_group while bytes could move",
          c->group.name ? c->group.name : "?");
    prepare_call(o);
    return o;
}

static void next(Operation *o) {
    if (o->is_group) next_of_group(o);
    else next_of_call(o);
}

// All of the operation has been issued to the device.
static void take_off(Operation *o) {
    o->flown = true;
    CUDA_CHECK(cudaEventRecord(o->flight->end, stream_of(o)));
    Flight **last = &state.line[line_of(o)].last;
    if (*last) (*last)->next = o->flight;
    else state.line[line_of(o)].first = o->flight;
    *last = o->flight;
}

bool transport_test(Operation *o) {
    for (int64_t before = -1; !o->over && before != o->step;) {
        before = o->step;
        next(o);
    }
    if (!o->over) return false;
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
    for (int line = 0; line < COMM_LINES; line++)
        for (Flight *landed; (landed = state.line[line].first) && has_happened(landed->end);) {
            state.line[line].first = landed->next;
            if (!landed->next) state.line[line].last = NULL;
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
    double longest = 0;
    for (int line = 0; line < COMM_LINES; line++) {
        Flight *first = state.line[line].first;
        if (first && first->began == 0 && has_happened(first->mark)) first->began = wall_seconds();
        if (first && first->began > 0 && wall_seconds() - first->began > longest)
            longest = wall_seconds() - first->began;
    }
    return longest;
}

// ---- the end ----

void transport_finish(void) {
    bool used = state.joined;
    for (int line = 0; line < COMM_LINES; line++) used = used || state.line[line].stream;
    if (!used) return;
    device_wait();
    for (Communicator *c = state.communicators, *next; c; c = next) {
        call_begin();
        NCCL_CALL(ncclCommFinalize(c->nccl));
        NCCL_CALL(ncclCommDestroy(c->nccl));
        call_end();
        next = c->next;
        free(c->met);
        free(c);
    }
    state.communicators = NULL;
    land_flights();
    while (state.spares) cudaEventDestroy(state.spare[--state.spares]);
    free(state.spare);
    free(state.of_group);
    for (int line = 0; line < COMM_LINES; line++) {
        if (state.line[line].scratch)
            device_free(MEMORY_COMMUNICATION, state.line[line].scratch, state.line[line].scratch_bytes);
        state.line[line].scratch = NULL;
        if (state.line[line].stream) cudaStreamDestroy(state.line[line].stream);
    }
}

static void leave(int signal) {
    (void)signal;
    _exit(STATUS_USAGE);
}

// Ends the kernels that wait for other ranks. If NCCL hangs in this, the alarm ends the process.
void transport_abort(void) {
    signal(SIGALRM, leave);
    alarm(3);
    for (Communicator *c = state.communicators; c; c = c->next) ncclCommAbort(c->nccl);
}
