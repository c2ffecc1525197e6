// checkpoint_run.c: checkpoint folders on the disk: to which run each belongs, and which is the newest.
// A run has an identity, a 64-bit hash of everything that determines its course. Every file of weights or
// state contains it and the step, so that files of different runs or steps are never combined, and no run
// writes among the checkpoints of another.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "comm/comm.h"

// ---- folders on the disk ----

const char *folder_flush(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // Some file systems (shared folders of virtual machines) can flush only files, and say so.
    bool flushed = folder >= 0 && (fsync(folder) == 0 || errno == EINVAL);
    const char *wrong = flushed ? NULL : file_fault("flush", path);
    if (folder >= 0) close(folder);
    return wrong;
}

// The folder that holds this one.
static const char *flush_above(const char *path) {
    char *above = format_text("%s/..", path);
    const char *wrong = folder_flush(above);
    free(above);
    return wrong;
}

const char *folder_make(const char *path) {
    char *part = format_text("%s/", path);
    const char *wrong = NULL;
    for (char *slash = strchr(part + 1, '/'); slash && !wrong; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        bool made = mkdir(part, 0777) == 0;
        if (!made && errno != EEXIST) wrong = file_fault("create", part);
        if (made) wrong = flush_above(part);
        *slash = '/';
    }
    free(part);
    return wrong;
}

static const char *const files_of_a_checkpoint[] = {"config.json", "generation_config.json",
                                                    "model.safetensors", "optimizer.safetensors"};
enum { FILES_OF_A_CHECKPOINT = sizeof files_of_a_checkpoint / sizeof *files_of_a_checkpoint };

void folder_remove_checkpoint(const char *folder) {
    for (int i = 0; i < FILES_OF_A_CHECKPOINT; i++) {
        char *path = format_text("%s/%s", folder, files_of_a_checkpoint[i]);
        unlink(path);
        free(path);
    }
    rmdir(folder);
}

const char *folder_put_in_place(const char *temporary, const char *final, const char *aside) {
    if (rename(temporary, final) == 0) return NULL;
    if (errno != ENOTEMPTY && errno != EEXIST) return file_fault("create", final);
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, final, RENAME_EXCHANGE) == 0) {
        folder_remove_checkpoint(temporary);
        return NULL;
    }
    folder_remove_checkpoint(aside);  // of a run that was killed in between
    if (rename(final, aside) != 0) return file_fault("replace", final);
    if (rename(temporary, final) != 0) {
        const char *wrong = file_fault("replace", final);
        rename(aside, final);
        return wrong;
    }
    folder_remove_checkpoint(aside);
    return NULL;
}

