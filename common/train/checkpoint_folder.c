// checkpoint_folder.c: checkpoint folders on the disk: made and replaced so that they outlast a crash,
// refused where they belong to another run, and the newest of them found.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint_inside.h"
#include "comm/comm.h"
#include "files.h"

// ---- making them ----

bool folder_has(const char *folder, const char *name) {
    char *path = format_text("%s/%s", folder, name);
    struct stat status;
    bool has = access(path, F_OK) == 0;
    // What cannot be looked at may be there: an older checkpoint must not quietly take its place.
    CHECK(has || errno == ENOENT || errno == ENOTDIR, "%s", file_fault("look for", path));
    CHECK(has || lstat(path, &status) != 0, "%s is a link to nothing", path);
    free(path);
    return has;
}

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

static const char *const files_of_a_checkpoint[] = {"config.json", "generation_config.json", MODEL_FILE,
                                                    OPTIMIZER_FILE};
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

// ---- the run that a folder belongs to ----

// The number of "step-NUMBER", or -1.
static int64_t step_of(const char *name) {
    if (strncmp(name, "step-", 5) != 0 || !name[5]) return -1;
    if (strspn(name + 5, "0123456789") != strlen(name + 5)) return -1;
    errno = 0;
    int64_t step = strtoll(name + 5, NULL, 10);
    return errno ? -1 : step;
}

// The run named by the weights in a folder; 0: they name none, or there are none.
static uint64_t run_of(const char *folder) {
    if (!folder_has(folder, MODEL_FILE)) return 0;
    char *path = format_text("%s/%s", folder, MODEL_FILE);
    SafeTensors file = safetensors_open(path);
    const char *text = safetensors_metadata(&file, "run");
    uint64_t run = text ? strtoull(text, NULL, 16) : 0;
    safetensors_close(&file);
    free(path);
    return run;
}

void checkpoint_check_owner(const char *folder, uint64_t run, bool older_fits) {
    struct stat status;
    DIR *entries = opendir(folder);
    CHECK(entries || lstat(folder, &status) != 0, "--save: %s", file_fault("open", folder));
    if (!entries) return;
    CHECK(lstat(folder, &status) != 0 || !S_ISLNK(status.st_mode),
          "--save: %s is a link, which no checkpoint can replace: choose another folder", folder);
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
        if (step_of(entry->d_name) < 0) continue;
        char *folder = format_text("%s/%s", dir, entry->d_name);
        checkpoint_check_owner(folder, run, config->resume != NULL);
        free(folder);
    }
    if (entries) closedir(entries);
}

// ---- finding one ----

static char *newest_here(const char *dir) {
    DIR *folder = opendir(dir);
    CHECK(folder, "%s", file_fault("open", dir));
    char *newest = NULL;
    int64_t newest_step = -1;
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (step_of(entry->d_name) <= newest_step) continue;
        char *path = format_text("%s/%s", dir, entry->d_name);
        if (folder_has(dir, entry->d_name) && folder_has(path, "config.json")) {
            newest_step = step_of(entry->d_name);
            free(newest);
            newest = path;
        } else {
            free(path);
        }
    }
    closedir(folder);
    if (!newest && folder_has(dir, "config.json")) newest = format_text("%s", dir);
    CHECK(newest, "%s holds no checkpoint: neither config.json nor a folder step-* with one", dir);
    return newest;
}

static int is_read(const struct dirent *entry) {
    const char *end = strrchr(entry->d_name, '.');
    return end && (!strcmp(end, ".safetensors") || !strcmp(end, ".json"));
}

// Each rank reads the files that its host has in the folder.
static void check_same_files(const char *folder) {
    struct dirent **entry;
    int count = scandir(folder, &entry, is_read, alphasort);
    CHECK(count >= 0, "%s", file_fault("open", folder));
    char **paths = host_alloc((size_t)count * sizeof *paths);
    for (int i = 0; i < count; i++) paths[i] = format_text("%s/%s", folder, entry[i]->d_name);
    CHECK(comm_same_files(paths, count, comm_world()),
          "%s: not all ranks find the same files there: all hosts need the same checkpoint", folder);
    for (int i = 0; i < count; i++) free(paths[i]), free(entry[i]);
    free(paths);
    free(entry);
}

// A run may be saving there, and a host may see an older state of a folder that it shares.
char *checkpoint_newest(const char *dir) {
    char *newest = newest_here(dir);
    const char *name = strrchr(newest, '/');
    double step = (double)step_of(name ? name + 1 : newest);
    double most = comm_max(step, comm_world()), least = -comm_max(-step, comm_world());
    CHECK(most == least,
          "%s: step %.0f is the newest that one rank sees, and step %.0f that another sees: name one of "
          "its folders, which no run is about to replace",
          dir, most, least);
    check_same_files(newest);
    return newest;
}
