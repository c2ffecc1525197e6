// clock.c: see clock.h. Counting costs two readings of the wall clock and a short scan of a table per
// operation, about 100 ns; events are stored only while a trace is on.
#include "clock.h"

#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "files.h"
#include "guard.h"
#include "in_flight.h"

// ---- machines ----

// Rates are per GPU, dense (datasheets print twice these for 2:4 sparsity), in FLOP/s and bytes/s. The
// operations count the FLOPs of matrix multiplies, so f64 is the rate of the FP64 tensor cores. Capacity is
// the datasheet's, in units of 10^9 bytes.
//
// NVLink is half of the datasheet's figure, which adds both ways (A100 600, H100 and H200 900 GB/s); the
// network is one port for each GPU (DGX A100: 200 Gb/s HDR; DGX H100 and H200: 400 Gb/s NDR). Latencies are
// assumptions, not measurements of ours: the per-step constants by which NCCL itself chooses algorithms
// (hwLat in src/graph/tuning.cc, ring, protocol Simple: NVLink 3.4 us, network 9.6 us in version 2.9, later
// 14 us, of which we take the former).
//
// Matrix multiplies by dtype. An A100 has no 8-bit floats: they are widened, and reach the rate of bf16.
// H100 and H200 multiply them at twice that rate. Nothing multiplies i32; operations on it have no FLOPs.
#define A100_FLOPS \
    { 19.5e12, 19.5e12, 312e12, 312e12, 312e12, 312e12, 19.5e12 }
#define H100_FLOPS \
    { 67e12, 67e12, 989e12, 989e12, 2 * 989e12, 2 * 989e12, 67e12 }
static const Machine machines[] = {
    // NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM
    {"dgx-a100", "NVIDIA A100 SXM4 80 GB", A100_FLOPS, 2.039e12, 80e9, 8, 300e9, 25e9, 3.4e-6, 9.6e-6},
    // NVIDIA H100 Tensor Core GPU datasheet, H100 SXM (bf16: half of 1,979 with sparsity)
    {"dgx-h100", "NVIDIA H100 SXM5 80 GB", H100_FLOPS, 3.35e12, 80e9, 8, 450e9, 50e9, 3.4e-6, 9.6e-6},
    // NVIDIA H200 Tensor Core GPU datasheet, H200 SXM (bf16: half of 1,979 with sparsity)
    {"h200", "NVIDIA H200 SXM 141 GB", H100_FLOPS, 4.8e12, 141e9, 8, 450e9, 50e9, 3.4e-6, 9.6e-6},
};
enum { MACHINES = sizeof machines / sizeof *machines };

const char *machine_names(void) {
    static char names[256];
    names[0] = 0;
    for (int i = 0; i < MACHINES; i++) {
        if (i) strcat(names, "|");
        strcat(names, machines[i].name);
    }
    return names;
}

const Machine *machine_find(const char *name) {
    for (int i = 0; i < MACHINES; i++)
        if (!strcmp(machines[i].name, name)) return &machines[i];
    fatal("--machine %s is unknown; it is one of %s", name, machine_names());
}

double machine_peak_flops(const Machine *machine, DType dtype) { return machine->flops[dtype]; }

// ---- state ----

typedef struct OpenMark {
    int mark;         // index into marks
    char *name;       // as it was pushed
    OpCount at_push;  // the totals then
} OpenMark;

static struct {
    const Machine *machine;
    OpCount total;
    OpCount *operations;
    int operations_count, operations_room;
    // the operation under way
    const char *name;  // NULL between operations
    int operation;
    double began, excluded, flops, bytes, model_seconds;
    double model_now;  // model time since the start; clock_reset leaves it alone, so that traces go on
    OpCount *marks;    // by path
    int marks_count, marks_room;
    OpenMark open[MOST_OPEN_MARKS];
    int depth;
    bool tracing, last_steps;  // last_steps: of steps that follow each other, events of two are kept
    int64_t step[2];           // the events with which these begin
    int steps, steps_depth;    // how many of them there are, and among how many open marks
    Event *events;
    int64_t events_count, events_room;
    double wall_origin, model_origin;  // of the trace
    int64_t resets;
    int gpus_per_node;  // 0: the machine's
    double compute_efficiency, network_efficiency;
    const Efficiency *efficiency;
    int efficiencies;
} state = {.compute_efficiency = 1, .network_efficiency = 1};

void clock_set_machine(const Machine *machine) { state.machine = machine; }

const Machine *clock_machine(void) {
    if (!state.machine) state.machine = machine_find("dgx-h100");
    return state.machine;
}

// ---- the model clock ----

void clock_set_efficiency(const Efficiency *rows, int count) {
    state.efficiency = rows;
    state.efficiencies = count;
}

