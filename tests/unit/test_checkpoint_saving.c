// Checkpoint folders: a save that fails harms nothing, and files that are not checkpoints are not replaced.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "checkpoints.h"
#include "train/checkpoint_inside.h"

// ---- the calls that make a checkpoint durable: recorded, and made to fail ----

static char calls[4096];       // "fsync model.safetensors, rename, …" since recording began
static bool watching, simple;  // simple: a file system that cannot exchange names or flush folders
// So many succeed before one fails; -1: none does.
static int fsync_fails = -1, rename_fails = -1, pwrite_fails = -1;
static size_t piece = SIZE_MAX;  // bytes that a write takes at most, as Linux takes 2 GB

static void note(const char *call, const char *path) {
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    size_t used = strlen(calls);
    if (watching) snprintf(calls + used, sizeof calls - used, "%s %s, ", call, name);
}

// These replace the C library's in this program.
int fsync(int file) {
    char link[64], path[512] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0) note("fsync", path);
    struct stat status;
    bool refused = simple && fstat(file, &status) == 0 && S_ISDIR(status.st_mode);
    if (refused || (fsync_fails >= 0 && fsync_fails-- == 0)) {
        errno = refused ? EINVAL : EIO;
        return -1;
    }
    return (int)syscall(SYS_fsync, file);
}

static bool fails(int *after) {
    bool now = *after == 0;
    if (*after >= 0) --*after;
    if (now) errno = EIO;
    return now;
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
    if (fails(&pwrite_fails)) return -1;
    return syscall(SYS_pwrite64, file, bytes, size < piece ? size : piece, at);
}

int rename(const char *from, const char *to) {
    note("rename to", to);
    if (fails(&rename_fails)) return -1;
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    note("exchange with", to);
    if (simple) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
}

static bool exists(const char *name) {
    char *path = format_text("%s/%s", folder, name);
    bool is = access(path, F_OK) == 0;
    free(path);
    return is;
}

// ---- saving everything or nothing ----

static void save_again(void *run) { run_save(run, "out"); }

// Files, then their folder, then the name, then the folder that holds the name.
static void all_is_on_the_disk_before_it_has_a_name(void **state) {
    (void)state;
    Run run = run_new("");
    run_step(&run);
    run_save(&run, "out");
    run_step(&run);
    calls[0] = '\0';
    watching = true;
    run_save(&run, "out");
    watching = false;
    const char *renamed = strstr(calls, "rename to step-000002");
    static const char *const before[] = {"fsync config.json", "fsync model.safetensors",
                                         "fsync optimizer.safetensors", "fsync .step-000002.tmp"};
    assert_non_null(renamed);
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        const char *call = strstr(calls, before[i]);
        if (!call || call > renamed) fail_msg("no \"%s\" before the rename: %s", before[i], calls);
    }
    const char *folder_flush = strstr(calls, "fsync .step"), *file_flush = strstr(calls, "fsync optimizer");
    assert_true(folder_flush > file_flush);
    if (!strstr(renamed, "fsync out")) fail_msg("the new name is not flushed: %s", calls);
    run_free(&run);
}

// With the whole path of --save, not only its last folder: each new folder's name is in its parent.
static void new_folders_are_on_the_disk(void **state) {
    (void)state;
    char *dir = format_text("%s/new/way/out", folder), *above = strrchr(folder, '/') + 1;
    calls[0] = '\0';
    watching = true;
    assert_null(folder_make(dir));
    watching = false;
    char *expected = format_text("fsync %s, fsync new, fsync way, ", above);
    assert_string_equal(calls, expected);
    assert_null(folder_make(dir));  // all exist
    fsync_fails = 0;
    free(dir);
    dir = format_text("%s/other", folder);
    const char *wrong = folder_make(dir);
    fsync_fails = -1;
    if (!wrong || !strstr(wrong, "cannot flush"))
        fail_msg("%s", wrong ? wrong : "a flush that fails is no fault");
    free(expected);
    free(dir);
}

static void assert_only_step(const char *step, const Run *run) {
    char *command = format_text("[ \"$(ls -A %s/out)\" = %s ] && [ $(ls %s/out/%s | wc -l) = 3 ]", folder,
                                step, folder, step);
    if (system(command) != 0) fail_msg("the folder holds something else than %s", step);
    free(command);
    Run loaded = run_resume("out", "dtype=bf16");
    assert_same_run(run, &loaded);
    run_free(&loaded);
}

