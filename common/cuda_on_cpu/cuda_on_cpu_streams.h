// cuda_on_cpu_streams.h: work in the order of a stream, for the runtime API and for emulations of libraries.
#ifndef CUDA_ON_CPU_STREAMS_H
#define CUDA_ON_CPU_STREAMS_H

#include <functional>

#include "cuda_on_cpu.h"

// Whether work waits in queues, rather than run in the call: a seed is set (cuda_on_cpu.h), and the caller is
// not itself work from a queue.
bool streams_defer(void);
// Adds work to the stream's queue; only where streams_defer(). Work that returns false is not over: what is
// behind it in the queue waits, nothing else does, and it is called again.
void stream_add(cudaStream_t stream, std::function<bool()> work);
// Runs queued work, of streams in any order, until the condition holds. Not for what is itself queued work,
// for which it returns at once: all that such work asks for has been done.
void streams_run_until(const std::function<bool()> &holds);
// Runs a few pieces of queued work, or none: what a device may have done since the host last looked.
void streams_run_some(void);

// While one exists, it is a stream's work that runs, and not the host.
class StreamWork {
    const bool before;

   public:
    StreamWork();
    ~StreamWork();
};
// Does the work now, or when the stream comes to it. What the work uses is to be captured by value.
template <class Work>
void in_stream(cudaStream_t stream, Work work) {
    if (streams_defer()) return stream_add(stream, [work]() mutable { return work(), true; });
    StreamWork runs;
    work();
}

#endif
