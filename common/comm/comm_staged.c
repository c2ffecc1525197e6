// comm_staged.c: cuda + mpi. Every call of comm goes through the host: device -> pinned buffer -> MPI ->
// pinned buffer -> device. The host waits for both copies, so nothing overlaps. It is for machines without
// NCCL, and where there is NCCL it cross-checks results, since its sums are bit for bit those of
// comm_mpi.c.
#include "comm_staged.h"

#include <stdlib.h>

#include "tensor/device.h"

typedef struct Buffer {  // grows to the size of the largest call
    char *memory;
    size_t bytes;
} Buffer;

static Buffer given[COMM_LINES], got[COMM_LINES];  // what this rank sends; what it receives

struct Stage {
    Collective real, *call;
    Transfer *transfers;
    Storage *storage;  // of each transfer's tensor, in host memory
};

static char *room(Buffer *buffer, int64_t bytes) {
    if ((size_t)bytes > buffer->bytes) {
        backend_free_pinned(buffer->memory);
        buffer->memory = backend_alloc_pinned((size_t)bytes);
        CHECK(buffer->memory, "out of host memory: %s more to stage what ranks exchange",
              bytes_text((double)bytes));
        buffer->bytes = (size_t)bytes;
    }
    return buffer->memory;
}

static void fetch(void *to, const void *from, int64_t bytes) {
    if (bytes > 0) backend_to_host(to, from, (size_t)bytes);
}

static void put_back(void *to, const void *from, int64_t bytes) {
    if (bytes > 0) backend_from_host(to, from, (size_t)bytes);
}

static void stage_transfers(Stage *s) {
    Collective *c = s->call;
    int n = c->transfer_count;
    int64_t bytes = 0, at = 0;
    for (int i = 0; i < n; i++) bytes += tensor_bytes(c->transfers[i].t);
    s->transfers = host_alloc(sizeof *s->transfers * (size_t)n);
    s->storage = host_alloc(sizeof *s->storage * (size_t)n);
    char *memory = room(&given[c->group.line], bytes);
    for (int i = 0; i < n; i++) {
        Transfer *t = &s->transfers[i];
        *t = c->transfers[i];
        if (t->send) fetch(memory + at, tensor_address(t->t), tensor_bytes(t->t));
        s->storage[i] =
            (Storage){.memory = memory + at, .bytes = (size_t)tensor_bytes(t->t), .references = 1};
        at += tensor_bytes(t->t);
        t->t.storage = &s->storage[i];
        t->t.offset = 0;
    }
    c->transfers = s->transfers;
}

Stage *stage_begin(Collective *call) {
    if (backend_is_host()) return NULL;
    Stage *s = host_alloc(sizeof *s);
    *s = (Stage){.real = *call, .call = call};
    if (call->kind == TRANSFERS) {
        stage_transfers(s);
        return s;
    }
    call->in = room(&given[call->group.line], call->in_bytes);
    fetch((void *)call->in, s->real.in, call->in_bytes);
    // These calls work in place.
    bool in_place = call->kind == ALL_REDUCE || call->kind == REDUCE || call->kind == BROADCAST;
    call->out = in_place ? (void *)call->in : room(&got[call->group.line], call->out_bytes);
    return s;
}

void stage_end(Stage *s) {
    const Collective *real = &s->real;
    put_back(real->out, s->call->out, real->out_bytes);
    for (int i = 0; s->transfers && i < real->transfer_count; i++) {
        const Transfer *t = &real->transfers[i];
        if (!t->send) put_back(tensor_address(t->t), s->storage[i].memory, tensor_bytes(t->t));
    }
    free(s->transfers);
    free(s->storage);
    free(s);
}

void stage_finish(void) {
    for (int line = 0; line < COMM_LINES; line++) {
        backend_free_pinned(given[line].memory);
        backend_free_pinned(got[line].memory);
        given[line] = got[line] = (Buffer){0};
    }
}
