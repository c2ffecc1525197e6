// harness.c: what every training program shares. Playbook: every chapter's "is it still the same training?"
//
// A program is a list of techniques and what it wants to show (Program). This file parses the flags and
// starts the ranks; proof.c compares the run with one device, lesson.c prints what a reader wants to see
// first, and real_training.c trains.
//
// --no-check trains for real instead of proving. --save writes checkpoints of the first run, --init and
// --resume start every run from one; a checkpoint does not depend on a layout, so any program can continue
// from any other's.
// --dry-run counts and clocks one step, and computes nothing. This file has no main.
#include "harness.h"

#include <stdlib.h>
#include <string.h>

#include "report/diagnosis.h"

// ---- the program ----

enum { MOST_OPTIONS = 64 };

static unsigned axes_of(const Program *program) {
    unsigned axes = 0;
    for (int i = 0; program->techniques[i]; i++) axes |= program->techniques[i]->axes;
    return axes;
}

// What its author has left out.
static void check_program(const Program *p) {
    CHECK(p->techniques && p->purpose && (p->claim || p->trains) && p->natural >= 1,
          "a Program has a purpose, a claim, a list of techniques and at least 1 natural rank");
    for (int i = 0; p->techniques[i]; i++)
        CHECK(p->techniques[i]->name, "technique %d of this program has no name", i);
    CHECK(p->natural == 1 || axes_of(p),
          "this program's natural number of ranks is %d, and none of its techniques has an axis over which "
          "they share work (Technique.axes)",
          p->natural);
}

static Option heading(const char *text) {
    return (Option){text, OPTION_HEADING, NULL, NULL, 0, 0, "", "", false};
}

enum { MOST_LISTED = 2 * MOST_TECHNIQUES };

// The list with what any program may have: flash attention, before recomputation, unless a technique of its
// own decides how tokens attend; and, if `kernels`, the choice of kernels. NULL stays NULL.
static Techniques extended(Techniques list, bool kernels, const Technique *room[MOST_LISTED]) {
    int count = 0, end = 0;
    bool attends = false;
    if (!list) return NULL;
    for (; list[end]; end++) attends = attends || technique_attends(list[end]);
    CHECK(end + 3 < MOST_LISTED, "a program lists more than %d techniques", MOST_LISTED - 4);
    if (kernels) room[count++] = &kernel_choice;
    for (int i = 0; i <= end; i++) {
        if (!attends && (i == end || !strcmp(list[i]->name, recompute.name))) {
            room[count++] = &flash_attention;
            attends = true;
        }
        if (i < end) room[count++] = list[i];
    }
    room[count] = NULL;
    return room;
}

// The flags that only this program takes: its own, its techniques', and those of real training.
static int own_options(Option *own, const Program *program, bool *dry_run) {
    int count = 0;
    own[count++] = heading("this program");
    for (int i = 0; i < program->options; i++) own[count++] = program->option[i];
    for (int i = 0; i < program->more_options; i++) own[count++] = program->more_option[i];
    for (int i = 0; program->techniques[i]; i++)
        for (int j = 0; j < program->techniques[i]->options; j++) {
            const Option *option = &program->techniques[i]->option[j];
            int known = 0;
            while (known < count && strcmp(own[known].name, option->name) != 0) known++;
            CHECK(known < MOST_OPTIONS - 8, "a program has more than %d options", MOST_OPTIONS - 8);
            if (known == count) own[count++] = *option;
        }
    for (int i = 1; i < count; i++)
        CHECK(!own[i].target,
              "option table: --%s of a technique or a Program has a target, and is to have none: its value "
              "is a setting (config_number)",
              own[i].name);
    own[count++] = (Option){
        "dry-run", OPTION_FLAG,
        dry_run,   NULL,
        0,         0,
        "",        "count and clock every operation and message, but compute none: for models of any size",
        false};
    const Option real[] = {
        heading(program->trains ? "held-out loss and sample" : "training for real (--no-check)"),
        {"eval-every", OPTION_INT, NULL, "100", 0, 1e9, "steps",
         "steps between held-out losses; 0: only before and after", false},
        {"sample", OPTION_INT, NULL, "240", 0, 1e6, "tokens", "length of the text written at the end",
         false},
        {"temperature", OPTION_REAL, NULL, "0.8", 0, 100, "",
         "temperature of the sample; 0: always the likeliest token", false},
    };
    for (size_t i = 0; i < sizeof real / sizeof *real; i++) own[count++] = real[i];
    return count;
}

