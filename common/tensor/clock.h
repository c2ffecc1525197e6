// clock.h: what a run counts (FLOPs, bytes, calls by operation) and the two clocks that it can be read on.
//
// The wall clock is what this machine did. The model clock is what a named machine would do: each operation
// takes max(FLOPs / peak of its dtype, bytes / memory bandwidth) on the compute stream. It depends on the
// counts alone, so it is the same to the last digit on any machine and under any load.
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
    // Links of one GPU, each way: NVLink to the others of its node, and its share of the node's network.
    double node_bytes_per_second, network_bytes_per_second;
    double node_latency, network_latency;  // seconds per step
    const char *source;                    // where the numbers are from
} Machine;

const Machine *machine_find(const char *name);  // fatal with the list of names when unknown
const char *machine_names(void);                // for --help: "dgx-a100|dgx-h100|…"

// FLOP/s of a matrix multiply in this dtype: what MFU and HFU divide by.
double machine_peak_flops(const Machine *machine, DType dtype);

// Selects the machine of the model clock (default "dgx-h100").
void clock_set_machine(const Machine *machine);
const Machine *clock_machine(void);

// The machines of a cluster, and how much of a peak is reached: each operation's time is divided by
// compute_efficiency, each link's bandwidth multiplied by network_efficiency. 0 GPUs per node: as many as
// the machine has.
void clock_set_cluster(int gpus_per_node, double compute_efficiency, double network_efficiency);
int clock_node(int rank);  // ranks fill the nodes in order

// How much of its peak work of this kind reaches, from this size on: FLOPs of a matrix multiply or of
// attention, bytes that any operation moves through memory, or that a collective or a batch of transfers
// moves over a link. By one table a run's clock and a search over layouts charge the same.
typedef enum WorkKind { WORK_MATMUL, WORK_ATTENTION, WORK_MEMORY, WORK_COLLECTIVE } WorkKind;
typedef struct Efficiency {
    WorkKind kind;
    double from;     // FLOPs or bytes; of the rows that reach so far down, the largest `from` holds
    double reached;  // 0 … 1
} Efficiency;
// Borrowed, and multiplied with those of clock_set_cluster. What no row names reaches its peak, as all does
// without a table.
void clock_set_efficiency(const Efficiency *rows, int count);
double clock_efficiency(WorkKind kind, double size);

typedef struct OpCount {
    const char *name;
    int64_t calls;
    double flops, bytes;
    double wall_seconds, model_seconds;
} OpCount;

// The front of ops calls these around each operation; name is a string literal.
void clock_begin(const char *name, DType dtype, double flops, double bytes);
void clock_end(void);
// Takes these off the wall seconds of the operation under way, if there is one, and off its span in a trace:
// between its tiles they went to messages (in_flight.h).
void clock_exclude(double seconds);

// Totals since the start or the last clock_reset; OpCount.name is "total".
OpCount clock_total(void);
// Per operation, in order of first use; returns how many. The array belongs to the clock.
int clock_operations(const OpCount **operations);
void clock_reset(void);

// ---- communication: when it begins is comm.h's to say, and how two lines share a port ----

// Model time of the compute stream: when what was issued so far is done.
double clock_model_now(void);
// The compute stream waits until then; returns the seconds that it stood still.
double clock_model_wait(double until);
// Seconds of a collective, by its name in comm.h, in a group of n members of which each node has
// `per_node`. bytes is K: the whole tensor, before a scatter or after a gather; of an all-to-all, what one
// member gives to all.
double clock_collective_seconds(const char *name, double bytes, int n, int per_node);
// Seconds of messages to and from `peers` in the node and across nodes, with these bytes in all each way:
// of a batch of transfers, and of one member's part in an all-to-all with unequal parts.
typedef struct Traffic {
    int peers;
    double sent, received;
} Traffic;
double clock_transfers_seconds(Traffic node, Traffic network);
double clock_all_to_all_seconds(Traffic node, Traffic network);
// Tells the trace of a communication on the line of this number that has ended; names are literals.
void clock_communication(const char *name, int line, const char *line_name, double wall, double wall_end,
                         double model, double model_end, double bytes);
// How often clock_reset was called: what else counts since then looks here.
int64_t clock_resets(void);

// A mark on the time line: everything until the matching clock_pop belongs to it ("step 3", "forward",
// "block 2"). name is copied.
void clock_push(const char *name);
void clock_pop(void);
// Totals per mark, in order of first use, by path and without a number at the end: "step",
// "step/forward", "step/forward/block". Wall seconds here include what passes between operations. The
// array belongs to the clock.
int clock_marks(const OpCount **marks);
OpCount clock_mark(const char *path);  // all 0 if there is none

// ---- the time line ----

// Collects every operation, mark and communication from now on; what was collected before is gone. From
// here on an operation ends on the wall clock when the device has done it: a GPU waits for the host between
// two.
void clock_trace_start(void);

typedef enum EventKind { EVENT_OPERATION, EVENT_PUSH, EVENT_POP, EVENT_COMMUNICATION } EventKind;
typedef struct Event {
    EventKind kind;
    const char *name;  // NULL for EVENT_POP
    int line;          // of a communication, and its name
    const char *line_name;
    double wall, wall_end, model, model_end;  // seconds; marks have no end
    double flops, bytes;
    int64_t memory[MEMORY_KINDS];  // held when the event began
} Event;
// In the order in which they were told; returns how many. The array belongs to the clock. Operations follow
// each other on both clocks; a communication is told when it is waited for, and ran beside them.
int64_t clock_events(const Event **events);
// When the trace started, on either clock.
double clock_trace_origin(bool model);

// Writes them as Chrome trace events (open in https://ui.perfetto.dev or chrome://tracing): one process for
// the wall clock, one for the model clock, and counters of memory by kind. Fatal, naming --trace, when the
// file cannot be written.
void clock_trace_write(const char *file);
// The same in pieces, for a trace of many ranks: the file, each rank's two processes, the end. Ranks of one
// trace start it together. The pieces need ",\n" between them.
FILE *clock_trace_open(const char *file);
void clock_trace_part(FILE *out, int rank, int ranks);
void clock_trace_close(FILE *out, const char *file);

#ifdef __cplusplus
}
#endif
#endif
