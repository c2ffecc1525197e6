// tensor.c: tensors as counted references to device memory, and the account of that memory by kind.
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "guard.h"
#include "in_flight.h"

// ---- the account ----

static Memory account;
static bool dry_run;
static MemoryListener listener;
static void *listener_context;

const char *memory_kind_name(MemoryKind kind) {
    static const char *const names[MEMORY_KINDS] = {"parameters", "gradients", "optimizer", "activations",
                                                    "communication"};
    return names[kind];
}

Memory memory_account(void) { return account; }

void memory_set_account(const Memory *memory) { account = *memory; }

void memory_reset_peak(void) {
    memcpy(account.peak, account.now, sizeof account.peak);
    account.peak_total = account.now_total;
}

void memory_restore_peak(const Memory *before) {
    for (int kind = 0; kind < MEMORY_KINDS; kind++)
        account.peak[kind] =
            before->peak[kind] > account.now[kind] ? before->peak[kind] : account.now[kind];
    account.peak_total = before->peak_total > account.now_total ? before->peak_total : account.now_total;
}

void memory_listen(MemoryListener listen, void *context) {
    listener = listen;
    listener_context = context;
}

const char *memory_text(void) {
    static char text[256];
    int used = 0;
    for (int kind = 0; kind < MEMORY_KINDS; kind++)
        used += snprintf(text + used, sizeof text - used, "%s %s, ", memory_kind_name(kind),
                         bytes_text((double)account.now[kind]));
    snprintf(text + used, sizeof text - used, "total %s", bytes_text((double)account.now_total));
    return text;
}

static void account_change(MemoryKind kind, int64_t bytes, const void *memory) {
    account.now[kind] += bytes;
    account.now_total += bytes;
    if (account.now[kind] > account.peak[kind]) account.peak[kind] = account.now[kind];
    if (account.now_total > account.peak_total) account.peak_total = account.now_total;
    if (listener && bytes) listener(listener_context, kind, bytes, memory);
}

// ---- device memory ----

void device_dry_run(bool on) { dry_run = on; }

bool device_is_dry_run(void) { return dry_run; }

static void out_of_memory(MemoryKind kind, size_t bytes, int64_t room) {
    char each[64] = "";
    if (!dry_run && backend_sharers() > 1)
        snprintf(each, sizeof each, " to each of the %d ranks of this machine", backend_sharers());
    fatal("out of device memory: %s more for %s do not fit in the %s that are left%s; held now: %s",
          bytes_text((double)bytes), memory_kind_name(kind), bytes_text(room > 0 ? (double)room : 0), each,
          memory_text());
}

// The back end is asked how much room there is only when this rank holds more than ever before, and then once
// for each STEP bytes.
static int64_t room_for(size_t bytes) {
    enum { STEP = 64 << 20 };
    static int64_t most;  // held so far, or known to fit
    int64_t after = account.now_total + (int64_t)bytes, room = most - account.now_total;
    if (after <= most) return room;
    room = backend_room(account.now_total);
    if ((int64_t)bytes <= room) most = after + (room - (int64_t)bytes < STEP ? 0 : STEP);
    return room;
}

void *device_alloc(MemoryKind kind, size_t bytes) {
    int64_t most = INT64_MAX - account.now_total, room = most;
    if (!dry_run && bytes <= (size_t)most) room = room_for(bytes);
    bool fits = bytes <= (size_t)most && (int64_t)bytes <= room;
    void *memory = fits && !dry_run ? backend_alloc(bytes) : NULL;
    if (!fits) out_of_memory(kind, bytes, room);
    CHECK(dry_run || memory,
          "out of device memory: %s more for %s were refused, although the tensors leave %s; held now: %s",
          bytes_text((double)bytes), memory_kind_name(kind), bytes_text((double)room), memory_text());
    account_change(kind, (int64_t)bytes, memory);
    if (guard.on) guard_name(memory, memory_kind_name(kind));
    return memory;
}

void device_free(MemoryKind kind, void *memory, size_t bytes) {
    account_change(kind, -(int64_t)bytes, memory);
    backend_free(memory);
}

static void device_from_host(void *to, const void *from, size_t bytes) {
    device_open();
    if (!dry_run) backend_from_host(to, from, bytes);
    device_close();
}

static int64_t reads;
int64_t device_reads(void) { return reads; }
void device_note_read(void) { reads++; }

static void device_to_host(void *to, const void *from, size_t bytes) {
    device_note_read();
    device_open();
    if (dry_run) memset(to, 0, bytes);
    else backend_to_host(to, from, bytes);
    device_close();
}

// ---- tensors ----

static int64_t shape_count(int dims, const int64_t *shape) {
    CHECK(dims >= 1 && dims <= MAX_DIMS, "a tensor has 1 to %d dimensions, not %d", MAX_DIMS, dims);
    int64_t count = 1;
    for (int i = 0; i < dims; i++)
        CHECK(shape[i] >= 0 && !__builtin_mul_overflow(count, shape[i], &count),
              "dimension %d of a tensor is %lld: negative, or more elements in all than 64 bits count", i,
              (long long)shape[i]);
    return count;
}

// A freed storage has no references. It is taken for another tensor only when KEPT others have been freed
// after it, so that until then a use of it is noticed. Then the one freed last comes first: the host's caches
// still hold it.
enum { KEPT = 256 };

static Storage *retired[KEPT];  // the last that were freed, in a ring
static int64_t retirements;
static Storage *unused;