// A technique over this axis with flags of its own, which would turn it on, or NULL.
static const Technique *offered(Techniques techniques, unsigned axis) {
    for (int i = 0; techniques[i]; i++)
        if ((techniques[i]->axes & axis) && techniques[i]->options) return techniques[i];
    return NULL;
}

static void check_techniques(const Config *config, Techniques techniques, int ranks) {
    const struct {
        const char *flag;
        unsigned axis;
        int64_t degree;
    } axis[] = {{"dp", 1u << AXIS_DP, config->dp},
                {"pp", 1u << AXIS_PP, config->pp},
                {"cp", 1u << AXIS_CP, config->cp},
                {"tp", 1u << AXIS_TP, config->tp},
                {"ep", 1u << AXIS_EP, config->ep}};
    unsigned served = 0;
    for (int i = 0; techniques[i]; i++) {
        const Technique *technique = techniques[i];
        if (!technique_is_on(technique, config)) continue;
        served |= technique->axes;
        if (technique->check) technique->check(config);
    }
    CHECK(served || ranks == 1, "this program is for one device: start one of it, and not %d", ranks);
    for (size_t i = 0; i < sizeof axis / sizeof *axis; i++) {
        const Technique *off = offered(techniques, axis[i].axis);
        CHECK(axis[i].degree == 1 || (served & axis[i].axis),
              "--%s %ld: no technique that is on shares work over it; --%s 1 would fit%s%s", axis[i].flag,
              axis[i].degree, axis[i].flag, off ? ", or --" : "", off ? off->option->name : "");
    }
}

void layout_check(Config *config, int ranks, Techniques techniques) {
    config_check(config);
    config_check_degrees(config, ranks);
    check_techniques(config, techniques, ranks);
    CHECK(config_document_end(config) < config->vocab,
          "--documents %ld is no token of --vocab %ld: the last one is %ld", config_document_end(config),
          config->vocab, config->vocab - 1);
}

// ---- flags that would have no effect ----

// Whether the technique shares work here: one over only --tp or --cp does not where that degree is 1. On a
// single rank every technique counts, so the flags of many ranks are accepted.
static bool shares(const Technique *technique, const Config *c) {
    unsigned alone = (c->tp == 1 ? 1u << AXIS_TP : 0) | (c->cp == 1 ? 1u << AXIS_CP : 0);
    bool single = c->dp * c->pp * c->cp * c->tp == 1;
    return single || !technique->axes || (technique->axes & ~alone);
}

// Whether a technique with this option is on; `works`: whether one also has something to do.
static bool option_on(const Config *c, Techniques list, const char *option, bool *works) {
    const Technique *on[MOST_TECHNIQUES];
    bool found = *works = false;
    for (int i = 0, count = techniques_on(c, list, on); i < count; i++) {
        if (!technique_has_option(on[i], option)) continue;
        found = true;
        *works = *works || shares(on[i], c) || technique_has_option(&flash_attention, option);
    }
    return found;
}

// Whether the option switches its technique on or off; then it has an effect even in the off position:
// --attention stored.
static bool is_switch(const Config *c, Techniques list, const Setting *setting) {
    bool on = false, works;
    for (int step = -1; step <= 1; step += 2) {
        Config other = *c;
        config_set(&other, setting->name, setting->number + step);
        on = on || option_on(&other, list, setting->name, &works);
    }
    return on;
}

// Refuses flags of a technique that is off.
static void check_typed(const Config *c, Techniques list) {
    for (int i = 0; i < c->settings; i++) {
        const Setting *setting = &c->setting[i];
        const Technique *owner = NULL;
        for (int j = 0; list[j] && !owner; j++)
            if (technique_has_option(list[j], setting->name)) owner = list[j];
        if (!setting->given || !owner) continue;
        bool works, on = option_on(c, list, setting->name, &works);
        const char *asked = !owner->asked               ? NULL
                            : strchr(owner->asked, ' ') ? owner->asked
                                                        : config_more(c, owner->asked);
        CHECK(on ? works : is_switch(c, list, setting),
              "--%s is an option of %s, which has nothing to do here: leave it out%s%s", setting->name,
              owner->name, asked ? ", or give " : "", asked ? asked : "");
    }
}

