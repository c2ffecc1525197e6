// schedule.h: a pipeline's schedule is data. Generators write it, one verifier checks it, one clock times
// it, one picture shows it, and the runtime walks a rank's list and does what it says.
//
// The model is a chain of `stages`. A pass is the work of one stage on one micro-batch:
//
//         what                                  needs                    sends
//     F   forward                               F of the stage before    activations to the stage after
//     B   backward for the inputs               B of the stage after     gradients to the stage before
//     W   backward for the weights              B of the same stage      nothing
//     BW  both at once, the usual backward      as B                     as B
//
// The last stage has the loss: its B needs its own F.
//
// Each rank has a list of actions, which it runs in order. An action is a pass, or a pair F+BW, in which each
// hides the other's communication. Which rank has a stage is data (`place`): one stage per rank, v stages per
// rank in loops, a V. A schedule may run the chain in two directions at once, on two copies of the weights:
// `place` is then a table of two rows, and each micro-batch belongs to one direction.
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the data: schedule.c ----

typedef enum PassKind { PASS_F, PASS_B, PASS_W, PASS_BW } PassKind;

typedef struct StagePass {
    PassKind kind;
    int stage, micro_batch, direction;
} StagePass;

typedef struct Action {
    int passes;  // 1, or 2: F and BW, overlapped
    StagePass pass[2];
} Action;

typedef struct ActionList {
    Action *action;
    int count, room;
} ActionList;

enum { DIRECTIONS_MOST = 2, RANKS_MOST = 64, STAGES_MOST = 512, MICRO_BATCHES_MOST = 4096, NO_RANK = -1 };

typedef struct Schedule {
    char name[32];
    int ranks, micro_batches, stages, directions;
    int *place;        // (directions, stages) the rank of each stage
    int *direction;    // (micro_batches) of each micro-batch
    ActionList *list;  // (ranks)
} Schedule;

// Empty lists; every micro-batch has direction 0. Stages loop over the ranks: stage k is on rank k modulo p.
// The caller of this and of all generators ends the schedule with schedule_free.
Schedule schedule_new(const char *name, int ranks, int micro_batches, int stages, int directions);
void schedule_free(Schedule *schedule);

// Appends an action. A pass of a micro-batch that does not exist, below 0 or from m on, is left out. So a
// generator needs only the loop of the steady state: in warm-up and at the end some of its micro-batches do
// not exist. A schedule stays sound if all passes of a micro-batch are taken out, because micro-batches do
// not need each other.
void schedule_add(Schedule *schedule, int rank, PassKind kind, int stage, int micro_batch);
void schedule_add_pair(Schedule *schedule, int rank, int f_stage, int f_micro_batch, int b_stage,
                       int b_micro_batch);

// Even of micro-batches that do not exist.
void schedule_append(Schedule *schedule, int rank, Action action);

// The rank that does this pass.
int schedule_rank(const Schedule *schedule, StagePass pass);
// Whether a rank has a stage, in one direction or in both: it stores the weights once.
bool schedule_has_stage(const Schedule *schedule, int rank, int stage);
// The pass that must have ended before this one, of a neighbouring stage or of the same one. False: there is
// none.
bool schedule_needs(const Schedule *schedule, StagePass pass, StagePass *needed);
// For the runtime: the rank from which a pass receives its input (F: activations; B, BW: gradients), and
// to which it sends its output. NO_RANK: no message, as the neighbouring stage is on the same rank, or
// there is none.
int schedule_receives_from(const Schedule *schedule, StagePass pass);
int schedule_sends_to(const Schedule *schedule, StagePass pass);
// "F0.3.0+BW3.5.1": kind, stage, micro-batch, direction. The result is one of 4 static buffers in turn.
const char *schedule_action_text(Action action);

// Runs the lists as ranks would if receives block and sends do not, one action per call:
//     ScheduleWalk walk = schedule_walk(s);
//     while (schedule_walk_next(&walk)) …walk.rank, walk.position…
//     schedule_walk_end(&walk);
// Passes come after those that they need. At the end rank r is before action at[r].
typedef struct ScheduleWalk {
    const Schedule *schedule;
    int rank, position;  // of the action that runs now
    int *at;             // (ranks)
    bool *done;          // by schedule_slot
} ScheduleWalk;

