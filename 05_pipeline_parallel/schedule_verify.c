// schedule_verify.c: the rules that a schedule must keep, checked without running it. Playbook: "Pipeline
// Parallelism".
//
// A schedule can go wrong in four ways. A rank has a pass that it cannot run; a pass runs twice or never (a
// forgotten W goes unnoticed: the loss looks fine, but a gradient lacks a micro-batch); a rank runs passes in
// the wrong order; or each list is fine by itself, but ranks wait for each other. Each way has named rules
// (schedule.h), and the first rule that is broken is reported with rank, position and action.
//
// Whether messages arrive in the order in which they are received is a separate question, because the answer
// depends on the transport: one queue for each pair of ranks, or one for activations and one for gradients.
#include <stdarg.h>
#include <stdlib.h>

#include "schedule.h"

static const char *const rule_text[] = {
    [RULE_SOUND] = "sound",
    [RULE_KNOWN] = "a pass is of a stage, a micro-batch and a direction that exist",
    [RULE_DIRECTION] = "a micro-batch goes in its own direction",
    [RULE_PLACE] = "a rank works on its own stages",
    [RULE_PAIR] = "a pair is F and BW",
    [RULE_TWICE] = "nothing runs twice",
    [RULE_F_MISSING] = "every F runs",
    [RULE_B_MISSING] = "every B runs",
    [RULE_W_MISSING] = "no W is left at the end",
    [RULE_F_AFTER_F] = "F after the F of the stage before",
    [RULE_B_AFTER_B] = "B after the B of the next stage",
    [RULE_B_AFTER_F] = "B after its F",
    [RULE_W_AFTER_B] = "W after its B",
    [RULE_DEADLOCK] = "no deadlock: every rank reaches the end of its list",
    [RULE_MESSAGE_ORDER] = "messages are received in the order in which they were sent",
};

const char *schedule_rule_text(ScheduleRule rule) { return rule_text[rule]; }

// A verification under way: where each pass stands in the list of its rank, by slot; -1: not yet seen.
typedef struct Check {
    const Schedule *schedule;
    ScheduleFault *fault;
    int *position;
} Check;

static bool broken(Check *check, ScheduleRule rule, int rank, int position, const char *format, ...)
    PRINTF_LIKE(5, 6);