// Refuses flags of real training in a proof, and flags of the proof elsewhere.
static void check_typed_for(const Config *c, const Program *program, bool dry_run) {
    static const char *const real[] = {"eval-every", "sample", "temperature"};
    bool proves = !program->trains && !c->no_check;
    for (size_t i = 0; i < sizeof real / sizeof *real; i++)
        CHECK(!proves || !config_given(c, real[i]),
              "--%s has an effect only with --no-check: add that, or leave out --%s", real[i], real[i]);
    CHECK(!config_given(c, "temperature") || config_number(c, "sample") > 0,
          "--temperature is for the sample, and --sample 0 writes none: leave one of them out");
    CHECK(
        !proves || dry_run || c->seq > 1 || c->dtype == F64,
        "--seq 1 in %s: a token that attends to itself alone gives queries and keys no gradient, and what "
        "rounding makes of that zero is nothing to compare: --seq 2 or --dtype f64 would fit",
        dtype_name((DType)c->dtype));
    CHECK(proves || dry_run || !c->verbose,
          "--verbose shows each row of the proof, and --no-check skips the proof: leave one of them out");
    for (int i = 0; i < program->more_options; i++)
        CHECK((proves && !dry_run) || !config_given(c, program->more_option[i].name),
              "--%s says what is shown after the proof, and --%s leaves that out: leave one of them out",
              program->more_option[i].name, c->no_check ? "no-check" : "dry-run");
}

MeshShape layout_shape(const Config *config) {
    return (MeshShape){.dp = (int)config->dp,
                       .pp = (int)config->pp,
                       .cp = (int)config->cp,
                       .tp = (int)config->tp,
                       .ep = (int)config->ep};
}

static void print_cost(const Config *config, const StepCost *cost) {
    // The wait may be longer than the communication: in a pipeline, for messages that are not yet sent.
    say("\na step takes %.3f ms on %s; communication takes %.3f ms, and the wait for it and for other ranks "
        "%.3f ms; rank 0 sends %s\n",
        1e3 * cost->step_seconds, config->machine, 1e3 * cost->comm.model_seconds,
        1e3 * cost->comm.exposed_seconds, bytes_text((double)cost->comm.bytes));
    say("memory of rank 0 at its peak: %s\n", bytes_text((double)cost->memory.peak_total));
    report_number("dry run", "step, model clock", cost->step_seconds, "s");
    report_number("dry run", "exposed communication, model clock", cost->comm.exposed_seconds, "s");
    report_number("dry run", "bytes sent by rank 0", (double)cost->comm.bytes, "B");
    report_number("dry run", "peak memory of rank 0", (double)cost->memory.peak_total, "B");
}

// Names the sizes that may explain the ratio by which a figure is wrong (diagnosis.h).
static void name_sizes(const Config *config) {
    const struct {
        const char *axis;
        int64_t degree;
    } axis[] = {
        {"dp", config->dp}, {"pp", config->pp}, {"cp", config->cp}, {"tp", config->tp}, {"ep", config->ep}};
    for (size_t i = 0; i < sizeof axis / sizeof *axis; i++) diagnosis_ranks(axis[i].axis, axis[i].degree);
    diagnosis_micro_batches(config->grad_acc);
}

// Trains, proves or counts, as the flags ask. Returns the exit status. Figures and traces are written
// before the verdict, which is the last line, so they are there when one looks for the cause of a FAIL.
static int run(Config *config, Mesh mesh, const Program *program, bool dry_run) {
    if (program->plan) program->plan(mesh, config);
    if (program->trains || (config->no_check && !dry_run))
        return train_for_real(config, mesh, program->techniques, program->baseline);
    if (dry_run) {
        StepCost cost = program_show_dry(config, mesh, program);
        print_cost(config, &cost);
        timeline_finish(config, mesh.world);
        return report_verdict("one step counted and clocked");
    }
    const MeshAxis axis = comm_ranks() > 1 ? program->axis : AXIS_WORLD;
    const Group *split = mesh_group(&mesh, axis);
    if (program->natural > 1) report_split(split->size, axis ? split->name : NULL);
    program_show(config, mesh, program);
    config->save = config->init = config->resume = NULL;  // `more` trains from scratch
    clock_push("after the proof");  // --timeline shows the run that was proven
    if (program->more) program->more(mesh, config);
    clock_pop();
    timeline_finish(config, mesh.world);
    return report_verdict("%s", program->claim);
}

