// pipeline.c: runs any verified schedule on the model's stages. Playbook: "Pipeline Parallelism".
//
// Changes from 00_single_gpu: each of p ranks stores some stages, ranges of layers with the embedding before
// the first one and the head after the last, and walks its list in the schedule. Activations go to the rank
// of the next stage, gradients to that of the stage before:
//
//     for each action of my list
//         start the receives of what others send before it ends             (in flight while it computes)
//         wait for its own input
//         F: chunk_forward    B: chunk_backward_input    W: chunk_backward_weight    BW: both
//         send its output
//
// Nothing can deadlock: the messages of a step have one order, by a clock on which F, B and W take one unit
// and BW two, and each rank starts its own messages in this order. Take the first message that has not ended.
// Everything that its sender and receiver wait for before they start it has ended, so both start it, and it
// ends.
//
// With this chapter's schedules, where W runs in the order of micro-batches on every stage, no bit differs
// from one device, except where gradients of two copies of a weight are summed (tied embeddings, DualPipe).
// Bytes sent per rank and micro-batch: n h elements each way for each stage with a neighbour on another rank.
// Memory per rank: weights, gradients and optimizer state of its stages; activations of the micro-batches
// that the schedule holds at once. This file has no main: a program for each schedule runs it.
#include "pipeline.h"

#include <math.h>
#include <stdlib.h>

// ---- a step ----

// The pass on the other rank that takes this one's output (B or BW: they have one slot).
static StagePass taker_of(StagePass pass) {
    pass.stage += pass.kind == PASS_F ? 1 : -1;
    return pass;
}

int pipeline_embedding_parts(const Pipeline *p, const Model *m, int micro_batch) {
    const Schedule *s = &p->schedule;
    const int *place = s->place + s->direction[micro_batch] * s->stages;
    int parts = 0;
    for (int stage = 0; stage < s->stages; stage++)
        if (place[stage] == m->mesh.pp.rank)
            parts += p->chunk[stage].embedding + (p->chunk[stage].head && m->config.tied);
    return parts;
}

static MicroBatch *begin_micro_batch(Pipeline *p, Model *m, int index) {
    const Schedule *s = &p->schedule;
    MicroBatch *micro = &p->micro[index];
    if (p->passes_left[index] >= 0) return micro;
    *micro = micro_batch_of(m, p->input, index, p->input->loss_scale[index]);
    const int *place = s->place + s->direction[index] * s->stages;
    p->passes_left[index] = 0;
    for (int stage = 0; stage < s->stages; stage++)
        p->passes_left[index] += place[stage] == m->mesh.pp.rank;
    micro->embedding_parts = pipeline_embedding_parts(p, m, index);
    return micro;
}

// Starts this rank's receives of all messages that come before what the action at this position sends.
void pipeline_start_receives(Pipeline *p, Model *m, int position) {
    int rank = m->mesh.pp.rank;
    int until = pipeline_messages_by(p, p->next, rank, p->times.end[rank][position]);
    for (; p->next < until; p->next++) {
        const Message *message = &p->message[p->next];
        if (message->to != rank) continue;
        size_t slot = schedule_slot(&p->schedule, taker_of(message->pass));
        MicroBatch *micro = begin_micro_batch(p, m, message->pass.micro_batch);
        int64_t rows = m->sockets.region.rows(m->sockets.region.context, micro);
        Group line = message->pass.kind == PASS_F ? p->forward : p->backward;
        p->arrived[slot] =
            tensor_new(MEMORY_ACTIVATION, m->params.recipe.weight, SHAPE(rows, m->config.hidden));
        p->arriving[slot] = comm_receive(p->arrived[slot], message->from, line);
    }
}

int pipeline_messages_by(const Pipeline *p, int first, int rank, double end) {
    int i = first;
    while (i < p->messages &&
           (p->message[i].time < end || (p->message[i].time == end && p->message[i].from < rank)))
        i++;
    return i;
}

// Waits for a pass's input, if another rank has sent it.
static void take_input(Pipeline *p, StagePass pass, Tensor *input) {
    size_t slot = schedule_slot(&p->schedule, pass);
    if (!p->arriving[slot]) return;
    comm_wait(p->arriving[slot]);
    p->arriving[slot] = NULL;
    *input = p->arrived[slot];
    p->arrived[slot] = (Tensor){0};
}