double clock_efficiency(WorkKind kind, double size) {
    double reached = 1, best = -1;
    for (int i = 0; i < state.efficiencies; i++) {
        const Efficiency *row = &state.efficiency[i];
        if (row->kind == kind && row->from <= size && row->from > best)
            best = row->from, reached = row->reached;
    }
    return reached;
}

// The roofline: an operation is done when its arithmetic and its memory traffic, which overlap, both are.
static double model_time(const char *name, DType dtype, double flops, double bytes) {
    const Machine *machine = clock_machine();
    WorkKind kind = strncmp(name, "attention", strlen("attention")) ? WORK_MATMUL : WORK_ATTENTION;
    double compute = flops / machine_peak_flops(machine, dtype) / clock_efficiency(kind, flops);
    double memory = bytes / machine->memory_bytes_per_second / clock_efficiency(WORK_MEMORY, bytes);
    return (compute > memory ? compute : memory) / state.compute_efficiency;
}

void clock_set_cluster(int gpus_per_node, double compute_efficiency, double network_efficiency) {
    clock_set_nodes(gpus_per_node);
    state.compute_efficiency = compute_efficiency;
    state.network_efficiency = network_efficiency;
}

void clock_set_nodes(int gpus_per_node) { state.gpus_per_node = gpus_per_node; }

Machine clock_reached(void) {
    Machine machine = *clock_machine();
    for (int i = 0; i < DTYPES; i++) machine.flops[i] *= state.compute_efficiency;
    machine.memory_bytes_per_second *= state.compute_efficiency;
    machine.node_bytes_per_second *= state.network_efficiency;
    machine.network_bytes_per_second *= state.network_efficiency;
    return machine;
}

int clock_gpus_per_node(void) {
    return state.gpus_per_node ? state.gpus_per_node : clock_machine()->gpus_per_node;
}

int clock_node(int rank) { return rank / clock_gpus_per_node(); }

double clock_model_now(void) { return state.model_now; }

void clock_model_set(double now) { state.model_now = now; }

double clock_model_wait(double until) {
    double stood = until > state.model_now ? until - state.model_now : 0;
    if (stood > 0) state.model_now = until;
    return stood;
}

// What communication costs, from alpha, the latency of a step, and B, the bandwidth of a link; n members, m
// nodes.
//
// B is multiplied by the efficiency for the number of bytes (clock_set_efficiency), alpha is not.
//
// Rings: every step passes one piece to the next member. Of the n - 1 hops by which one piece goes round,
// m - 1 cross the network, and alpha is added along that path, since a piece need not wait for others (NCCL
// counts so, too: nInterSteps in its tuning.cc). The ring is as wide as the narrower of a GPU's NVLink and
// the network ports of all members on a node, on that with the fewest: B = min(NVLink, network x members).
//     all_reduce                    2 (n - 1) alpha + 2 (n - 1) / n K / B
//     reduce_scatter, all_gather      (n - 1) alpha +   (n - 1) / n K / B
//     broadcast, reduce               (n - 1) alpha +               K / B
//     barrier                       2 (n - 1) alpha
// Direct messages: one to each of n - 1 peers; those within the node and those across use separate links.
//     all_to_all, gather, scatter     (n - 1) alpha + max over both links of their part of K / n / B
//     transfers                               alpha + max over both links and ways of bytes / B
double clock_collective_seconds(const char *name, double bytes, int n, int nodes, int here) {
    if (n <= 1) return 0;
    const Machine *machine = clock_machine();
    double reached = state.network_efficiency * clock_efficiency(WORK_COLLECTIVE, bytes);
    double node = machine->node_bytes_per_second * reached;
    double network = machine->network_bytes_per_second * reached;
    if (!strcmp(name, "all_to_all") || !strcmp(name, "gather") || !strcmp(name, "scatter")) {
        int inside = here - 1, across = n - 1 - inside;
        Traffic near = {inside, bytes / n * inside, 0}, far = {across, bytes / n * across, 0};
        return clock_all_to_all_seconds(near, far);
    }
    if (nodes > 1 && network * here < node) node = network * here;
    double round = (n - nodes) * machine->node_latency + (nodes - 1) * machine->network_latency;
    if (!strcmp(name, "all_reduce")) return 2 * round + 2 * (n - 1) * (bytes / n / node);
    if (!strcmp(name, "reduce_scatter") || !strcmp(name, "all_gather"))
        return round + (n - 1) * (bytes / n / node);
    if (!strcmp(name, "broadcast") || !strcmp(name, "reduce")) return round + bytes / node;
    if (!strcmp(name, "barrier")) return 2 * round;
    fatal("there is no cost of a collective %s", name);
}

