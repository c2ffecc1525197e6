// nccl_on_cpu_inside.h: what nccl_on_cpu.cc (communicators, groups of calls) and nccl_on_cpu_moves.cc
// (bytes in flight, and what is made of them) share.
#ifndef NCCL_ON_CPU_INSIDE_H
#define NCCL_ON_CPU_INSIDE_H

#include "cuda_on_cpu/cuda_on_cpu_streams.h"
#include "nccl_on_cpu.h"

// Shared memory here is the host's; cuda_on_cpu.h's checks of each copy are for kernels.
#undef memcpy
#undef memset

#include <atomic>
#include <deque>
#include <map>
#include <string>
#include <vector>

typedef std::vector<char> Bytes;

// ---- shared memory of a communicator ----

enum { MOST_RANKS = 64, RING = 1 << 16, HOST = 96 };

struct Ring {  // bytes from one rank to another; both counts are only ever increased
    std::atomic<int64_t> given, taken;
    char data[RING];

    // Moves as many bytes as fit, or as there are.
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
    // For split number `splits`; two slots, as no rank can be two splits ahead.
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

// Precedes the bytes of every message, for comparison.
struct Header {
    int32_t call, type, op, root;
    int64_t count;
};

// The position of an operation among all that this rank has launched with another one; those of one group are
// launched together.
struct Place {
    int64_t before, width;
};
// What precedes the bytes of a message.
struct Front {
    Header header;
    Place place;
};
enum Call { SEND = 1, BROADCAST, ALL_GATHER, ALL_REDUCE, REDUCE, REDUCE_SCATTER, CONNECT };
extern const char *const call_names[];

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
    bool blocking = true, opened = false, aborted = false, finalized = false;
    void *buffers = nullptr;  // on the device
    ncclResult_t state = ncclInProgress;
    std::vector<Op> ops;          // that run now
    int64_t queued = 0, run = 0;  // launches that streams hold or held, and those that are over
    std::vector<std::deque<Message>> out;       // to each rank
    std::vector<std::deque<Message *>> want;    // from each
    std::vector<bool> sends_to, receives_from;  // connected
    // a split in progress
    ncclComm_t *child = nullptr, made = nullptr;
    int64_t splits = 0;
};

ncclResult_t refuse(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));

static inline size_t size_of(ncclDataType_t type) {
    return type == ncclInt8                              ? 1
           : type == ncclFloat16 || type == ncclBfloat16 ? 2
           : type == ncclFloat64                         ? 8
                                                         : 4;
}

static inline Ring *ring(ncclComm_t c, int from, int to) { return &c->shared->ring[from * c->ranks + to]; }

// Makes as much progress as possible in the communicator (nccl_on_cpu_moves.cc).
ncclResult_t push_ops(ncclComm_t comm);

#endif