int program_main(int argc, char **argv, const Program *own_program) {
    base_start(argc, argv);
    check_program(own_program);
    const Technique *lists[4][MOST_LISTED];
    Program whole = *own_program;
    const Program *program = &whole;
    whole.techniques = extended(whole.techniques, true, lists[0]);
    whole.twin_techniques = extended(whole.twin_techniques, true, lists[1]);
    whole.baseline = extended(whole.baseline, false, lists[2]);
    whole.before.techniques = extended(whole.before.techniques, false, lists[3]);
    bool dry_run;
    Option own[MOST_OPTIONS];
    int options = own_options(own, program, &dry_run);
    unsigned groups = CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_RECOMPUTE | CONFIG_FILES |
                      CONFIG_REPORT | CONFIG_CLOCK | CONFIG_TRACE;
    unsigned axes = axes_of(program);
    for (int i = 0; program->techniques[i]; i++) groups |= program->techniques[i]->brings;
    if (!program->trains)
        groups |= CONFIG_CHECK | CONFIG_TIMELINE | (axes ? CONFIG_RANKS | CONFIG_CLUSTER : 0);
    groups |= (axes & 1u << AXIS_DP ? CONFIG_DP : 0) | (axes & 1u << AXIS_PP ? CONFIG_PP : 0) |
              (axes & 1u << AXIS_CP ? CONFIG_CP : 0) | (axes & 1u << AXIS_TP ? CONFIG_TP : 0) |
              (axes & 1u << AXIS_EP ? CONFIG_EP : 0);
    Config config = config_parse(argc, argv, program->purpose, groups, program->defaults, own, options);
    check_typed_for(&config, program, dry_run);
    CHECK(!((config.init || config.resume) && config.shape_given),
          "--init and --resume take the model's shape from the folder's config.json: leave out --model, "
          "--layers, --hidden, --heads, --kv-heads, --head-size, --ffn, --vocab, --tied, --experts and "
          "the flags of experts");
    CHECK(!(dry_run && (config.save || config.resume || config.init)),
          "--dry-run computes no weights to save or begin with: leave out --save, --resume and --init");
    comm_start(argc, argv, program->natural);
    if (config.save) checkpoint_check_place(config.save);
    // The same checkpoint throughout, even when --save writes newer ones beside it.
    const char *folder = config.resume ? config.resume : config.init;
    char *from = folder ? checkpoint_newest(folder) : NULL;
    if (from) checkpoint_config(from, &config), config.model = from;
    if (config.resume) config.resume = from;
    else config.init = from;
    CHECK(!config.experts || (groups & CONFIG_EXPERTS),
          "%s has experts, and this program has only dense layers: take a program of "
          "06_expert_parallel",
          from);
    CHECK(config.experts || !program->experts,
          "%s shows what it does with experts, and %s has none: train_5d takes dense models",
          base_program(), from ? from : "--experts 0");
    layout_check(&config, comm_ranks(), program->techniques);
    check_typed(&config, program->techniques);
    const Technique *subject = program->trains || config.no_check || dry_run ? NULL : program->subject;
    CHECK(!subject || technique_is_on(subject, &config),
          "%s proves what it does with %s, which is off: give %s, or --no-check to train without it",
          base_program(), subject->name, subject->asked);
    if (config.resume) resume_check(&config, (int)config.dp);
    MeshShape shape = layout_shape(&config);
    Mesh mesh = comm_ranks() > 1 || !program->trains ? mesh_new(shape) : mesh_single();
    report_json(config.json);
    timeline_start(&config, mesh.world);
    if (!program->trains) mesh_print(&mesh, shape);
    device_dry_run(dry_run);
    config_print(&config);
    if (from)
        say("begins with the weights%s of %s%s", config.resume ? " and the optimizer" : "", from,
            config.resume ? "" : ", at step 0");
    if (config.save && !config.experts && config.hidden % config.heads)
        say("WARNING: --hidden %ld is not divisible by --heads %ld: transformers 4 loads what is saved, 5 "
            "refuses such a Llama",
            config.hidden, config.heads);
    name_sizes(&config);
    underflow_warn(&config);
    if (kernel_choice.enabled(&config)) whole.exact = NULL;  // other kernels sum in another order
    int status = run(&config, mesh, program, dry_run);
    free(from);
    return comm_finish(status);
}
