// pipeline_stages.c: which rank has which layers, and the order of a step's messages. Playbook: "Pipeline
// Parallelism".
//
//     L = 9, p = 4       rank 0: embedding, blocks 0 1 2    rank 1: 3 4    rank 2: 5 6    rank 3: 7 8, head
//
// A schedule places stages on ranks (schedule.h); here stages get layers. With tied embeddings the last stage
// stores a copy of the embedding, and the two gradients are parts of one; so are those of DualPipe's two
// copies of every stage.
//
// Bytes sent: none; the step sums over copies (params_sum_copies). This file has no main.
#include <stdlib.h>

#include "pipeline.h"

// ---- which layers a stage has ----

void pipeline_split_layers(const Config *c, Chunk *chunk, int stages) {
    const char *text = config_text(c, "stage-layers");
    int64_t first = 0;
    for (int i = 0; i < stages; i++) {
        int64_t layers = c->layers / stages + (i < c->layers % stages);
        if (text) {
            char *end;
            layers = strtoll(text, &end, 10);
            CHECK(end > text && layers >= 0 && *end == (i + 1 < stages ? ',' : '\0'),
                  "--stage-layers %s: each of %d stages needs its number of layers, as in 5,4,4,3",
                  config_text(c, "stage-layers"), stages);
            CHECK(layers <= c->layers,
                  "--stage-layers %s: stage %d of %d would have %lld layers, and the model has %ld",
                  config_text(c, "stage-layers"), i, stages, (long long)layers, c->layers);
            text = end + 1;
        }
        bool between = i > 0 && i < stages - 1;  // the first and the last have embedding and head to run
        CHECK(layers > 0 || !between || !text,
              "--stage-layers %s: stage %d of %d would have no layer, as only the first and the last may",
              config_text(c, "stage-layers"), i, stages);
        const char *chunks = config_number(c, "schedule") == INTERLEAVED ? " or --chunks" : "";
        CHECK(layers > 0 || !between || !(c->init || c->resume),
              "stage %d of %d would have no layer, as the checkpoint has %ld; fewer --pp%s would fit", i,
              stages, c->layers, chunks);
        CHECK(layers > 0 || !between,
              "stage %d of %d would have no layer; --layers %d or more would fit, or fewer --pp%s", i,
              stages, stages, chunks);
        chunk[i] = (Chunk){(int)first, (int)(first + layers), i == 0, i == stages - 1};
        first += layers;
    }
    CHECK(first == c->layers, "--stage-layers %s add up to %ld, and --layers is %ld",
          config_text(c, "stage-layers"), first, c->layers);
}

ScheduleWish pipeline_wish(const Config *c) {
    ScheduleWish wish = {.ranks = (int)c->pp,
                         .micro_batches = (int)c->grad_acc,
                         .chunks = (int)config_number(c, "chunks"),
                         .durations = pipeline_unit_times};
    return wish;
}

// The schedule of --load, which must be one for this layout.
static Schedule loaded_schedule(const Config *c, const char *path) {
    Schedule s = schedule_load(path);
    ScheduleFault fault;
    CHECK(schedule_verify(&s, &fault), "--load %s: %s", path, fault.sentence);
    CHECK(schedule_message_order(&s, QUEUE_PAIR_AND_KIND, &fault), "--load %s: %s", path, fault.sentence);
    CHECK(s.ranks == c->pp && s.micro_batches == c->grad_acc,
          "--load %s is for --pp %d and --grad-acc %d, and this run has %ld and %ld", path, s.ranks,
          s.micro_batches, c->pp, c->grad_acc);
    for (int rank = 0; rank < s.ranks; rank++) {
        int stages = 0;
        for (int k = 0; k < s.stages; k++) stages += schedule_has_stage(&s, rank, k);
        CHECK(stages > 0, "--load %s: rank %d has no stage: each rank needs one", path, rank);
    }
    return s;
}

Schedule pipeline_schedule(const Config *c) {
    const char *path = config_text(c, "load");
    if (path) return loaded_schedule(c, path);
    ScheduleWish wish = pipeline_wish(c);
    return schedule_make((ScheduleKind)config_number(c, "schedule"), &wish);
}

bool pipeline_in_chunk(const Model *m, const Chunk *chunk, int unit) {
    int layer = unit - m->first_block_unit;
    if (unit == m->embedding_unit) return chunk->embedding || (chunk->head && m->config.tied);
    if (unit == m->head_unit) return chunk->head;
    if (unit > m->head_unit) layer = unit - m->first_expert_unit;  // a block's experts
    return layer >= chunk->first_layer && layer < chunk->end_layer;
}

void pipeline_shard(Model *m) {
    Group pp = m->mesh.pp;
    if (pp.size == 1) return;
    Schedule s = pipeline_schedule(&m->config);
    Chunk chunk[STAGES_MOST];
    pipeline_split_layers(&m->config, chunk, s.stages);
    for (int unit = 0; unit < m->params.units; unit++) {
        bool holds[RANKS_MOST] = {false};
        for (int i = 0; i < s.directions * s.stages; i++)
            if (pipeline_in_chunk(m, &chunk[i % s.stages], unit)) holds[s.place[i]] = true;
        int holder[RANKS_MOST], holders = 0;
        for (int rank = 0; rank < pp.size; rank++)
            if (holds[rank]) holder[holders++] = rank;
        unit_set_holders(&m->params, unit, pp, holder, holders);
    }
    schedule_free(&s);
}

// ---- the order of messages ----

const Durations pipeline_unit_times = {1, 1, 1, 2, 0};

static int by_time(const void *a, const void *b) {
    const Message *x = a, *y = b;
    if (x->time != y->time) return x->time < y->time ? -1 : 1;
    if (x->from != y->from) return x->from - y->from;
    return x->order - y->order;
}

Message *pipeline_messages(const Schedule *s, const ScheduleTimes *times, int *count) {
    Message *message = NULL;
    *count = 0;
    for (int rank = 0; rank < s->ranks; rank++)
        for (int i = 0; i < s->list[rank].count; i++)
            for (int j = 0; j < s->list[rank].action[i].passes; j++) {
                StagePass pass = s->list[rank].action[i].pass[j];
                int to = schedule_sends_to(s, pass);
                if (to == NO_RANK) continue;
                message = realloc(message, (size_t)(*count + 1) * sizeof *message);
                CHECK(message, "out of host memory for messages");
                message[*count] = (Message){times->end[rank][i], rank, to, *count, pass};
                ++*count;
            }
    if (*count) qsort(message, (size_t)*count, sizeof *message, by_time);
    return message;
}