// The two links work at the same time, each in both directions at the same time.
static double busiest_link(Traffic node, Traffic network) {
    const Machine *machine = clock_machine();
    double near = node.sent > node.received ? node.sent : node.received;
    double far = network.sent > network.received ? network.sent : network.received;
    double reached[] = {state.network_efficiency * clock_efficiency(WORK_COLLECTIVE, near),
                        state.network_efficiency * clock_efficiency(WORK_COLLECTIVE, far)};
    near /= machine->node_bytes_per_second * reached[0];
    far /= machine->network_bytes_per_second * reached[1];
    return near > far ? near : far;
}

double clock_transfers_seconds(Traffic node, Traffic network) {
    const Machine *machine = clock_machine();
    double latency = network.peers ? machine->network_latency : node.peers ? machine->node_latency : 0;
    return latency + busiest_link(node, network);
}

double clock_all_to_all_seconds(Traffic node, Traffic network) {
    const Machine *machine = clock_machine();
    return node.peers * machine->node_latency + network.peers * machine->network_latency +
           busiest_link(node, network);
}

// ---- the trace's events ----

static Event *new_event(EventKind kind, const char *name) {
    if (state.events_count == state.events_room) {
        state.events_room = state.events_room ? 2 * state.events_room : 4096;
        state.events = realloc(state.events, sizeof(Event) * (size_t)state.events_room);
        CHECK(state.events, "out of host memory for %lld trace events", (long long)state.events_room);
    }
    Event *event = &state.events[state.events_count++];
    *event = (Event){.kind = kind, .name = name, .wall = wall_seconds(), .model = state.model_now};
    Memory account = memory_account();
    memcpy(event->memory, account.now, sizeof event->memory);
    return event;
}

// ---- operations ----

static int operation_index(const char *name) {
    // A literal has one address in one file, so the first scan finds it nearly always; the same name from
    // another file has another address.
    for (int i = 0; i < state.operations_count; i++)
        if (state.operations[i].name == name) return i;
    for (int i = 0; i < state.operations_count; i++)
        if (!strcmp(state.operations[i].name, name)) return i;
    if (state.operations_count == state.operations_room) {
        state.operations_room += 64;
        state.operations =
            realloc(state.operations, sizeof *state.operations * (size_t)state.operations_room);
        CHECK(state.operations, "out of host memory for the table of operations");
    }
    state.operations[state.operations_count] = (OpCount){.name = name};
    return state.operations_count++;
}

static void add(OpCount *count, double flops, double bytes, double wall, double model) {
    count->calls++;
    count->flops += flops;
    count->bytes += bytes;
    count->wall_seconds += wall;
    count->model_seconds += model;
}

// Dry runs are not timed, but for a trace: reading the wall clock would be a tenth of them.
static double operation_wall(void) { return device_is_dry_run() && !state.tracing ? 0 : wall_seconds(); }

void clock_begin(const char *name, DType dtype, double flops, double bytes) {
    CHECK(!state.name, "operation %s began inside operation %s", name, state.name);
    state.operation = operation_index(name);
    state.name = name;
    state.flops = flops;
    state.bytes = bytes;
    state.model_seconds = model_time(name, dtype, flops, bytes);
    if (state.tracing) {
        Event *event = new_event(EVENT_OPERATION, name);
        event->flops = flops;
        event->bytes = bytes;
        event->wall_end = event->wall;  // until it ends: a run may break in it
        event->model_end = event->model + state.model_seconds;
    }
    device_open();
    state.excluded = 0;
    state.began = operation_wall();
}

void clock_exclude(double seconds) { state.excluded += seconds; }

void clock_end(void) {
    // A trace is to show how long the operation itself took, not how long it took to issue it to a device.
    if (state.tracing && !device_is_dry_run()) backend_wait();
    double now = operation_wall();
    CHECK(state.name, "clock_end without clock_begin");
    device_close();
    double wall = now - state.began - state.excluded;
    add(&state.operations[state.operation], state.flops, state.bytes, wall, state.model_seconds);
    add(&state.total, state.flops, state.bytes, wall, state.model_seconds);
    state.model_now += state.model_seconds;
    if (state.tracing) state.events[state.events_count - 1].wall_end = now - state.excluded;
    state.name = NULL;
    if (in_flight_count) in_flight_push();
}

void clock_communication(const char *name, int line, const char *line_name, double wall, double wall_end,
                         double model, double model_end, double bytes) {
    if (!state.tracing) return;
    Event *event = new_event(EVENT_COMMUNICATION, name);
    event->line = line;
    event->line_name = line_name;
    event->wall = wall;
    event->wall_end = wall_end;
    event->model = model;
    event->model_end = model_end;
    event->bytes = bytes;
}

OpCount clock_total(void) {
    state.total.name = "total";
    return state.total;
}

int clock_operations(const OpCount **operations) {
    *operations = state.operations;
    return state.operations_count;
}

