// diagnosis.h: what a wrong number usually means, by its ratio to the right one. A failed check's sentence
// ends with it (report.h).
#ifndef DIAGNOSIS_H
#define DIAGNOSIS_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a run has several of, which may explain a ratio: "the 4 ranks of dp", "the 2 micro-batches". A size
// of 1 explains nothing.
void diagnosis_ranks(const char *axis, int64_t ranks);
void diagnosis_micro_batches(int64_t micro_batches);
void diagnosis_forget(void);  // forgets all sizes

// Each returns what the number usually means, or "" if there is no usual cause. Static buffers. For a
// gradient: scale <x, y> / <y, y> and relative error ||x - y|| / ||y||, which equals |scale - 1| if the
// gradient is wrong only by a factor.
const char *diagnose_gradient(double scale, double relative);
const char *diagnose_loss(double loss, double expected);                      // of the first step, in nats
const char *diagnose_count(double count, double expected, const char *unit);  // of calls or bytes

#ifdef __cplusplus
}
#endif
#endif