static void send_output(Pipeline *p, Model *m, StagePass pass, Tensor *output) {
    if (schedule_sends_to(&p->schedule, pass) == NO_RANK) return;
    Group line = pass.kind == PASS_F ? p->forward : p->backward;
    const Message *message = &p->message[p->next];
    CHECK(message->from == m->mesh.pp.rank && message->pass.stage == pass.stage &&
              message->pass.micro_batch == pass.micro_batch,
          "the pipeline sends out of order: %s", schedule_action_text((Action){1, {pass}}));
    Request **sending = &p->sending[pass.kind == PASS_F];
    if (*sending) comm_wait(*sending);  // it holds its tensor
    *sending = comm_send(*output, message->to, line);
    p->next++;
    tensor_free(output);
}

void pipeline_compute(Pipeline *p, Model *m, StagePass pass) {
    MicroBatch *micro = begin_micro_batch(p, m, pass.micro_batch);
    Chunk chunk = p->chunk[pass.stage];
    clock_push(pass.kind == PASS_F ? "forward" : "backward");
    if (pass.kind == PASS_F) take_input(p, pass, &micro->x);
    else if (pass.kind != PASS_W) take_input(p, pass, &micro->dx);
    if (pass.kind == PASS_F) chunk_forward(m, micro, chunk);
    if (pass.kind == PASS_B) chunk_backward_input(m, micro, chunk);
    if (pass.kind == PASS_W) chunk_backward_weight(m, micro, chunk);
    if (pass.kind == PASS_BW) chunk_backward(m, micro, chunk);
    clock_pop();
}

// Sends the pass's output; after a micro-batch's last pass on this rank, frees what the micro-batch kept.
void pipeline_end_pass(Pipeline *p, Model *m, StagePass pass) {
    MicroBatch *micro = &p->micro[pass.micro_batch];
    if (pass.kind == PASS_F) {
        if (++p->held > p->most_held) p->most_held = p->held;
        if (p->chunk[pass.stage].head) op_accumulate(p->input->loss, micro->loss);
        int64_t kept = memory_account().now[MEMORY_ACTIVATION];
        if (p->input->kept_bytes && kept > *p->input->kept_bytes) *p->input->kept_bytes = kept;
        send_output(p, m, pass, &micro->x);
        return;
    }
    p->held -= pass.kind != PASS_W;
    if (pass.kind != PASS_W) send_output(p, m, pass, &micro->dx);
    if (pass.kind == PASS_B || --p->passes_left[pass.micro_batch] > 0) return;
    micro_batch_free(m, micro);
    bool last = ++p->finished == p->schedule.micro_batches;
    m->sockets.gradients.micro_batch_ready(m->sockets.gradients.context, m, last);
}

// Both passes of a pair at once, if a technique overlaps them; outputs are sent in the order of the list.
static void run_action(Pipeline *p, Model *m, const Action *action) {
    bool pair = action->passes == 2 && p->together;
    if (pair) p->together(p->together_context, p, m, action);
    for (int i = 0; i < action->passes; i++) {
        if (!pair) pipeline_compute(p, m, action->pass[i]);
        pipeline_end_pass(p, m, action->pass[i]);
    }
}

// A copy of a unit may see no micro-batch in a step (with DualPipe, if the only one goes in the other
// direction). It still joins its replicas' collectives of weights and gradients, and adds zero.
static void pass_idle_unit(Model *m, int unit) {
    const Sockets *sockets = &m->sockets;
    sockets->parameters.acquire(sockets->parameters.context, m, unit, FORWARD);
    sockets->parameters.release(sockets->parameters.context, m, unit, FORWARD);
    sockets->gradients.begin(sockets->gradients.context, m, unit);
    sockets->gradients.ready(sockets->gradients.context, m, unit, true);
}

static void begin_step(Pipeline *p, Model *m, const StepInput *input) {
    p->input = input;
    p->next = p->finished = p->held = 0;
    for (int i = 0; i < p->schedule.micro_batches; i++) p->passes_left[i] = -1;
    for (int unit = 0; unit < m->params.units; unit++) m->ready_left[unit] = p->finals[unit];
    for (int unit = 0; unit < m->params.units; unit++)
        if (p->idle[unit]) pass_idle_unit(m, unit);
}

static void run_list(Pipeline *p, Model *m) {
    const ActionList *list = &p->schedule.list[m->mesh.pp.rank];
    for (int i = 0; i < list->count; i++) {
        pipeline_start_receives(p, m, i);
        run_action(p, m, &list->action[i]);
    }
}

static void run(void *context, Model *m, const StepInput *input) {
    Pipeline *p = context;
    begin_step(p, m, input);
    if (p->instead) p->instead(p->instead_context, m);
    else run_list(p, m);
    for (int i = 0; i < 2; i++) {
        if (p->sending[i]) comm_wait(p->sending[i]);
        p->sending[i] = NULL;
    }
    // Only ranks with a last stage have a loss.
    if (m->mesh.pp.size > 1) comm_wait(comm_all_reduce(input->loss, REDUCE_SUM, m->mesh.pp));
}