// A limit on file sizes, in place of a full disk, makes writes fail at any byte.
static void limited_save(void *context) {
    struct rlimit limit = {.rlim_cur = *(rlim_t *)context, .rlim_max = RLIM_INFINITY};
    Run run = run_resume("out", "dtype=bf16");
    run_step(&run);
    // If stderr were a file, the limit would also truncate the sentence; here it is a pipe.
    if (setrlimit(RLIMIT_FSIZE, &limit) == 0) run_save(&run, "out");
}

static void a_full_disk_leaves_older_checkpoints_intact(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run_save(&run, "out");
    size_t model, optimizer;
    free(read_text("out/step-000001/model.safetensors", &model));
    free(read_text("out/step-000001/optimizer.safetensors", &optimizer));
    assert_true(optimizer > model);
    // none, in a header, in the weights, in the optimizer's state
    rlim_t limits[] = {0, 100, model - 1, model, optimizer - 1};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        expect_refusal(limited_save, &limits[i], "File too large; the checkpoint of step 2 is not saved");
        assert_only_step("step-000001", &run);
    }
    run_free(&run);
}

// `run`, whose step 1 is saved, and `next`, which would save step 2.
static void begin_two_steps(Run *run, Run *next) {
    *run = run_new("dtype=bf16");
    run_step(run);
    run_save(run, "out");
    *next = run_resume("out", "dtype=bf16");
    run_step(next);
}

// At each flush in turn: three files and the folder.
static void a_flush_that_fails_leaves_older_checkpoints_intact(void **state) {
    (void)state;
    Run run, next;
    begin_two_steps(&run, &next);
    for (int i = 0; i < 4; i++) {
        fsync_fails = i;
        expect_refusal(save_again, &next, "Input/output error; the checkpoint of step 2 is not saved");
        fsync_fails = -1;
        assert_only_step("step-000001", &run);
    }
    fsync_fails = 4;  // the parent: too late to undo
    expect_refusal(save_again, &next, "is complete, but may not outlast a power cut");
    fsync_fails = -1;
    run_free(&run);
    run_free(&next);
}

static void assert_same_file(const char *name) {
    size_t size, other;
    char *a = format_text("out/step-000001/%s", name), *b = format_text("pieces/step-000001/%s", name);
    char *whole = read_text(a, &size), *in_pieces = read_text(b, &other);
    assert_int_equal(size, other);
    assert_memory_equal(whole, in_pieces, size);
    free(a), free(b), free(whole), free(in_pieces);
}

static void writes_that_take_a_part_at_a_time_write_all(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    run_save(&run, "out");
    piece = 100;
    run_save(&run, "pieces");
    piece = SIZE_MAX;
    assert_same_file("model.safetensors");
    assert_same_file("optimizer.safetensors");
    run_free(&run);
}

// Of the headers, and of tensors: what is written after it hides nothing.
static void one_write_that_fails_leaves_older_checkpoints_intact(void **state) {
    (void)state;
    Run run, next;
    begin_two_steps(&run, &next);
    for (int i = 0; i < 12; i++) {
        pwrite_fails = i;
        expect_refusal(save_again, &next, "Input/output error; the checkpoint of step 2 is not saved");
        assert_only_step("step-000001", &run);
    }
    pwrite_fails = -1;
    run_free(&run);
    run_free(&next);
}

// If a checkpoint with that name exists, it is replaced: in one exchange or, on simple file systems, in two
// steps. A folder that contains a foreign file is left alone.
static void a_checkpoint_of_the_same_step_is_replaced(void **state) {
    (void)state;
    for (int without = 0; without < 2; without++) {
        simple = without;
        Run old = run_new("dtype=bf16"), new = run_new("dtype=bf16");
        old.progress.sample = 600;  // other gradients
        run_step(&old);
        run_step(&new);
        run_save(&old, "out");
        calls[0] = '\0';
        watching = true;
        run_save(&new, "out");
        watching = false;
        assert_non_null(strstr(calls, "exchange with step-000001"));
        if (without) assert_non_null(strstr(calls, "rename to .step-000001.old"));
        assert_only_step("step-000001", &new);

        write_text("out/step-000001/notes.txt", "mine", 4);
        expect_refusal(save_again, &old,
                       "out/step-000001 holds notes.txt, which is no part of a checkpoint");
        assert_true(exists("out/step-000001/notes.txt"));
        char *command = format_text("rm -r %s/out", folder);
        assert_int_equal(system(command), 0);
        free(command);
        run_free(&old);
        run_free(&new);
    }
    simple = false;
}

