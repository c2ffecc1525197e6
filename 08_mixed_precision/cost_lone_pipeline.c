// cost_lone_pipeline.c: a step of a pipeline, clocked by one process that stands for all ranks. Playbook:
// "Finding the Best Training Configuration", "Pipeline Parallelism".
//
// The ranks of a stage do the same, so one of each stage is enough. This process acts as each of them in turn
// (comm_act_as). A stage runs its own training step, with all techniques, but instead of its list of passes
// it begins the next stage's step; and the last one walks through the passes of all, in chapter 05's order
// (pipeline_walk), which says when a message arrives:
//
//     train_step of stage 0
//         train_step of stage 1
//             …
//                 pipeline_walk: F0 on stage 0, F0 on stage 1, F1 on stage 0, …, each on its stage's clock
//             …
//         gradients, norm, optimizer of stage 1
//     gradients, norm, optimizer of stage 0
//
// So a layout's bytes are those of a dry run on all its ranks. So is its time, except that the all-reduces
// behind the walk (of the norm, of a tied weight) do not wait for the slowest stage. Bytes sent: none. This
// file has no main: find_config.c uses it.
#include <math.h>
#include <stdlib.h>

#include "05_pipeline_parallel/pipeline.h"
#include "cost_lone.h"
#include "five_d.h"

// A step of more layers, or of many more micro-batches than stages, is extrapolated.
enum { COUNTED_LAYERS = 256 };

typedef struct Stages Stages;

// A rank of a stage, and what it leaves here while another one acts.
typedef struct Stage {
    Stages *all;
    Trainer *trainer;
    Pipeline *pipe;
    Mesh mesh;
    StandIn at;
    Memory memory;
} Stage;

struct Stages {
    Stage stage[RANKS_MOST];
    int count;
    double message_bytes;
    double walked;    // when the last pass and message of the step have ended
    StandIn outside;  // as whom this process acts in between, with this memory
    Memory outside_memory;
};

static void enter(Stage *s) {
    Stages *all = s->all;
    all->outside = comm_act_as(s->at);
    all->outside_memory = memory_account();
    memory_set_account(&s->memory);
}

static void leave(Stage *s) {
    s->memory = memory_account();
    memory_set_account(&s->all->outside_memory);
    s->at = comm_act_as(s->all->outside);
}

// ---- the walk ----

static Stage *act_as(void *context, int rank, double now) {
    Stage *s = &((Stages *)context)->stage[rank];
    s->at.now = now;
    enter(s);
    return s;
}

static void receive(void *context, int rank, int position, double now) {
    Stage *s = act_as(context, rank, now);
    pipeline_start_receives(s->pipe, s->trainer->model, position);
    leave(s);
}

static double compute(void *context, int rank, StagePass pass, double now) {
    Stage *s = act_as(context, rank, now);
    pipeline_compute(s->pipe, s->trainer->model, pass);
    leave(s);
    return s->at.now;
}

static double end(void *context, int rank, StagePass pass, double now, double *sent) {
    Stage *s = act_as(context, rank, now);
    int to = schedule_sends_to(&s->pipe->schedule, pass);
    if (to != NO_RANK) *sent = fmax(now, s->at.port_free[pipeline_goes_across(s->pipe, rank, to)]);
    pipeline_end_pass(s->pipe, s->trainer->model, pass);
    leave(s);
    return s->at.now;
}

// Afterwards all wait for each other, in the sum of the loss with which a pipeline's passes end.
static void walk(Stages *all) {
    PassClock clock = {receive, compute, end, all};
    double ends[RANKS_MOST];
    for (int i = 0; i < all->count; i++) ends[i] = all->stage[i].at.now;
    pipeline_walk(all->stage[0].pipe, &clock, all->message_bytes, ends);
    all->walked = 0;
    for (int i = 0; i < all->count; i++) all->walked = fmax(all->walked, ends[i]);
    for (int i = 0; i < all->count; i++) all->stage[i].at.now = all->walked;
}

// ---- a step ----

static void step_from(Stages *all, int rank) {
    if (rank == all->count) {
        walk(all);
        return;
    }
    Stage *s = &all->stage[rank];
    enter(s);
    memory_reset_peak();
    train_step(s->trainer, NULL);
    leave(s);
}

// Instead of the stage's own list.
static void next_begins(void *context, Model *m) {
    Stage *s = context;
    leave(s);
    step_from(s->all, m->mesh.pp.rank + 1);
    enter(s);
}

static void stage_new(Stage *s, Stages *all, const Config *c, int rank) {
    MeshShape shape = layout_shape(c);
    *s = (Stage){.all = all, .at = {.rank = rank * (int)(c->tp * c->cp * c->dp)}};
    enter(s);
    s->mesh = mesh_standing_for_all(shape, s->at.rank);
    s->trainer = trainer_new(c, s->mesh, five_d_layouts());
    s->pipe = trainer_context(s->trainer, &pipeline);
    s->pipe->instead = next_begins;
    s->pipe->instead_context = s;
    leave(s);
}

