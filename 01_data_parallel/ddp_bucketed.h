// ddp_bucketed.h: the buckets, for those who change when they are sent.
#ifndef DDP_BUCKETED_H
#define DDP_BUCKETED_H

#include "data_parallel.h"

typedef struct Buckets {
    int count;
    int *first_unit, *end_unit;  // (count) the units of each
    int *sent;                   // (count) how often in this step it was sent
    Request **request;           // (count) its all-reduce in flight, else NULL
    int *of_unit, *ready;        // (units) its bucket; how often in this step it was ready
} Buckets;

extern const Option ddp_bucket_option;
void *ddp_bucketed_plug(Model *model);
void ddp_bucketed_unplug(Model *model, void *context);
void ddp_bucketed_ready(void *context, Model *model, int unit, bool last);
void ddp_bucketed_price(Price *price, const Model *model, double times);  // so often in a step

#endif