// One micro-batch that is not trained on goes through all stages; every rank gets the loss.
static double evaluate(void *context, Model *m, MicroBatch *micro) {
    Pipeline *p = context;
    const Schedule *s = &p->schedule;
    int rank = m->mesh.pp.rank;
    const int *place = s->place;
    int64_t rows = m->sockets.region.rows(m->sockets.region.context, micro);
    double loss = 0;
    for (int stage = 0; stage < s->stages; stage++) {
        if (place[stage] != rank) continue;
        if (stage > 0 && place[stage - 1] != rank) {
            tensor_free(&micro->x);
            micro->x =
                tensor_new(MEMORY_ACTIVATION, m->params.recipe.weight, SHAPE(rows, m->config.hidden));
            comm_wait(comm_receive(micro->x, place[stage - 1], p->forward));
        }
        chunk_forward(m, micro, p->chunk[stage]);
        if (p->chunk[stage].head) loss = loss_value(micro->loss);
        else if (place[stage + 1] != rank) comm_wait(comm_send(micro->x, place[stage + 1], p->forward));
    }
    return m->mesh.pp.size > 1 ? comm_sum(loss, m->mesh.pp) : loss;
}

// ---- the record ----

// How often a step makes each unit's gradient final: once for each micro-batch that passes the unit here.
static void count_finals(Pipeline *p, const Model *m) {
    const Schedule *s = &p->schedule;
    int64_t passing[DIRECTIONS_MOST] = {0};  // micro-batches, by direction
    for (int i = 0; i < s->micro_batches; i++) passing[s->direction[i]]++;
    for (int unit = 0; unit < m->params.units; unit++) {
        int64_t seen = 0;
        for (int direction = 0; direction < s->directions; direction++) {
            bool here = false;
            const int *place = s->place + direction * s->stages;
            for (int stage = 0; stage < s->stages; stage++)
                here = here ||
                       (place[stage] == m->mesh.pp.rank && pipeline_in_chunk(m, &p->chunk[stage], unit));
            seen += here ? passing[direction] : 0;
        }
        p->idle[unit] = seen == 0 && m->params.unit[unit].count > 0;
        p->finals[unit] = seen + p->idle[unit];
    }
}

static void *plug(Model *m) {
    Pipeline *p = host_alloc(sizeof *p);
    *p = (Pipeline){
        .schedule = pipeline_schedule(&m->config), .forward = m->mesh.pp, .backward = m->mesh.pp_backward};
    size_t slots = schedule_slots(&p->schedule), micros = (size_t)p->schedule.micro_batches;
    p->chunk = host_alloc((size_t)p->schedule.stages * sizeof *p->chunk);
    pipeline_split_layers(&m->config, p->chunk, p->schedule.stages);
    p->times = schedule_times(&p->schedule, pipeline_unit_times);
    p->message = pipeline_messages(&p->schedule, &p->times, &p->messages);
    p->micro = calloc(micros, sizeof *p->micro);
    p->passes_left = calloc(micros, sizeof *p->passes_left);
    p->arrived = calloc(slots, sizeof *p->arrived);
    p->arriving = calloc(slots, sizeof *p->arriving);
    p->finals = host_alloc((size_t)m->params.units * sizeof *p->finals);
    p->idle = host_alloc((size_t)m->params.units * sizeof *p->idle);
    count_finals(p, m);
    CHECK(p->micro && p->passes_left && p->arrived && p->arriving, "out of host memory for a pipeline");
    m->sockets.schedule.context = p;
    m->sockets.schedule.run = run;
    m->sockets.schedule.evaluate = evaluate;
    return p;
}

static void unplug(Model *m, void *context) {
    (void)m;
    Pipeline *p = context;
    schedule_times_free(&p->times, &p->schedule);
    schedule_free(&p->schedule);
    free(p->chunk);
    free(p->message);
    free(p->micro);
    free(p->passes_left);
    free(p->arrived);
    free(p->arriving);
    free(p->finals);
    free(p->idle);
    free(p);
}