ScheduleWalk schedule_walk(const Schedule *schedule);
bool schedule_walk_next(ScheduleWalk *walk);
void schedule_walk_end(ScheduleWalk *walk);
// Index of a pass in a table of schedule_slots entries: F, B (also BW's) and W of each stage and
// micro-batch.
size_t schedule_slot(const Schedule *schedule, StagePass pass);
size_t schedule_slots(const Schedule *schedule);

// ---- the verifier: schedule_verify.c ----

typedef enum ScheduleRule {
    RULE_SOUND,      // nothing is wrong
    RULE_KNOWN,      // a pass is of a stage, a micro-batch and a direction that exist
    RULE_DIRECTION,  // a micro-batch goes in its own direction
    RULE_PLACE,      // a rank works on its own stages
    RULE_PAIR,       // a pair is F and BW
    RULE_TWICE,      // nothing runs twice
    RULE_F_MISSING,  // every F, every B runs
    RULE_B_MISSING,
    RULE_W_MISSING,     // no W is left at the end of the step
    RULE_F_AFTER_F,     // on one rank: F after the F of the stage before
    RULE_B_AFTER_B,     // on one rank: B after the B of the next stage
    RULE_B_AFTER_F,     // B after F of the same stage
    RULE_W_AFTER_B,     // W after B of the same stage
    RULE_DEADLOCK,      // lists that run in order come to their ends
    RULE_MESSAGE_ORDER  // messages are received in the order in which they were sent
} ScheduleRule;

typedef struct ScheduleFault {
    ScheduleRule rule;
    int rank, position;
    char sentence[320];  // names rank, position, action and rule
} ScheduleFault;

// Checks all rules but the last. *fault is the first that is broken.
bool schedule_verify(const Schedule *schedule, ScheduleFault *fault);

// Checks the last rule, for a schedule that keeps the others. Messages from one rank to another queue up:
// all in one queue, or activations in one and gradients in another.
typedef enum ScheduleQueues { QUEUE_PAIR, QUEUE_PAIR_AND_KIND } ScheduleQueues;
bool schedule_message_order(const Schedule *schedule, ScheduleQueues queues, ScheduleFault *fault);
// In words: "W after its B".
const char *schedule_rule_text(ScheduleRule rule);

// What a rank needs and sends in a verified schedule. Activations are counted in micro-batches of a p-th of
// the model: a micro-batch of one of 2 p stages counts as a half.
typedef struct RankCosts {
    double held_to_b;            // most micro-batches between F and B: all that backward needs
    double held_to_w;            // between F and W: past B, W still needs inputs and output gradients
    double weights;              // in p-ths of the model
    int activations, gradients;  // messages sent in a step
} RankCosts;
RankCosts schedule_costs(const Schedule *schedule, int rank);
// The largest of each over ranks.
RankCosts schedule_most(const Schedule *schedule);

// ---- the clock: schedule_clock.c ----

// For a p-th of the model and one micro-batch; a stage takes p / stages of that. Sends are eager.
typedef struct Durations {
    double F, B, W;
    double pair;  // F and BW together
    double hop;   // from the end of a pass until its output is on another rank
} Durations;

typedef struct ScheduleTimes {
    double *begin[RANKS_MOST], *end[RANKS_MOST];  // of each action
    double idle[RANKS_MOST];                      // makespan - what the rank computes
    double makespan;
    double bubble;  // makespan - m (F + B + W)
} ScheduleTimes;

// For a verified schedule. If durations are whole numbers, times are exact.
ScheduleTimes schedule_times(const Schedule *schedule, Durations durations);
void schedule_times_free(ScheduleTimes *times, const Schedule *schedule);
// Time per step, in the long run, if steps follow each other without a barrier; takes as long as clocking p
// steps. *bubble (may be NULL): period - m (F + B + W).
double schedule_period(const Schedule *schedule, Durations durations, double *bubble);

// ---- pictures and text: schedule_picture.c, schedule_text.c ----

// One row per rank, fitted to `columns`. The caller frees it.
char *schedule_letters(const Schedule *schedule, const ScheduleTimes *times, int columns);
void schedule_svg(const Schedule *schedule, const ScheduleTimes *times, const char *title,
                  const char *file);