// Locks the folder until this process ends; false if another run is saving there. Two at once would write
// into each other's files. On a file system that cannot lock folders there is no such protection.
static bool lock_place(const char *dir) {
    enum { LOOKS = 30 };  // each of 0.1 s: a run that was just killed is about to leave
    static int place = -1;
    if (place >= 0) close(place);
    place = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int look = 0; look < LOOKS; look++) {
        if (flock(place, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
        usleep(100000);
    }
    return false;
}

void checkpoint_check_place(const char *dir) {
    Group world = comm_world();
    char *trial = format_text("%s/.trial", dir);
    if (world.rank == 0) {
        const char *wrong = folder_make(dir);
        CHECK(!wrong, "--save %s: %s", dir, wrong);
        CHECK(lock_place(dir),
              "--save %s: another run is saving there: wait for its end, or choose another folder", dir);
        bool made = mkdir(trial, 0777) == 0 || errno == EEXIST;
        CHECK(made, "--save %s: %s", dir, file_fault("create", trial));
    }
    comm_wait(comm_barrier(world));
    bool seen = access(trial, F_OK) == 0;
    int first = -(int)comm_max(seen ? -world.size : -world.rank, world);
    if (world.rank == 0) rmdir(trial);
    CHECK(first == world.size,
          "--save %s: rank %d does not see what rank 0 makes there: a folder that all hosts share would "
          "fit",
          dir, first);
    free(trial);
}

// ---- the run they belong to ----

// Settings of techniques that change what a run computes, other than the order of sums; layouts do not. If
// a program has no such option, the setting has its default.
typedef struct RunSetting {
    const char *name;
    double standard;
    bool choice;  // shown without its number, which would mean nothing to a reader
} RunSetting;
static const RunSetting settings_of_a_run[] = {{"documents", -1, false},   {"capacity", 0, false},
                                               {"fp8", 0, true},           {"fp8-tile", 0, false},
                                               {"fp8-wire", 0, true},      {"master", 0, true},
                                               {"sum", 0, true},           {"moments", 0, true},
                                               {"rounding", 0, true},      {"gradient", 0, true},
                                               {"aux-loss", 0, false},     {"z-loss", 0, false},
                                               {"balance-bias", 0, false}, {"loss-scale", 0, true},
                                               {"scale", 0, false},        {"scale-interval", 0, false}};
// The last SETTINGS_OF_F16 of them matter only to f16.
enum { SETTINGS_OF_A_RUN = sizeof settings_of_a_run / sizeof *settings_of_a_run, SETTINGS_OF_F16 = 3 };

static double setting_of_a_run(const Config *c, const RunSetting *setting) {
    return config_has(c, setting->name) ? config_number(c, setting->name) : setting->standard;
}

// Experts and these settings; "" for a dense model by the standard recipe. The caller frees it.
static char *specials_text(const Config *c) {
    char *text = c->experts
                     ? format_text(" e %lld %lld %lld %lld moe %d %lld %lld %.17g", (long long)c->experts,
                                   (long long)c->top_k, (long long)config_expert_width(c),
                                   (long long)c->shared_experts, c->moe, (long long)c->expert_groups,
                                   (long long)c->groups_kept, c->routed_scale)
                     : format_text("%s", "");
    for (int i = 0; i < SETTINGS_OF_A_RUN - (c->dtype == F16 ? 0 : SETTINGS_OF_F16); i++) {
        const RunSetting *setting = &settings_of_a_run[i];
        double value = setting_of_a_run(c, setting);
        if (value == setting->standard) continue;
        char *longer = format_text("%s %s %.17g", text, setting->name, value);
        free(text);
        text = longer;
    }
    return text;
}

// Equal for every layout, and for a run begun again with the same flags and data.
uint64_t checkpoint_identity(const Config *c, Progress p) {
    const Rope *r = &c->rope;
    // "" for what every run had before there were others
    char *heads = c->head_size ? format_text(" d %lld", (long long)c->head_size) : format_text("%s", "");
    char *stretch = r->factor != 0 ? format_text(" rope %.17g %.17g %.17g %.17g", r->factor, r->low,
                                                 r->high, r->original)
                                   : format_text("%s", "");
    char *specials = specials_text(c);
    char *text = format_text(
        "%lld %lld %lld %lld %lld %lld %lld %d %d %d %lld %lld %lld %.17g %.17g %.17g %.17g %lld %016llx "
        "%s%s%s%s",
        (long long)c->layers, (long long)c->hidden, (long long)c->heads, (long long)c->kv_heads,
        (long long)c->ffn, (long long)c->vocab, (long long)c->seq, c->tied, c->dtype, c->optimizer,
        (long long)c->seed, (long long)c->steps, (long long)c->warmup, c->lr, c->weight_decay, c->clip,
        r->theta, (long long)p.batch, (unsigned long long)p.data, c->init ? c->init : "", heads, stretch,
        specials);
    free(heads);
    free(stretch);
    free(specials);
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const char *letter = text; *letter; letter++) hash = (hash ^ (uint8_t)*letter) * 0x100000001b3;
    free(text);
    return hash ? hash : 1;
}

// ---- what a run may change when it goes on, and what it would then not repeat ----

enum { RATES = 5, RATES_OF_ADAMW = 2 };  // these last ones do not matter to SGD, whose rate is constant
static const char *const rate_names[RATES] = {"lr", "weight-decay", "clip", "warmup", "steps"};
_Static_assert(COURSE == RATES + SETTINGS_OF_A_RUN, "checkpoint.h counts what makes a run's course");

const char *course_name(int which) {
    return which < RATES ? rate_names[which] : settings_of_a_run[which - RATES].name;
}

char *course_text(const Config *c, int which) {
    const double rates[RATES] = {c->lr, c->weight_decay, c->clip, (double)c->warmup, (double)c->steps};
    return number_text(which < RATES ? rates[which]
                                     : setting_of_a_run(c, &settings_of_a_run[which - RATES]));
}

// Whether this flag has no effect on the run.
static bool course_is_idle(const Config *c, int which) {
    if (which < RATES) return c->optimizer == OPTIMIZER_SGD && which >= RATES - RATES_OF_ADAMW;
    return c->dtype != F16 && which >= COURSE - SETTINGS_OF_F16;
}