// On a simple file system the older one is set aside, and the new one does not get its name.
static void a_replacement_that_fails_brings_the_older_one_back(void **state) {
    (void)state;
    Run old = run_new("dtype=bf16"), new = run_new("dtype=bf16");
    old.progress.sample = 600;  // other gradients
    run_step(&old);
    run_step(&new);
    run_save(&old, "out");
    simple = true;
    rename_fails = 2;  // the third: new to its name, old aside, new to its name
    expect_refusal(save_again, &new, "Input/output error; the checkpoint of step 1 is not saved");
    rename_fails = -1;
    simple = false;
    assert_only_step("step-000001", &old);
    run_free(&old);
    run_free(&new);
}

static void start_in_out(void *run) {
    char *dir = format_text("%s/out", folder);
    checkpoint_check_place_is_ours(dir, &((Run *)run)->config, ((Run *)run)->progress);
    free(dir);
}

static void a_folder_of_another_run_is_left_alone(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    start_in_out(&run);  // nothing there yet
    run_save(&run, "out");
    start_in_out(&run);  // begun again
    static const char *const others[] = {"dtype=bf16 seed=3", "dtype=bf16 steps=21",
                                         "dtype=bf16 optimizer=sgd"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        Run other = run_new(others[i]);
        run_step(&other);
        expect_refusal(start_in_out, &other,
                       "out/step-000001 is a checkpoint of another run: choose another folder");
        expect_refusal(save_again, &other, "out/step-000001 is a checkpoint of another run");
        assert_only_step("step-000001", &run);
        run_free(&other);
    }
    // An older checkpoint names no run: only a run that resumes may go on in its folder.
    replace_text("out/step-000001/model.safetensors", "\"run\"", "\"ran\"");
    expect_refusal(start_in_out, &run, "out/step-000001 is a checkpoint of another run");
    expect_refusal(save_again, &run, "out/step-000001 is a checkpoint of another run");
    replace_text("out/step-000001/model.safetensors", "\"ran\"", "\"run\"");
    // A run that continues with other rates is still the same run.
    Run resumed = run_resume("out", "dtype=bf16");
    resumed.config.lr *= 2;
    start_in_out(&resumed);
    run_step(&resumed);
    run_save(&resumed, "out");
    run_free(&run);
    run_free(&resumed);
}

// Runs that differ in their experts or in their recipe are different runs; another layout is still the same
// run.
static void experts_and_recipes_make_another_run(void **state) {
    (void)state;
    static const char *const experts[] = {
        "",
        "experts=8",
        "experts=4",
        "experts=8 top-k=3",
        "experts=8 expert-ffn=7",
        "experts=8 shared-experts=1",
        "experts=8 moe=deepseek",
        "experts=8 moe=deepseek expert-groups=2",
        "experts=8 moe=deepseek expert-groups=2 groups-kept=2",
        "experts=8 moe=deepseek expert-groups=2 groups-kept=2 routed-scale=2.5"};
    static const struct {
        const char *option;
        double value;
    } recipes[] = {{"fp8", 1},      {"fp8", 4},       {"fp8-tile", 16}, {"master", 1},
                   {"rounding", 1}, {"sum", 1},       {"gradient", 1},  {"aux-loss", 0.01},
                   {"capacity", 2}, {"documents", 0}, {"documents", 10}};
    enum { EXPERTS = sizeof experts / sizeof *experts, RECIPES = sizeof recipes / sizeof *recipes };
    uint64_t run[EXPERTS + RECIPES];
    const Progress progress = {.batch = 24};
    for (int i = 0; i < EXPERTS + RECIPES; i++) {
        Config c = config_default(i < EXPERTS ? experts[i] : "");
        if (i >= EXPERTS) config_set(&c, recipes[i - EXPERTS].option, recipes[i - EXPERTS].value);
        run[i] = checkpoint_identity(&c, progress);
        for (int j = 0; j < i; j++)
            if (run[i] == run[j]) fail_msg("cases %d and %d are one run", j, i);
        c.tp = 2;
        config_set(&c, "bucket-mb", 25);
        config_set(&c, "fp8-wire", 0);
        config_set(&c, "scale", 65536);
        if (!config_has(&c, "documents")) config_set(&c, "documents", -1);  // none: whole sequences
        assert_true(checkpoint_identity(&c, progress) == run[i]);
    }
    Config c = config_default("");
    assert_true(checkpoint_identity(&c, (Progress){.batch = 24, .data = 1}) != run[0]);
    c.norm_eps = 1e-6;
    assert_true(checkpoint_identity(&c, progress) != run[0]);
    c = config_default("");
    c.rope.factor = 8;
    assert_true(checkpoint_identity(&c, progress) != run[0]);
}