OpCount clock_operation(const char *name) {
    for (int i = 0; i < state.operations_count; i++)
        if (!strcmp(state.operations[i].name, name)) return state.operations[i];
    return (OpCount){.name = name};
}

// ---- marks ----

static int mark_index(const char *name) {
    // "step 3" and "step 4" are one mark, "step", with one total.
    size_t length = strlen(name);
    while (length && name[length - 1] >= '0' && name[length - 1] <= '9') length--;
    if (length && length < strlen(name) && name[length - 1] == ' ') length--;
    if (!length || name[length] != ' ') length = strlen(name);
    int parent = state.depth ? state.open[state.depth - 1].mark : -1;
    char *path = parent < 0 ? format_text("%.*s", (int)length, name)
                            : format_text("%s/%.*s", state.marks[parent].name, (int)length, name);
    for (int i = 0; i < state.marks_count; i++)
        if (!strcmp(state.marks[i].name, path)) {
            free(path);
            return i;
        }
    if (state.marks_count == state.marks_room) {
        state.marks_room += 64;
        state.marks = realloc(state.marks, sizeof *state.marks * (size_t)state.marks_room);
        CHECK(state.marks, "out of host memory for the table of marks");
    }
    state.marks[state.marks_count] = (OpCount){.name = path};
    return state.marks_count++;
}

bool clock_is_step(const char *name) { return !strncmp(name, "step", 4) && (!name[4] || name[4] == ' '); }

static void free_names(int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++)
        if (state.events[i].kind == EVENT_PUSH) free((char *)state.events[i].name);
}

// A step begins: of those before it in the same mark, only the last stays.
static void forget_steps(void) {
    int64_t *step = state.step;
    if (state.steps_depth != state.depth) state.steps = 0;
    state.steps_depth = state.depth;
    if (state.steps == 2) {
        free_names(step[0], step[1]);
        state.events_count -= step[1] - step[0];
        memmove(&state.events[step[0]], &state.events[step[1]],
                sizeof(Event) * (size_t)(state.events_count - step[0]));
        state.steps--;
    }
    step[state.steps++] = state.events_count;
}

void clock_push(const char *name) {
    if (state.tracing && state.last_steps && clock_is_step(name)) forget_steps();
    CHECK(state.depth < MOST_OPEN_MARKS, "more than %d marks are open, at %s", MOST_OPEN_MARKS, name);
    int mark = mark_index(name);
    OpCount now = state.total;
    // For a mark the wall includes what happens between its operations.
    now.wall_seconds = wall_seconds();
    state.open[state.depth++] = (OpenMark){.mark = mark, .name = format_text("%s", name), .at_push = now};
    if (state.tracing) new_event(EVENT_PUSH, format_text("%s", name));
}

void clock_pop(void) {
    CHECK(state.depth > 0, "clock_pop without clock_push");
    OpenMark *open = &state.open[--state.depth];
    if (state.depth < state.steps_depth) state.steps = 0;
    OpCount *mark = &state.marks[open->mark];
    add(mark, state.total.flops - open->at_push.flops, state.total.bytes - open->at_push.bytes,
        wall_seconds() - open->at_push.wall_seconds,
        state.total.model_seconds - open->at_push.model_seconds);
    if (state.tracing) new_event(EVENT_POP, NULL);
    free(open->name);
}

int clock_marks(const OpCount **marks) {
    *marks = state.marks;
    return state.marks_count;
}

OpCount clock_mark(const char *path) {
    for (int i = 0; i < state.marks_count; i++)
        if (!strcmp(state.marks[i].name, path)) return state.marks[i];
    return (OpCount){.name = path};
}

int64_t clock_resets(void) { return state.resets; }

void clock_reset(void) {
    state.resets++;
    state.total = (OpCount){0};
    state.operations_count = 0;
    if (!state.depth)
        while (state.marks_count) free((char *)state.marks[--state.marks_count].name);
    // Open marks stay open, and count from now on.
    for (int i = 0; i < state.marks_count; i++) state.marks[i] = (OpCount){.name = state.marks[i].name};
    for (int i = 0; i < state.depth; i++) state.open[i].at_push = (OpCount){.wall_seconds = wall_seconds()};
}

// ---- the trace ----

int64_t clock_events(const Event **events) {
    *events = state.events;
    return state.events_count;
}

void clock_trace_start(void) {
    free_names(0, state.events_count);
    state.events_count = state.steps = 0;
    state.last_steps = false;
    state.tracing = true;
    state.wall_origin = wall_seconds();
    state.model_origin = state.model_now;
    for (int i = 0; i < state.depth; i++) new_event(EVENT_PUSH, format_text("%s", state.open[i].name));
}

void clock_trace_last_steps(void) { state.last_steps = true; }

double clock_trace_origin(bool model) { return model ? state.model_origin : state.wall_origin; }
