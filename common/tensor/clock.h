// clock.h: what a run counts (FLOPs, bytes, calls by operation) and the two clocks that time it.
//
// The wall clock says how long this machine took. The model clock says how long a named machine would take:
// each operation lasts max(FLOPs / peak of its dtype, bytes / memory bandwidth) on the compute stream. It
// depends only on the counts, so it is the same to the last digit on any machine and under any load.
#ifndef CLOCK_H
#define CLOCK_H

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Machine {
    const char *name;      // "dgx-h100"
    const char *device;    // "NVIDIA H100 SXM5 80 GB"
    double flops[DTYPES];  // FLOP/s of matrix multiplies by dtype, dense; no TF32
    double memory_bytes_per_second;
    double memory_bytes;  // capacity of one device
    int gpus_per_node;
    // Links of one GPU, each way: NVLink to the others in its node, and its share of the node's network.
    double node_bytes_per_second, network_bytes_per_second;
    double node_latency, network_latency;  // seconds per step
} Machine;

const Machine *machine_find(const char *name);  // fatal with the list of names when unknown
const char *machine_names(void);                // for --help: "dgx-a100|dgx-h100|…"

// FLOP/s of a matrix multiply in this dtype: what MFU and HFU divide by.
double machine_peak_flops(const Machine *machine, DType dtype);

// Selects the machine of the model clock (default "dgx-h100").
void clock_set_machine(const Machine *machine);
const Machine *clock_machine(void);

// The shape of the cluster, and how much of the peaks is reached: each operation's time is divided by
// compute_efficiency, and each link's bandwidth multiplied by network_efficiency. gpus_per_node 0: as many
// as the machine has.
void clock_set_cluster(int gpus_per_node, double compute_efficiency, double network_efficiency);
void clock_set_nodes(int gpus_per_node);  // sets this alone, and keeps the efficiencies
int clock_gpus_per_node(void);
// A machine whose peaks are what this one reaches with these efficiencies, for formulas beside the clock.
Machine clock_reached(void);
int clock_node(int rank);  // the node of a rank; ranks fill the nodes in order

// A row of a table that says which fraction of its peak a kind of work reaches from this size on. The size
// is the FLOPs of a matrix multiply or of attention, the bytes that any operation moves through memory, or
// the bytes that a collective or a batch of transfers moves over a link. A run's clock and a search over
// layouts use the same table, so they charge the same time.
typedef enum WorkKind { WORK_MATMUL, WORK_ATTENTION, WORK_MEMORY, WORK_COLLECTIVE } WorkKind;
typedef struct Efficiency {
    WorkKind kind;
    double from;     // FLOPs or bytes; the row that applies has the largest `from` not above the size
    double reached;  // 0 … 1
} Efficiency;
// The rows are borrowed; what they say is multiplied with the efficiencies of clock_set_cluster. Work to
// which no row applies reaches its peak, and so does all work without a table.
void clock_set_efficiency(const Efficiency *rows, int count);
double clock_efficiency(WorkKind kind, double size);

typedef struct OpCount {
    const char *name;
    int64_t calls;
    double flops, bytes;
    double wall_seconds, model_seconds;  // operations of a dry run are not timed by the wall clock
} OpCount;

// ops.c calls these around each operation; name is a string literal.
void clock_begin(const char *name, DType dtype, double flops, double bytes);
void clock_end(void);
// Subtracts these seconds from the wall time of the current operation, if any, and from its span in a
// trace: between its tiles they were spent on messages (in_flight.h).
void clock_exclude(double seconds);

// Totals since the start or the last clock_reset; OpCount.name is "total".
OpCount clock_total(void);
// Per operation, in order of first use; returns how many. The array belongs to the clock.
int clock_operations(const OpCount **operations);
OpCount clock_operation(const char *name);  // all zeros if there is none
// Sets all counts to zero. The model time itself goes on.
void clock_reset(void);

// ---- communication: comm.h says when a call begins, and how lines share a port ----

// Model time of the compute stream, in seconds: when everything issued so far is done.
double clock_model_now(void);
// Sets it, to go on as another rank (comm_act_as).
void clock_model_set(double now);
// Makes the compute stream wait until then; returns the seconds that it was idle.
double clock_model_wait(double until);
// Seconds that a collective takes, named as in comm.h, in a group of n members on `nodes` nodes. here: the
// members on the node with the fewest or, for a gather and a scatter, on the root's. bytes is K, the size of
// the whole tensor (before a scatter, after a gather); for an all-to-all it is what one member gives to all.
double clock_collective_seconds(const char *name, double bytes, int n, int nodes, int here);
// Seconds that messages to and from `peers` ranks take, within the node and across nodes, with the total
// bytes in each direction: for a batch of transfers, and for one member's part in an all-to-all of unequal
// parts.
typedef struct Traffic {
    int peers;
    double sent, received;
} Traffic;
double clock_transfers_seconds(Traffic node, Traffic network);
double clock_all_to_all_seconds(Traffic node, Traffic network);
// Adds to the trace a communication that has ended, on the line of this number; names are literals.
void clock_communication(const char *name, int line, const char *line_name, double wall, double wall_end,
                         double model, double model_end, double bytes);
// How often clock_reset was called: other counters compare it, to start anew with the clock.
int64_t clock_resets(void);

// A mark on the time line: everything until the matching clock_pop belongs to it ("step 3", "forward",
// "block 2"). Marks nest, at most MOST_OPEN_MARKS deep. name is copied.
enum { MOST_OPEN_MARKS = 96 };
void clock_push(const char *name);
void clock_pop(void);
// Totals per mark, in order of first use. A mark's name here is its path, without numbers at the end of the
// parts: "step", "step/forward", "step/forward/block". Wall seconds include the time between operations.
// Returns how many; the array belongs to the clock.
int clock_marks(const OpCount **marks);
OpCount clock_mark(const char *path);  // all zeros if there is none

// ---- the time line ----

// Collects every operation, mark and communication from now on; what was collected before is discarded.
// From now on an operation ends on the wall clock when the device has finished it, so a GPU waits for the
// host between two operations.
void clock_trace_start(void);
// From now on, of steps that follow each other in one mark only the last two are kept: a long run's events
// would take more memory than its model.
void clock_trace_last_steps(void);
bool clock_is_step(const char *name);  // "step", "step 3"

typedef enum EventKind { EVENT_OPERATION, EVENT_PUSH, EVENT_POP, EVENT_COMMUNICATION } EventKind;
typedef struct Event {
    EventKind kind;
    const char *name;  // NULL for EVENT_POP
    int line;          // of a communication: its line, and the line's name
    const char *line_name;
    double wall, wall_end, model, model_end;  // seconds; marks have no end
    double flops, bytes;
    int64_t memory[MEMORY_KINDS];  // held when the event began
} Event;
// In the order in which they were recorded; returns how many. The array belongs to the clock. Operations
// follow each other on both clocks; a communication is recorded when it is waited for, and ran concurrently
// with them.
int64_t clock_events(const Event **events);
// When the trace started, on either clock.
double clock_trace_origin(bool model);

// A trace of the events in Chrome's format (open it in https://ui.perfetto.dev or chrome://tracing). Opens
// the file; writes a rank's two processes, one for the wall clock and one for the model clock, with counters
// of memory by kind; closes it. Fatal, naming --trace, if the file cannot be written. The ranks of one trace
// start it together. The caller puts ",\n" between the parts.
FILE *clock_trace_open(const char *file);
void clock_trace_part(FILE *out, int rank, int ranks);
void clock_trace_close(FILE *out, const char *file);

#ifdef __cplusplus
}
#endif
#endif