void schedule_write(const Schedule *schedule, FILE *file);
// Reads text in the format of schedule_write. Returns NULL, or one sentence that names the line at fault,
// which the caller frees. The schedule is not verified yet.
char *schedule_parse(Schedule *schedule, const char *text, size_t size);
// The same for a file, not verified either. Fatal if it is not a schedule: names --load and the file.
Schedule schedule_load(const char *path);

// ---- how good it could be: schedule_search.c ----

// The least makespan of any order of F, B and W (BW split) with the same placement, in which no rank holds
// more than the schedule's largest held_to_w. Exhaustive: for a few ranks, micro-batches and stages, one
// direction, no hop, and durations of few whole units.
double schedule_best_makespan(const Schedule *schedule, Durations durations);
bool schedule_can_search(const Schedule *schedule, Durations durations);

// ---- the generators, one file each: p ranks, m micro-batches ----

Schedule schedule_afab(int p, int m);
// split: B and W in place of BW, one right after the other.
Schedule schedule_one_f_one_b(int p, int m, bool split);
// v stages per rank, which take turns every `group` micro-batches: p is depth-first, m breadth-first.
Schedule schedule_interleaved(int p, int m, int v, int group);
Schedule schedule_zero_bubble(int p, int m, int level);  // 1: ZB-H1, 2: ZB-H2
Schedule schedule_zero_bubble_v(int p, int m);
// No rank holds more than `limit` micro-batches from F to W.
Schedule schedule_zero_bubble_auto(int p, int m, Durations durations, int limit);
Schedule schedule_dualpipe(int p, int m);  // p even
Schedule schedule_dualpipe_v(int p, int m);

// Both DualPipes are made of this: a rank's list for two chunks, each of which sees micro-batches [first,
// first + count). k: the rank's distance from the nearer end of a pipeline of 2 x half ranks.
typedef struct DualChunk {
    int stage, first, count;
} DualChunk;
void schedule_dual_rank(Schedule *schedule, int rank, int half, int k, const DualChunk chunk[2]);

// Arguments of all generators; each uses those that it knows.
typedef struct ScheduleWish {
    int ranks, micro_batches;
    int chunks;  // interleaved: stages per rank
    int group;   // interleaved: micro-batches per turn; 0: as many as ranks
    bool split;  // one_f_one_b
    int limit;   // zb_auto: micro-batches held; 0: as many as ranks
    Durations durations;
} ScheduleWish;

// In the order of SCHEDULE_NAMES.
typedef enum ScheduleKind {
    AFAB,
    ONE_F_ONE_B,
    INTERLEAVED,
    ZB_H1,
    ZB_H2,
    ZB_V,
    ZB_AUTO,
    DUALPIPE,
    DUALPIPE_V
} ScheduleKind;
#define SCHEDULE_NAMES "afab|one_f_one_b|interleaved|zb_h1|zb_h2|zb_v|zb_auto|dualpipe|dualpipe_v"
enum { SCHEDULE_KINDS = DUALPIPE_V + 1 };
// A wish that cannot be met ends the program with a sentence; the result is verified.
Schedule schedule_make(ScheduleKind kind, const ScheduleWish *wish);
// NULL, or why there is none for this wish.
const char *schedule_refusal(ScheduleKind kind, const ScheduleWish *wish);

// ---- the table of all, beside formulas: schedule_table.c ----

// The bubble of a step, and of a period, by closed formulas; NAN if their conditions are not met.
double schedule_bubble_formula(ScheduleKind kind, const ScheduleWish *wish);
double schedule_period_formula(ScheduleKind kind, const ScheduleWish *wish);
// A lower bound of the bubble for any order of F, B and W in which each rank has one stage and holds no more
// than the limit from F to W (zero_bubble_auto.c).
double schedule_least_bubble(const ScheduleWish *wish);
// Micro-batches of a p-th of the model that a rank holds at once, as in RankCosts; NAN if no formula is known
// (zb_auto; interleaved if the group does not divide m).
typedef struct HeldFormula {
    double to_b, to_w;
} HeldFormula;
HeldFormula schedule_rank_held_formula(ScheduleKind kind, const ScheduleWish *wish, int rank);
// Messages that all ranks send in a step.
int schedule_messages_formula(ScheduleKind kind, const ScheduleWish *wish);
// Prints it, and returns the verdict's status.
int schedule_table(Durations durations);

#ifdef __cplusplus
}
#endif
#endif