static void check(const Config *c) {
    ScheduleKind kind = (ScheduleKind)config_number(c, "schedule");
    bool made = !config_text(c, "load");
    CHECK(made || !config_given(c, "schedule"),
          "--schedule and --load are two schedules: give one of them");
    CHECK((made && kind == INTERLEAVED) || !config_given(c, "chunks"),
          "--chunks has an effect only with --schedule interleaved: add that, or leave out --chunks");
    int chunks = (int)config_number(c, "chunks");
    CHECK(c->pp <= RANKS_MOST, "--pp %ld: a schedule has at most %d ranks", c->pp, RANKS_MOST);
    CHECK(c->grad_acc <= MICRO_BATCHES_MOST, "--grad-acc %ld: a schedule has at most %d micro-batches",
          c->grad_acc, MICRO_BATCHES_MOST);
    CHECK(!made || kind != DUALPIPE || c->pp % 2 == 0,
          "--schedule dualpipe needs an even --pp, as each rank has a mirror, and --pp is %ld: "
          "--schedule dualpipe_v takes any",
          c->pp);
    CHECK(!made || kind != INTERLEAVED || c->pp * chunks <= STAGES_MOST,
          "--pp %ld x --chunks %d is more than %d stages: --chunks %ld would fit", c->pp, chunks,
          STAGES_MOST, STAGES_MOST / c->pp);
}

static void price(Price *price, const Model *m, const void *context) {
    const Pipeline *p = context;
    const Schedule *s = &p->schedule;
    const Config *c = &m->config;
    int rank = m->mesh.pp.rank;
    double layers = 0, passes = 0, head_micros = 0, lookup_micros = 0, head = 0, embedding = 0;
    for (int stage = 0; stage < s->stages; stage++) {
        if (!schedule_has_stage(s, rank, stage)) continue;
        const Chunk *chunk = &p->chunk[stage];
        double micros = 0, own = chunk->end_layer - chunk->first_layer;
        for (int i = 0; i < s->micro_batches; i++)
            micros += s->place[s->direction[i] * s->stages + stage] == rank;
        layers += own;
        passes += own * micros;
        head_micros += chunk->head ? micros : 0;
        lookup_micros += chunk->embedding ? micros : 0;
        head = fmax(head, chunk->head);
        embedding = fmax(embedding, chunk->embedding || (chunk->head && c->tied));
    }
    double share = passes / (double)(c->layers * c->grad_acc);
    price->enters *= share, price->leaves *= share;
    price->enters_backward *= share, price->leaves_backward *= share;
    price->forwards *= share, price->attentions *= share, price->backwards *= share;
    price->finals = p->finals;
    price->peak_counted = true;  // the schedule decides how many micro-batches are in flight
    price->head_micros = price->losses = head_micros;
    price->lookup_micros = lookup_micros;
    for (Role role = ROLE_NORM1; role <= ROLE_DOWN; role++)
        price->elements[role] *= layers / (double)c->layers;
    for (Role role = ROLE_ROUTER; role <= ROLE_EXPERT_DOWN; role++)
        price->elements[role] *= layers / (double)c->layers;
    price->elements[ROLE_EMBEDDING] *= embedding;
    price->elements[ROLE_NORM] *= head;
    price->elements[ROLE_HEAD] *= head;
    price->blocks = NAN;  // what is held at once depends on the schedule: pipeline_memory.c

    MicroBatch one = {.b = c->micro_batch, .s = model_tokens(m) / c->micro_batch};
    int64_t rows = m->sockets.region.rows(m->sockets.region.context, &one);
    double calls = 0, sends = 0;
    for (int i = 0; i < p->messages; i++) {
        calls += p->message[i].from == rank || p->message[i].to == rank;
        sends += p->message[i].from == rank;
    }
    price_sent(price, "transfers", calls,
               sends * (double)(rows * c->hidden) * (double)dtype_size(m->params.recipe.weight),
               m->mesh.pp);
    price_all_reduce(price, 1, 1, F64, m->mesh.pp);
}

static const Option options[] = {
    {"schedule", OPTION_CHOICE, NULL, "one_f_one_b", 0, 0, SCHEDULE_NAMES,
     "in which order a rank's passes run", false},
    {"chunks", OPTION_INT, NULL, "2", 1, 64, "stages", "stages on each rank, with interleaved", false},
    {"stage-layers", OPTION_TEXT, NULL, NULL, 0, 0, "5,4,4,3",
     "layers of each stage; without it, as evenly as they divide", false},
    {"load", OPTION_TEXT, NULL, NULL, 0, 0, "FILE", "run the schedule that `schedule --dump` has written",
     false},
};

const Technique pipeline = {.name = "pipeline",
                            .option = options,
                            .options = sizeof options / sizeof *options,
                            .asked = "--pp",
                            .axes = 1u << AXIS_PP,
                            .check = check,
                            .shard = pipeline_shard,
                            .plug = plug,
                            .unplug = unplug,
                            .price = price};