static bool broken(Check *check, ScheduleRule rule, int rank, int position, const char *format, ...) {
    ScheduleFault *fault = check->fault;
    const ActionList *list = &check->schedule->list[rank];
    char reason[200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    fault->rule = rule;
    fault->rank = rank;
    fault->position = position;
    snprintf(fault->sentence, sizeof fault->sentence,
             "rank %d, position %d (%s) breaks the rule \"%s\": %s", rank, position,
             position < list->count ? schedule_action_text(list->action[position]) : "the end",
             rule_text[rule], reason);
    return false;
}

static const char *text(StagePass pass) { return schedule_action_text((Action){1, {pass}}); }

// ---- a pass by itself ----

static bool within(int x, int bound) { return x >= 0 && x < bound; }

static bool check_pass(Check *check, int rank, int position, StagePass pass) {
    const Schedule *s = check->schedule;
    if (!within(pass.stage, s->stages) || !within(pass.micro_batch, s->micro_batches) ||
        !within(pass.direction, s->directions))
        return broken(check, RULE_KNOWN, rank, position,
                      "there are %d stages, %d micro-batches, %d directions", s->stages, s->micro_batches,
                      s->directions);
    int direction = s->direction[pass.micro_batch];
    if (pass.direction != direction)
        return broken(check, RULE_DIRECTION, rank, position, "micro-batch %d goes in direction %d",
                      pass.micro_batch, direction);
    if (schedule_rank(s, pass) != rank)
        return broken(check, RULE_PLACE, rank, position, "stage %d of direction %d is on rank %d",
                      pass.stage, direction, schedule_rank(s, pass));
    for (int half = 0; half < 2; half++) {  // BW is B and W
        StagePass part = pass;
        if (pass.kind == PASS_BW) part.kind = half ? PASS_W : PASS_B;
        else if (half) break;
        int *at = &check->position[schedule_slot(s, part)];
        if (*at >= 0)
            return broken(check, RULE_TWICE, rank, position, "%s stands at position %d already", text(part),
                          *at);
        *at = position;
    }
    return true;
}

static bool check_action(Check *check, int rank, int position, const Action *action) {
    if (action->passes == 2 && (action->pass[0].kind != PASS_F || action->pass[1].kind != PASS_BW))
        return broken(check, RULE_PAIR, rank, position, "one computes while the other communicates");
    for (int i = 0; i < action->passes; i++)
        if (!check_pass(check, rank, position, action->pass[i])) return false;
    return true;
}

// ---- all of them ----

// A pass must be there, and after the pass that it needs if that is on the same rank. A pass of another rank
// is waited for.
static bool check_order(Check *check, StagePass pass, ScheduleRule missing) {
    const Schedule *s = check->schedule;
    int rank = schedule_rank(s, pass), position = check->position[schedule_slot(s, pass)];
    if (position < 0) return broken(check, missing, rank, s->list[rank].count, "%s never runs", text(pass));
    StagePass needed = pass;
    if (pass.kind == PASS_B) {
        needed.kind = PASS_F;
        int at = check->position[schedule_slot(s, needed)];
        if (at >= position)
            return broken(check, RULE_B_AFTER_F, rank, position, "%s stands at position %d", text(needed),
                          at);
    }
    if (!schedule_needs(s, pass, &needed) || schedule_rank(s, needed) != rank) return true;
    int at = check->position[schedule_slot(s, needed)];
    // a BW brings its W along
    bool together = pass.kind == PASS_W && at == position;
    ScheduleRule rule = pass.kind == PASS_F   ? RULE_F_AFTER_F
                        : pass.kind == PASS_B ? RULE_B_AFTER_B
                                              : RULE_W_AFTER_B;
    return at < position || together ||
           broken(check, rule, rank, position, "%s stands at position %d", text(needed), at);
}

static bool check_orders(Check *check) {
    const Schedule *s = check->schedule;
    static const ScheduleRule missing[] = {RULE_F_MISSING, RULE_B_MISSING, RULE_W_MISSING};
    for (int kind = PASS_F; kind <= PASS_W; kind++)
        for (int i = 0; i < s->micro_batches; i++)
            for (int stage = 0; stage < s->stages; stage++) {
                StagePass pass = {(PassKind)kind, stage, i, s->direction[i]};
                if (!check_order(check, pass, missing[kind])) return false;
            }
    return true;
}

// The input that a stuck action lacks.
static StagePass lacking(const ScheduleWalk *walk, const Action *action) {
    StagePass needed = action->pass[0];
    for (int i = 0; i < action->passes; i++)
        if (schedule_needs(walk->schedule, action->pass[i], &needed) &&
            !walk->done[schedule_slot(walk->schedule, needed)])
            break;
    return needed;
}

static bool check_deadlock(Check *check) {
    const Schedule *s = check->schedule;
    ScheduleWalk walk = schedule_walk(s);
    while (schedule_walk_next(&walk)) continue;
    bool ends = true;
    for (int r = 0; r < s->ranks && ends; r++) {
        if (walk.at[r] == s->list[r].count) continue;
        StagePass needed = lacking(&walk, &s->list[r].action[walk.at[r]]);
        int other = schedule_rank(s, needed), stands = walk.at[other];
        ends = broken(check, RULE_DEADLOCK, r, walk.at[r],
                      "it waits for %s at position %d of rank %d, which waits itself at position %d (%s)",
                      text(needed), check->position[schedule_slot(s, needed)], other, stands,
                      schedule_action_text(s->list[other].action[stands]));
    }
    schedule_walk_end(&walk);
    return ends;
}

bool schedule_verify(const Schedule *s, ScheduleFault *fault) {
    size_t slots = schedule_slots(s);
    Check check = {s, fault, host_alloc(slots * sizeof(int))};
    *fault = (ScheduleFault){.rule = RULE_SOUND};
    for (size_t i = 0; i < slots; i++) check.position[i] = -1;
    bool sound = true;
    for (int r = 0; r < s->ranks; r++)
        for (int i = 0; i < s->list[r].count && sound; i++)
            sound = check_action(&check, r, i, &s->list[r].action[i]);
    sound = sound && check_orders(&check) && check_deadlock(&check);
    free(check.position);
    return sound;
}

// ---- the order of messages ----

// The passes of a rank that send to `peer`, or receive from it, in the order of its list: those of `kind`, or
// of both kinds (PASS_BW). Returns how many. In a pair F comes first, on both sides.
static int messages(const Schedule *s, int rank, int peer, bool sends, PassKind kind, StagePass *pass,
                    int *position) {
    int count = 0;
    for (int i = 0; i < s->list[rank].count; i++)
        for (int j = 0; j < s->list[rank].action[i].passes; j++) {
            StagePass one = s->list[rank].action[i].pass[j];
            bool forward = one.kind == PASS_F;
            if (kind != PASS_BW && forward != (kind == PASS_F)) continue;
            if ((sends ? schedule_sends_to(s, one) : schedule_receives_from(s, one)) != peer) continue;
            position[count] = i;
            pass[count] = one;
            if (sends) pass[count].stage += forward ? 1 : -1;  // the pass that takes it
            count++;
        }
    return count;
}

static bool same_message(StagePass a, StagePass b) {
    return a.stage == b.stage && a.micro_batch == b.micro_batch && (a.kind == PASS_F) == (b.kind == PASS_F);
}

bool schedule_message_order(const Schedule *s, ScheduleQueues queues, ScheduleFault *fault) {
    Check check = {s, fault, NULL};
    *fault = (ScheduleFault){.rule = RULE_SOUND};
    size_t most = 2 * (size_t)s->stages * (size_t)s->micro_batches;
    StagePass *sent = host_alloc(most * sizeof *sent), *received = host_alloc(most * sizeof *received);
    int *from = host_alloc(most * sizeof *from), *to = host_alloc(most * sizeof *to);
    bool sound = true;
    for (int pair = 0; pair < s->ranks * s->ranks; pair++)
        for (int kind = PASS_F; kind <= PASS_B && sound; kind++) {
            int r = pair / s->ranks, peer = pair % s->ranks;
            PassKind which = queues == QUEUE_PAIR ? PASS_BW : (PassKind)kind;
            int count = messages(s, r, peer, true, which, sent, from);
            messages(s, peer, r, false, which, received, to);
            for (int i = 0; i < count && sound; i++)
                if (!same_message(sent[i], received[i]))
                    sound = broken(&check, RULE_MESSAGE_ORDER, peer, to[i],
                                   "message %d from rank %d is for %s, sent at position %d there", i, r,
                                   text(sent[i]), from[i]);
        }
    free(sent);
    free(received);
    free(from);
    free(to);
    return sound;
}

// ---- what a rank needs and sends ----

RankCosts schedule_costs(const Schedule *s, int rank) {
    RankCosts costs = {0};
    int to_b = 0, to_w = 0, most_b = 0, most_w = 0;
    double share = (double)s->ranks / s->stages;
    for (int i = 0; i < s->list[rank].count; i++) {
        const Action *action = &s->list[rank].action[i];
        for (int j = 0; j < action->passes; j++) {  // F of a pair is first: both are held while it runs
            PassKind kind = action->pass[j].kind;
            bool sends = schedule_sends_to(s, action->pass[j]) != NO_RANK;
            costs.activations += sends && kind == PASS_F;
            costs.gradients += sends && kind != PASS_F;
            to_b += (kind == PASS_F) - (kind == PASS_B || kind == PASS_BW);
            to_w += (kind == PASS_F) - (kind == PASS_W || kind == PASS_BW);
            if (to_b > most_b) most_b = to_b;
            if (to_w > most_w) most_w = to_w;
        }
    }
    for (int k = 0; k < s->stages; k++) costs.weights += schedule_has_stage(s, rank, k);
    costs.weights *= share;
    costs.held_to_b = most_b * share;
    costs.held_to_w = most_w * share;
    return costs;
}

RankCosts schedule_most(const Schedule *s) {
    RankCosts most = {0};
    for (int r = 0; r < s->ranks; r++) {
        RankCosts costs = schedule_costs(s, r);
        if (costs.held_to_b > most.held_to_b) most.held_to_b = costs.held_to_b;
        if (costs.held_to_w > most.held_to_w) most.held_to_w = costs.held_to_w;
        if (costs.weights > most.weights) most.weights = costs.weights;
        if (costs.activations > most.activations) most.activations = costs.activations;
        if (costs.gradients > most.gradients) most.gradients = costs.gradients;
    }
    return most;
}
