// cuda_on_cpu_streams.cc: streams and events. Usually all work is done in the call that asks for it, so they
// only have to exist.
//
// With CUDA_ON_CPU_STREAMS=SEED in the environment, work waits in a queue for each stream:
//
//     compute   kernel | record e | kernel | ...
//     NCCL      wait for e | all-reduce | ...
//
// Some of it runs whenever the host adds more, asks how far the device is, or waits. Each time it is the
// first piece of some stream's queue, drawn from the seed among those that need not wait for an event. So two
// pieces that no stream, event or wait of the host orders will run in either order, for one seed or another,
// and a result that depends on that order will be wrong for one of them. The seed repeats a run exactly,
// except where several ranks wait for each other.
#include "cuda_on_cpu_streams.h"

#include <sched.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "cuda_on_cpu_inside.h"

// A call of cudaEventRecord. Who waits for it keeps it, as the event may be recorded anew, or be destroyed.
struct Mark {
    bool reached;
    double seconds;
};

struct Piece {
    uint64_t number;  // counts all pieces, in the order of the calls
    std::shared_ptr<Mark> after;
    std::function<bool()> work;
};

struct CudaStream {
    int priority = 0;
    bool blocking = true;  // it and the default stream wait for each other
    std::deque<Piece> queue;
};
struct CudaEvent {
    std::shared_ptr<Mark> mark = std::make_shared<Mark>(Mark{true, 0});
};

enum : size_t { LONGEST = 1024 };  // a queue; then the call waits, as CUDA's do

// Never destroyed: what runs at the exit of the program may still ask.
static CudaStream &default_stream = *new CudaStream();
static std::vector<CudaStream *> &streams = *new std::vector<CudaStream *>{&default_stream};
static uint64_t pieces, done;  // added to all queues so far; over
static uint64_t seed;          // the state of what is drawn
static bool is_set, queueing;
static bool at_work;  // work of a stream runs, from a queue or in the call

static CudaStream *stream_at(cudaStream_t stream) { return stream ? stream : &default_stream; }

void cuda_on_cpu_streams(uint64_t new_seed) {
    streams_run_until([] { return pieces == done; });
    seed = new_seed;
    queueing = new_seed != 0;
    is_set = true;
}

bool streams_defer(void) {
    if (!is_set) {
        const char *text = getenv("CUDA_ON_CPU_STREAMS");
        cuda_on_cpu_streams(text ? strtoull(text, NULL, 0) : 0);
    }
    return queueing && !at_work;
}

StreamWork::StreamWork() : before(at_work) { at_work = true; }
StreamWork::~StreamWork() { at_work = before; }

// ---- the queues ----

static bool is_ready(const CudaStream *s) {
    if (s->queue.empty()) return false;
    const Piece &first = s->queue.front();
    if (first.after && !first.after->reached) return false;
    for (const CudaStream *other : streams) {
        bool ordered =
            (s == &default_stream && other->blocking) || (other == &default_stream && s->blocking);
        if (ordered && !other->queue.empty() && other->queue.front().number < first.number) return false;
    }
    return true;
}

static bool run_first(CudaStream *s) {
    StreamWork runs;
    return s->queue.front().work();
}

// Runs one piece; false: there is none that is ready, or it is not over. Up to 16 pieces of one stream run
// before another is drawn, so that one may be far ahead of the others.
static bool run_one(void) {
    static const CudaStream *favourite;
    static uint64_t turns;
    std::vector<CudaStream *> ready;
    for (CudaStream *s : streams)
        if (is_ready(s)) ready.push_back(s);
    if (ready.empty()) return false;
    auto found = std::find(ready.begin(), ready.end(), favourite);
    if (found == ready.end() || turns == 0) {
        found = ready.begin() + (ptrdiff_t)(draw(&seed) % ready.size());
        turns = 1ull << draw(&seed) % 5;
    }
    CudaStream *s = *found;
    const bool over = !s->queue.front().work || run_first(s);
    favourite = over ? s : NULL;
    turns--;
    if (over) s->queue.pop_front(), done++;
    else sched_yield();  // to other ranks, for which NCCL's calls wait
    return over;
}

void streams_run_until(const std::function<bool()> &holds) {
    while (!at_work && !holds()) run_one();
}

static void run_several(uint64_t most) {
    while (most > 0 && run_one()) most--;
}

void streams_run_some(void) {
    if (streams_defer() && draw(&seed) % 4 == 0) run_several(draw(&seed) % 4);
}

static void add(CudaStream *s, Piece piece) {
    piece.number = pieces++;
    s->queue.push_back(std::move(piece));
    if (s->queue.size() > LONGEST) streams_run_until([s] { return s->queue.size() <= LONGEST; });
    // Mostly the device is behind the host, and now and then catches up.
    if (draw(&seed) % 64 == 0) run_several(draw(&seed) % 256);
}

void stream_add(cudaStream_t stream, std::function<bool()> work) {
    add(stream_at(stream), {0, nullptr, std::move(work)});
}

static void finish(const CudaStream *s) {
    streams_run_until([s] { return s->queue.empty(); });
}

static int64_t waits;
void cuda_count_wait(void) { waits += !at_work; }
int64_t cuda_on_cpu_waits(void) { return waits; }

cudaError_t cudaDeviceSynchronize(void) {
    cuda_count_wait();
    if (cuda_is_lost()) return cuda_told(cudaErrorInitializationError);
    streams_run_until([] { return pieces == done; });
    return cudaSuccess;
}

// ---- streams ----

static cudaError_t created(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new CudaStream();
    (*stream)->priority = priority;
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return created(stream, cudaStreamDefault, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return created(stream, flags, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return created(stream, flags, priority);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}

// CUDA lets the stream finish its work later; that it has done so at once is one of the possible orders.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    finish(stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    return delete stream, cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cuda_count_wait();
    if (cuda_is_lost()) return cuda_told(cudaErrorInitializationError);
    finish(stream_at(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (cuda_is_lost()) return cuda_told(cudaErrorInitializationError);
    streams_run_some();
    return stream_at(stream)->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (!event) return cuda_told(cudaErrorInvalidValue);
    if (!event->mark->reached) add(stream_at(stream), {0, event->mark, nullptr});
    return cudaSuccess;
}

// ---- events ----

static double seconds_of_work;
void cuda_pass(double seconds) { seconds_of_work += seconds; }

cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = new CudaEvent(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!event) return cuda_told(cudaErrorInvalidValue);
    std::shared_ptr<Mark> mark = event->mark = std::make_shared<Mark>();
    in_stream(stream, [mark] { *mark = {true, wall_seconds() + seconds_of_work}; });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    cuda_count_wait();
    streams_run_until([event] { return event->mark->reached; });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    streams_run_some();
    return event->mark->reached ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    if (!from->mark->reached || !to->mark->reached) return cudaErrorNotReady;
    *milliseconds = (float)((to->mark->seconds - from->mark->seconds) * 1e3);
    return cudaSuccess;
}