static void stage_free(Stage *s) {
    enter(s);
    trainer_free(s->trainer);
    leave(s);
    mesh_end(&s->mesh);
}

// When the last stage ends the step.
static double last_end(const Stages *all) {
    double end = 0;
    for (int i = 0; i < all->count; i++) end = fmax(end, all->stage[i].at.now);
    return end;
}

static LoneMemory held_by(const Stage *s) {
    const int64_t *peak = s->memory.peak;
    return (LoneMemory){(double)peak[MEMORY_PARAMETER], (double)peak[MEMORY_GRADIENT],
                        (double)peak[MEMORY_OPTIMIZER], (double)s->trainer->kept_bytes,
                        (double)s->memory.peak_total};
}

typedef struct Figures {
    double seconds, walked;
    LoneMemory held[RANKS_MOST];
} Figures;

static LoneMemory fullest(const Figures *step, int64_t ranks) {
    const LoneMemory *most = step->held;
    for (int64_t i = 1; i < ranks; i++)
        if (step->held[i].peak > most->peak) most = &step->held[i];
    return *most;
}

typedef union Step {
    Figures is;
    double figure[sizeof(Figures) / sizeof(double)];
} Step;

// The second step: with ZeRO a step begins with what the one before has started. That can only delay it: if
// the passes of the first step alone take too long, there is no second one. Beyond the limits: INFINITY.
static Step step_of(const Config *c, double message_bytes, LoneLimits most) {
    Stages *all = host_alloc(sizeof *all);
    all->count = (int)c->pp, all->message_bytes = message_bytes;
    for (int i = 0; i < all->count; i++) stage_new(&all->stage[i], all, c, i);
    step_from(all, 0);
    double begin = last_end(all);
    Step step = {.is = {.seconds = INFINITY}};
    if (all->walked <= most.seconds) {
        step_from(all, 0);
        step.is.seconds = last_end(all) - begin, step.is.walked = all->walked - begin;
        for (int i = 0; i < all->count; i++) step.is.held[i] = held_by(&all->stage[i]);
        bool within = step.is.seconds <= most.seconds && fullest(&step.is, all->count).peak <= most.bytes;
        if (!within) step.is.seconds = INFINITY;
    }
    for (int i = 0; i < all->count; i++) stage_free(&all->stage[i]);
    free(all);
    return step;
}

// Each figure is a straight line in the layers of a stage, and in the micro-batches once there are twice as
// many as stages. Before that the slowest stage need not be the one for which all wait, and not all W that
// zero bubble delays have come. Interleaved, it is a straight line in rows of p micro-batches, from three
// rows on.
//
// Each further micro-batch takes `more` seconds or longer: what these leave of the limit is that of few rows.
static Step extrapolated(const Config *config, double message_bytes, double more, LoneLimits most) {
    int chunks = lone_chunks(config);
    int64_t p = config->pp, stages = p * chunks, layers = config->layers, m = config->grad_acc;
    int64_t row = chunks > 1 ? p : 1, full = chunks > 1 ? 3 * p : 2 * p;
    int64_t rows = m > full + row ? (m - full) / row : 0;
    int64_t deeper = (layers - COUNTED_LAYERS) / stages, left = layers / stages - 2;
    if (deeper > left) deeper = left;
    if (deeper < 0) deeper = 0;
    Step at[2][2];  // one more layer, one more row
    for (int i = 0; i < 1 + (deeper > 0); i++)
        for (int j = 0; j < 1 + (rows > 0); j++) {
            Config c = *config;
            c.steps = 3;  // the one that counts has a step before it, and reads ahead for one behind it
            c.layers -= (deeper - i) * stages, c.grad_acc -= (rows - j) * row;
            double behind = (double)((rows - j) * row) * more;
            at[i][j] = step_of(&c, message_bytes, (LoneLimits){most.seconds - behind, most.bytes});
            if (at[i][j].is.seconds == INFINITY) return at[i][j];
        }
    const Step *few = at[0], *deep = at[deeper > 0];
    Step step;
    for (size_t k = 0; k < sizeof step.figure / sizeof *step.figure; k++) {
        const double corner[2][2] = {{few[0].figure[k], few[rows > 0].figure[k]},
                                     {deep[0].figure[k], deep[rows > 0].figure[k]}};
        step.figure[k] = lone_continued(corner, (double)deeper, (double)rows);
    }
    return step;
}

LoneStep lone_pipeline(const Config *config, double message_bytes, double more, LoneLimits most) {
    Figures step = extrapolated(config, message_bytes, more, most).is;
    return (LoneStep){step.seconds, step.walked, fullest(&step, config->pp)};
}