char *course_changes(const SafeTensors *file, const Config *config, uint64_t our_data) {
    uint64_t data = strtoull(safetensors_metadata(file, "data"), NULL, 16);
    bool other_data = data && our_data && data != our_data;
    char *changes = format_text("%s", other_data ? ", other data" : "");
    for (int i = 0; i < COURSE; i++) {
        const char *before = safetensors_metadata(file, course_name(i));  // NULL: an older file
        char *now = course_text(config, i);
        if (before && strcmp(before, now) && !course_is_idle(config, i)) {
            char *longer =
                i >= RATES && settings_of_a_run[i - RATES].choice
                    ? format_text("%s, another --%s", changes, course_name(i))
                    : format_text("%s, --%s %s, not %s", changes, course_name(i), now, printable(before));
            free(changes);
            changes = longer;
        }
        free(now);
    }
    return changes;
}

// ---- the run that a folder belongs to ----

// The run named by the weights in a folder; 0: they name none, or there are none.
static uint64_t run_of(const char *folder) {
    char *path = format_text("%s/model.safetensors", folder);
    struct stat status;
    uint64_t run = 0;
    if (stat(path, &status) == 0) {
        SafeTensors file = safetensors_open(path);
        const char *text = safetensors_metadata(&file, "run");
        run = text ? strtoull(text, NULL, 16) : 0;
        safetensors_close(&file);
    }
    free(path);
    return run;
}

void checkpoint_check_owner(const char *folder, uint64_t run, bool older_fits) {
    DIR *entries = opendir(folder);
    if (!entries) return;
    int files = 0;
    for (struct dirent *entry; (entry = readdir(entries)); files++) {
        bool known = !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
        for (int i = 0; i < FILES_OF_A_CHECKPOINT; i++)
            known |= !strcmp(entry->d_name, files_of_a_checkpoint[i]);
        CHECK(known,
              "--save: %s holds %s, which is no part of a checkpoint, and would be replaced: choose "
              "another folder",
              folder, printable(entry->d_name));
    }
    closedir(entries);
    uint64_t theirs = files > 2 ? run_of(folder) : run;
    CHECK(theirs == run || (theirs == 0 && older_fits),
          "--save: %s is a checkpoint of another run: choose another folder, or go on with that run by "
          "--resume",
          folder);
}

void checkpoint_check_place_is_ours(const char *dir, const Config *config, Progress progress) {
    if (base_rank() > 0) return;
    uint64_t run = progress.run ? progress.run : checkpoint_identity(config, progress);
    DIR *entries = opendir(dir);
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        if (strncmp(entry->d_name, "step-", 5) != 0) continue;
        char *folder = format_text("%s/%s", dir, entry->d_name);
        checkpoint_check_owner(folder, run, config->resume != NULL);
        free(folder);
    }
    if (entries) closedir(entries);
}

// ---- finding one ----

static bool is_checkpoint(const char *dir) {
    char *path = format_text("%s/config.json", dir);
    bool exists = access(path, F_OK) == 0;
    free(path);
    return exists;
}

// The number of "step-NUMBER", or -1.
static int64_t step_of(const char *name) {
    if (strncmp(name, "step-", 5) != 0 || !name[5]) return -1;
    if (strspn(name + 5, "0123456789") != strlen(name + 5)) return -1;
    errno = 0;
    int64_t step = strtoll(name + 5, NULL, 10);
    return errno ? -1 : step;
}

char *checkpoint_newest(const char *dir) {
    DIR *folder = opendir(dir);
    CHECK(folder, "%s", file_fault("open", dir));
    char *newest = NULL;
    int64_t newest_step = -1;
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (step_of(entry->d_name) <= newest_step) continue;
        char *path = format_text("%s/%s", dir, entry->d_name);
        if (is_checkpoint(path)) {
            newest_step = step_of(entry->d_name);
            free(newest);
            newest = path;
        } else {
            free(path);
        }
    }
    closedir(folder);
    if (!newest && is_checkpoint(dir)) newest = format_text("%s", dir);
    CHECK(newest, "%s holds no checkpoint: neither config.json nor a folder step-* with one", dir);
    return newest;
}

// A run may be saving there, and a host may see an older state of a folder that it shares.
char *checkpoint_newest_of_all(const char *dir) {
    char *newest = checkpoint_newest(dir);
    const char *name = strrchr(newest, '/');
    double step = (double)step_of(name ? name + 1 : newest);
    double most = comm_max(step, comm_world()), least = -comm_max(-step, comm_world());
    CHECK(most == least,
          "%s: step %.0f is the newest that one rank sees, and step %.0f that another sees: name one of "
          "its folders, which no run is about to replace",
          dir, most, least);
    return newest;
}