static void storage_push(Storage *storage) {
    storage->next = unused;
    unused = storage;
}

static void storage_retire(Storage *storage) {
    Storage **place = &retired[retirements++ % KEPT];
    if (*place) storage_push(*place);
    *place = storage;
}

// Storages are made many at once. Made one by one, each would lie beside its tensor's memory, and as it is
// never returned to the heap, what is freed on its two sides would not become one piece again.
static Storage *storage_new(void) {
    for (int made = unused ? KEPT : 0; made < KEPT; made++) storage_push(host_alloc(sizeof(Storage)));
    Storage *storage = unused;
    unused = storage->next;
    return storage;
}

Tensor tensor_new(MemoryKind kind, DType dtype, int dims, const int64_t *shape) {
    Tensor t = {.dtype = dtype, .dims = dims};
    int64_t bytes;
    CHECK(!__builtin_mul_overflow(shape_count(dims, shape), (int64_t)dtype_size(dtype), &bytes),
          "a tensor has more bytes than 64 bits count");
    memcpy(t.shape, shape, dims * sizeof *shape);
    t.storage = storage_new();
    *t.storage =
        (Storage){.memory = device_alloc(kind, bytes), .bytes = bytes, .kind = kind, .references = 1};
    return t;
}

Tensor tensor_like(MemoryKind kind, Tensor t) { return tensor_new(kind, t.dtype, t.dims, t.shape); }

static void check_not_freed(Tensor t) {
    CHECK(!t.storage || t.storage->references > 0,
          "a tensor of %s, %s, is used after tensor_free: through a view or a second copy of its handle",
          memory_kind_name(t.storage->kind), tensor_text(t));
}

Tensor tensor_share(Tensor t) {
    check_not_freed(t);
    if (t.storage) t.storage->references++;
    return t;
}

void tensor_free(Tensor *t) {
    check_not_freed(*t);
    if (t->storage && --t->storage->references == 0) {
        device_free(t->storage->kind, t->storage->memory, t->storage->bytes);
        storage_retire(t->storage);
    }
    *t = (Tensor){0};
}

Tensor tensor_view(Tensor t, int64_t first, int dims, const int64_t *shape) {
    int64_t count = shape_count(dims, shape);
    CHECK(tensor_exists(t) && first >= 0 && first <= tensor_count(t) && count <= tensor_count(t) - first,
          "a view of %lld elements from element %lld does not lie within %s", (long long)count,
          (long long)first, tensor_text(t));
    Tensor view = {.storage = t.storage, .offset = t.offset + first, .dtype = t.dtype, .dims = dims};
    memcpy(view.shape, shape, dims * sizeof *shape);
    return view;
}

Tensor tensor_part(Tensor t, int64_t first, int64_t count) {
    return tensor_exists(t) ? tensor_view(t, first, SHAPE(count)) : t;
}

Tensor tensor_rows_of(Tensor t, int64_t first, int64_t rows) {
    int64_t columns = tensor_columns(t);
    return tensor_view(t, first * columns, SHAPE(rows, columns));
}

bool tensor_overlaps(Tensor a, Tensor b) {
    if (!tensor_exists(a) || a.storage != b.storage) return false;
    int64_t begin_a = a.offset * (int64_t)dtype_size(a.dtype),
            begin_b = b.offset * (int64_t)dtype_size(b.dtype), end_a = begin_a + tensor_bytes(a),
            end_b = begin_b + tensor_bytes(b);
    return (begin_a > begin_b ? begin_a : begin_b) < (end_a < end_b ? end_a : end_b);
}

int64_t tensor_bytes(Tensor t) { return tensor_count(t) * (int64_t)dtype_size(t.dtype); }

const char *tensor_text(Tensor t) {
    static char texts[8][112];
    static int next;
    char *text = texts[next++ % 8];
    if (!tensor_exists(t)) return "no tensor";
    int used = snprintf(text, sizeof texts[0], "(");
    for (int i = 0; i < t.dims; i++)
        used +=
            snprintf(text + used, sizeof texts[0] - used, "%s%lld", i ? ", " : "", (long long)t.shape[i]);
    snprintf(text + used, sizeof texts[0] - used, ") %s", dtype_name(t.dtype));
    return text;
}

void *tensor_address(Tensor t) {
    check_not_freed(t);
    if (!t.storage || !t.storage->memory) return NULL;
    return (char *)t.storage->memory + t.offset * (int64_t)dtype_size(t.dtype);
}

void tensor_from_host(Tensor t, const void *host) {
    CHECK(tensor_exists(t), "tensor_from_host: there is no tensor to write");
    in_flight_check("tensor_from_host", t, true, NO_LINE);
    device_from_host(tensor_address(t), host, tensor_bytes(t));
}

void tensor_to_host(void *host, Tensor t) {
    CHECK(tensor_exists(t), "tensor_to_host: there is no tensor to read");
    in_flight_check("tensor_to_host", t, false, NO_LINE);
    device_to_host(host, tensor_address(t), tensor_bytes(t));
}

void tensor_from_doubles(Tensor t, const double *host) {
    void *converted = host_alloc(tensor_bytes(t));
    dtype_convert(converted, t.dtype, host, F64, tensor_count(t));
    tensor_from_host(t, converted);
    free(converted);
}

void tensor_to_doubles(double *host, Tensor t) {
    void *stored = host_alloc(tensor_bytes(t));
    tensor_to_host(stored, t);
    dtype_convert(host, F64, stored, t.dtype, tensor_count(t));
    free(stored);
}
