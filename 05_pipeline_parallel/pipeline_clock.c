// pipeline_clock.c: when a step of pipeline.c ends on the model clock. Playbook: "Pipeline Parallelism".
//
// By the schedule's own clock a message leaves when its pass ends, and arrives a hop later. In a run it
// leaves when both ends have started it; and on each rank the messages of one direction, sent and received,
// run one after another, in the order in which the rank started them. Receives are started early enough if
// every pass takes one unit and a hop no time (pipeline.c); with real durations that may be too late:
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
    double now;           // when the actions that it has walked end
    int action, next;     // in its list; in the messages, as Pipeline.next
    bool receiving;       // the receives that come before this action have been started
    double line_end[2];   // by direction: the end of the last message that ran …
    double sent_end[2];   // … and of the last that it sent, for which its next send waits
    double port_free[2];  // when the port to its node, and the one across nodes, are free
} Walk;

typedef struct Clock {
    const Pipeline *p;
    Durations d;           // of a stage
    double hop[2];         // inside a node, and across
    double *sent, *asked;  // (messages) when their senders and their receivers have started them
    double *arrived;       // (slots) when a pass's output is on the other rank
    Walk walk[RANKS_MOST];
} Clock;

static int line_of(StagePass pass) { return pass.kind == PASS_F ? 0 : 1; }

static bool goes_across(const Clock *c, const Message *message) {
    const int *rank = c->p->forward.member;
    return clock_node(rank[message->from]) != clock_node(rank[message->to]);
}

static double seconds_of(const Clock *c, StagePass pass) {
    if (pass.kind == PASS_F) return c->d.F;
    return (pass.kind != PASS_W ? c->d.B : 0) + (pass.kind != PASS_B ? c->d.W : 0);
}

static void start_receives(Clock *c, Walk *w, int rank) {
    int until = pipeline_messages_by(c->p, w->next, rank, c->p->times.end[rank][w->action]);
    for (; w->next < until; w->next++)
        if (c->p->message[w->next].to == rank) c->asked[w->next] = w->now;
}

static void start_send(Clock *c, Walk *w) {
    const Message *message = &c->p->message[w->next];
    bool across = goes_across(c, message);
    w->now = fmax(w->now, w->sent_end[line_of(message->pass)]);
    double start = fmax(w->now, w->port_free[across]);
    w->port_free[across] = start + c->hop[across];
    c->sent[w->next++] = start;
}

static void run_action(Clock *c, Walk *w, const Action *action) {
    const Schedule *s = &c->p->schedule;
    for (int i = 0; i < action->passes; i++) {
        StagePass pass = action->pass[i], needed;
        if (schedule_needs(s, pass, &needed) && schedule_receives_from(s, pass) != NO_RANK)
            w->now = fmax(w->now, c->arrived[schedule_slot(s, needed)]);
        w->now += seconds_of(c, pass);
        if (schedule_sends_to(s, pass) != NO_RANK) start_send(c, w);
    }
}

// Walks until the rank has started all its messages before this place in the order; with INT_MAX, to the end.
static void walk_to(Clock *c, int rank, int place) {
    const ActionList *list = &c->p->schedule.list[rank];
    Walk *w = &c->walk[rank];
    while (w->next < place && w->action < list->count) {
        if (!w->receiving) start_receives(c, w, rank);
        else run_action(c, w, &list->action[w->action++]);
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
    double end = begin + c->hop[goes_across(c, message)];
    from->line_end[line] = to->line_end[line] = from->sent_end[line] = end;
    c->arrived[schedule_slot(&c->p->schedule, message->pass)] = end;
}

double pipeline_makespan(const Pipeline *p, Durations d, double bytes) {
    Traffic message = {1, bytes, 0}, none = {0};
    size_t slots = schedule_slots(&p->schedule), messages = (size_t)p->messages;
    Clock c = {.p = p,
               .d = d,
               .hop = {clock_transfers_seconds(message, none), clock_transfers_seconds(none, message)},
               .sent = calloc(2 * messages + slots, sizeof *c.sent)};
    CHECK(c.sent, "out of host memory for the times of %zu messages", messages);
    c.asked = c.sent + messages, c.arrived = c.asked + messages;
    for (int i = 0; i < p->messages; i++) run_message(&c, i);
    double end = 0;
    for (int rank = 0; rank < p->schedule.ranks; rank++) {
        walk_to(&c, rank, INT_MAX);
        for (int line = 0; line < 2; line++) end = fmax(end, c.walk[rank].sent_end[line]);
        end = fmax(end, c.walk[rank].now);
    }
    free(c.sent);
    return end;
}
