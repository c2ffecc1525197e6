// ddp_bucketed.h: the buckets, for techniques that change when they are sent.
#ifndef DDP_BUCKETED_H
#define DDP_BUCKETED_H

#include "data_parallel.h"

typedef struct Buckets {
    int count;
    int *first_unit, *end_unit;  // (count) the units of each bucket
    int *sent;                   // (count) how often the bucket was sent in this step
    Request **request;           // (count) its all-reduce in flight, else NULL
    int *of_unit, *ready;        // (units) the unit's bucket; how often it was ready in this step
} Buckets;

extern const Option ddp_bucket_option;
void *ddp_bucketed_plug(Model *model);
void ddp_bucketed_unplug(Model *model, void *context);
void ddp_bucketed_ready(void *context, Model *model, int unit, bool last);
void ddp_bucketed_price(Price *price, const Model *model, double times);  // times: all-reduces per step

#endif
