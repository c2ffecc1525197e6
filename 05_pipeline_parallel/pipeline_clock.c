// pipeline_clock.c: when a step of pipeline.c ends on the model clock. Playbook: "Pipeline Parallelism".
//
// By the schedule's own clock a message leaves when its pass ends, and arrives a hop later. In a run it
// leaves when both ends have started it; and on each rank the messages of one direction, sent and received,
// run one after another, in the order in which the rank started them. Receives are started early enough if
// every F, B and W takes one unit and a hop no time (pipeline.c); with real durations that may be too late:
//
//     rank 2  [B0][B1][B2]            rank 1 starts to receive the output of rank 2's B1 when its own B0 has
//     rank 1     .[B0]..[B1]..[B2]    ended, after the send of that B0's output: it waits for two hops (.)
//
// So here the ranks walk their lists as in pipeline.c, and messages run in the order that all ranks share:
//
//     begin of a message = max over both ends of (started, end of the message before it on that line)
//
// Between nodes a hop is longer, and two sends of a rank share its port. The passes of a pair run one after
// the other. This file has no main: pipeline_program.c compares the run of every schedule with it.
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "pipeline.h"

// One rank's walk: what pipeline.c does, and when.
typedef struct Walk {
    double now;          // when the actions that it has walked end
    int action, next;    // in its list; in the messages, as Pipeline.next
    bool receiving;      // the receives that come before this action have been started
    double line_end[2];  // by direction: the end of the last message that ran …
    double sent_end[2];  // … and of the last that it sent, for which its next send waits
} Walk;

typedef struct Clock {
    const Pipeline *p;
    const PassClock *passes;  // how long each takes
    double hop[2];         // inside a node, and across
    double *sent, *asked;  // (messages) when their senders and their receivers have started them
    double *arrived;       // (slots) when a pass's output is on the other rank
    Walk walk[RANKS_MOST];
} Clock;

static int line_of(StagePass pass) { return pass.kind == PASS_F ? 0 : 1; }

bool pipeline_goes_across(const Pipeline *p, int from, int to) {
    const int *rank = p->forward.member;
    return clock_node(rank[from]) != clock_node(rank[to]);
}

static void start_receives(Clock *c, Walk *w, int rank) {
    int until = pipeline_messages_by(c->p, w->next, rank, c->p->times.end[rank][w->action]);
    for (; w->next < until; w->next++)
        if (c->p->message[w->next].to == rank) c->asked[w->next] = w->now;
    if (c->passes->receive) c->passes->receive(c->passes->context, rank, w->action, w->now);
}

static void end_pass(Clock *c, Walk *w, int rank, StagePass pass) {
    bool sends = schedule_sends_to(&c->p->schedule, pass) != NO_RANK;
    double sent = 0;
    if (sends) w->now = fmax(w->now, w->sent_end[line_of(pass)]);
    w->now = c->passes->end(c->passes->context, rank, pass, w->now, &sent);
    if (sends) c->sent[w->next++] = sent;
}

static void run_action(Clock *c, Walk *w, int rank) {
    const Schedule *s = &c->p->schedule;
    const Action *action = &s->list[rank].action[w->action++];
    for (int i = 0; i < action->passes; i++) {
        StagePass pass = action->pass[i], needed;
        if (schedule_needs(s, pass, &needed) && schedule_receives_from(s, pass) != NO_RANK)
            w->now = fmax(w->now, c->arrived[schedule_slot(s, needed)]);
        w->now = c->passes->compute(c->passes->context, rank, pass, w->now);
        end_pass(c, w, rank, pass);
    }
}

// Walks until the rank has started all its messages before this place in the order; with INT_MAX, to the end.
static void walk_to(Clock *c, int rank, int place) {
    const ActionList *list = &c->p->schedule.list[rank];
    Walk *w = &c->walk[rank];
    while (w->next < place && w->action < list->count) {
        if (!w->receiving) start_receives(c, w, rank);
        else run_action(c, w, rank);
        w->receiving = !w->receiving;
    }
}

static void run_message(Clock *c, int i) {
    const Message *message = &c->p->message[i];
    walk_to(c, message->from, i + 1);
    walk_to(c, message->to, i + 1);
    Walk *from = &c->walk[message->from], *to = &c->walk[message->to];
    int line = line_of(message->pass);
    double begin = fmax(fmax(c->sent[i], c->asked[i]), fmax(from->line_end[line], to->line_end[line]));
    double end = begin + c->hop[pipeline_goes_across(c->p, message->from, message->to)];
    from->line_end[line] = to->line_end[line] = from->sent_end[line] = end;
    c->arrived[schedule_slot(&c->p->schedule, message->pass)] = end;
}

static void set_hops(double *hop, double bytes) {
    Traffic message = {1, bytes, 0}, none = {0};
    hop[0] = clock_transfers_seconds(message, none);
    hop[1] = clock_transfers_seconds(none, message);
}

void pipeline_walk(const Pipeline *p, const PassClock *clock, double bytes, double *end) {
    size_t slots = schedule_slots(&p->schedule), messages = (size_t)p->messages;
    Clock c = {.p = p, .passes = clock, .sent = calloc(2 * messages + slots, sizeof *c.sent)};
    CHECK(c.sent, "out of host memory for the times of %zu messages", messages);
    c.asked = c.sent + messages, c.arrived = c.asked + messages;
    set_hops(c.hop, bytes);
    for (int rank = 0; rank < p->schedule.ranks; rank++) c.walk[rank].now = end[rank];
    for (int i = 0; i < p->messages; i++) run_message(&c, i);
    for (int rank = 0; rank < p->schedule.ranks; rank++) {
        walk_to(&c, rank, INT_MAX);
        const Walk *w = &c.walk[rank];
        end[rank] = fmax(w->now, fmax(w->sent_end[0], w->sent_end[1]));
    }
    free(c.sent);
}

// ---- with the same durations on every stage ----

typedef struct Uniform {
    const Pipeline *p;
    Durations d;
    double hop[2], port_free[RANKS_MOST][2];  // inside a node, and across: each way has its port
} Uniform;

static double compute(void *context, int rank, StagePass pass, double now) {
    (void)rank;
    const Durations *d = &((Uniform *)context)->d;
    if (pass.kind == PASS_F) return now + d->F;
    return now + (pass.kind != PASS_W ? d->B : 0) + (pass.kind != PASS_B ? d->W : 0);
}

static double send(void *context, int rank, StagePass pass, double now, double *sent) {
    Uniform *u = context;
    int to = schedule_sends_to(&u->p->schedule, pass);
    if (to == NO_RANK) return now;
    bool across = pipeline_goes_across(u->p, rank, to);
    *sent = fmax(now, u->port_free[rank][across]);
    u->port_free[rank][across] = *sent + u->hop[across];
    return now;
}

double pipeline_makespan(const Pipeline *p, Durations d, double bytes) {
    Uniform uniform = {.p = p, .d = d};
    set_hops(uniform.hop, bytes);
    PassClock clock = {NULL, compute, send, &uniform};
    double end[RANKS_MOST] = {0}, last = 0;
    pipeline_walk(p, &clock, bytes, end);
    for (int rank = 0; rank < p->schedule.ranks; rank++) last = fmax(last, end[rank]);
    return last;
}