// What another run with these flags recorded, and the sentence that this run gets.
static void expect_changes(Config *c, const char *flag, const char *theirs, const char *told) {
    char *keys[] = {"data", (char *)flag}, *values[] = {"0", (char *)theirs};
    const SafeTensors file = {.key = keys, .value = values, .keys = theirs ? 2 : 1};
    char *changes = course_changes(&file, c, 0);
    assert_string_equal(changes, told);
    free(changes);
}

static void what_a_run_changes_is_told(void **state) {
    (void)state;
    Config c = config_default("dtype=bf16 lr=0.1");
    expect_changes(&c, "lr", "0.1", "");
    expect_changes(&c, "lr", "0.3", ", --lr 0.1, not 0.3");
    expect_changes(&c, "documents", "-1", "");
    expect_changes(&c, "documents", "0", ", --documents -1, not 0");  // this program has no such flag
    config_set(&c, "capacity", 1.25);
    expect_changes(&c, "capacity", "0", ", --capacity 1.25, not 0");
    expect_changes(&c, "capacity", NULL, "");  // an older file
    config_set(&c, "master", 1);
    expect_changes(&c, "master", "0", ", another --master");
    config_set(&c, "scale", 65536);
    expect_changes(&c, "scale", "0", "");
    config_set(&c, "scale-interval", 2000);
    expect_changes(&c, "scale-interval", "100", "");
    c.dtype = F16;
    expect_changes(&c, "scale", "1024", ", --scale 65536, not 1024");
    expect_changes(&c, "scale-interval", "100", ", --scale-interval 2000, not 100");
    expect_changes(&c, "steps", "10", ", --steps 300, not 10");
    c.optimizer = OPTIMIZER_SGD;  // whose rate is constant
    expect_changes(&c, "steps", "10", "");
    expect_changes(&c, "warmup", "10", "");
    expect_changes(&c, "lr", "0.3", ", --lr 0.1, not 0.3");
}

// What a killed run left behind does no harm.
static void leftovers_of_a_killed_run_are_replaced(void **state) {
    (void)state;
    Run run = run_new("dtype=bf16");
    run_step(&run);
    simple = true;
    static const char *const leftovers[] = {"tmp", "old"};
    for (int i = 0; i < 2; i++) {
        char *command = format_text(
            "cd %s && mkdir -p out/.step-000001.%s && echo half >out/.step-000001.%s/"
            "model.safetensors",
            folder, leftovers[i], leftovers[i]);
        assert_int_equal(system(command), 0);
        free(command);
        run_save(&run, "out");
        assert_only_step("step-000001", &run);
    }
    simple = false;
    run_free(&run);
}

// Found out before the first step, and not after the last one.
static void what_a_checkpoint_cannot_replace_is_told(void **state) {
    (void)state;
    Run run = run_new("");
    run_save(&run, "out");
    write_text("out/step-notes", "", 0);  // which is nobody's business
    start_in_out(&run);
    write_text("out/step-000001", "a file", 6);
    expect_refusal(start_in_out, &run, "out/step-000001: Not a directory");
    char *path = format_text("%s/out/step-000001", folder);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("gone", path), 0);
    expect_refusal(start_in_out, &run, "out/step-000001: No such file");
    free(path);
    run_free(&run);
}

static void a_place_that_cannot_be_written_is_told(void **state) {
    (void)state;
    write_text("out", "a file", 6);
    Run run = run_new("");
    expect_refusal(save_again, &run, "the checkpoint of step 0 is not saved");
    run_free(&run);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    omp_set_num_threads(1);  // the children of expect_fatal do not inherit a team of threads
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(all_is_on_the_disk_before_it_has_a_name),
        IN_A_FOLDER(new_folders_are_on_the_disk),
        IN_A_FOLDER(a_full_disk_leaves_older_checkpoints_intact),
        IN_A_FOLDER(a_flush_that_fails_leaves_older_checkpoints_intact),
        IN_A_FOLDER(writes_that_take_a_part_at_a_time_write_all),
        IN_A_FOLDER(one_write_that_fails_leaves_older_checkpoints_intact),
        IN_A_FOLDER(a_checkpoint_of_the_same_step_is_replaced),
        IN_A_FOLDER(a_replacement_that_fails_brings_the_older_one_back),
        IN_A_FOLDER(a_folder_of_another_run_is_left_alone),
        cmocka_unit_test(experts_and_recipes_make_another_run),
        cmocka_unit_test(what_a_run_changes_is_told),
        IN_A_FOLDER(leftovers_of_a_killed_run_are_replaced),
        IN_A_FOLDER(what_a_checkpoint_cannot_replace_is_told),
        IN_A_FOLDER(a_place_that_cannot_be_written_is_told),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
