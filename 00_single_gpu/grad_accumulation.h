// grad_accumulation.h: one step's batch in micro-batches, one after another.
#ifndef GRAD_ACCUMULATION_H
#define GRAD_ACCUMULATION_H

#include "transformer.h"

// How many targets are labels, that is, not ignored.
int64_t count_labels(const int32_t *targets, int64_t count);
// The factor that turns a sum of token losses into a mean: 1 / labels; 0 if there are none.
double mean_loss_scale(double labels);
// The schedule of one device: forward and backward of each micro-batch in turn, adding up losses and
// gradients.
void micro_batches_in_turn(void *context, Model *model, const StepInput *input);

#endif
