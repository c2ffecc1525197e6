// files.c: see files.h.
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

const char *fault_text(const char *format, ...) {
    static char *sentence;  // a path may be of any length
    char *before = sentence;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&sentence, format, arguments);
    va_end(arguments);
    CHECK(length >= 0, "out of host memory for a sentence");
    free(before);  // which may be an argument
    return sentence;
}

const char *file_fault(const char *verb, const char *path) {
    return fault_text("cannot %s %s: %s", verb, path, strerror(errno));
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

const char *name_twice(char *const *names, int count) {
    char **sorted = host_alloc(count * sizeof *sorted);
    for (int i = 0; i < count; i++) sorted[i] = names[i];
    qsort(sorted, count, sizeof *sorted, compare_names);
    const char *twice = NULL;
    for (int i = 1; i < count && !twice; i++)
        if (!strcmp(sorted[i - 1], sorted[i])) twice = sorted[i];
    free(sorted);
    return twice;
}

// How many bytes the character has that begins here, or 0: too few follow, it is a surrogate, beyond the last
// one, or written longer than it needs.
static int utf8_length(const unsigned char *c) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    int length = *c < 0x80 ? 1 : *c < 0xc0 ? 0 : *c < 0xe0 ? 2 : *c < 0xf0 ? 3 : *c < 0xf8 ? 4 : 0;
    uint32_t code = length > 1 ? *c & (0x7f >> length) : *c;
    for (int i = 1; i < length; i++) {
        if ((c[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (c[i] & 0x3f);
    }
    return code < least[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : length;
}

void make_utf8(char *text) {
    for (int length; *text; text += length ? length : 1) {
        length = utf8_length((const unsigned char *)text);
        if (!length) *text = '?';
    }
}

// ---- writing ----

// The file that a name leads to through symbolic links, even if it does not exist yet. The caller frees it.
static char *follow(const char *name) {
    enum { MOST_LINKS = 40 };  // as in the kernel
    char *path = format_text("%s", name), link[4096];
    for (int i = 0; i < MOST_LINKS; i++) {
        ssize_t length = readlink(path, link, sizeof link - 1);
        if (length <= 0) break;
        link[length] = '\0';
        const char *slash = strrchr(path, '/');
        int folder = link[0] != '/' && slash ? (int)(slash + 1 - path) : 0;
        char *next = format_text("%.*s%s", folder, path, link);
        free(path);
        path = next;
    }
    return path;
}

// The name of a file while it is written. The process id keeps two runs apart. The caller frees it.
static char *part_of(const char *name) {
    char *target = follow(name), *part = format_text("%s.%d.part", target, (int)getpid());
    free(target);
    return part;
}

static int open_part(const char *name) {
    char *part = part_of(name);
    int file = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    int error = errno;
    free(part);
    errno = error;
    return file;
}

// Which of the standard streams is this very file, or -1. It is then written through the stream, at its
// current position.
static int stream_of(const struct stat *file) {
    for (int stream = STDOUT_FILENO; stream <= STDERR_FILENO; stream++) {
        struct stat status;
        if (fstat(stream, &status) == 0 && status.st_dev == file->st_dev && status.st_ino == file->st_ino)
            return stream;
    }
    return -1;
}

static int open_through(const char *flag, const char *name) {
    // The reader of a FIFO may be about to open it; if it never does, we must not wait for ever.
    int file = -1;
    for (int trial = 0; trial < 20 && file < 0; trial++) {
        if (trial) usleep(50000);
        file = open(name, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (file < 0 && errno != ENXIO) break;
    }
    CHECK(file >= 0 || errno != ENXIO, "%s %s cannot be written: nobody reads this FIFO", flag, name);
    CHECK(file >= 0, "%s %s cannot be written: %s", flag, name, strerror(errno));
    fcntl(file, F_SETFL, fcntl(file, F_GETFL) & ~O_NONBLOCK);
    return file;
}

// The checks for any use of the name; true if something of that name exists.
static bool check_name(const char *flag, const char *name, struct stat *status) {
    bool there = stat(name, status) == 0;
    CHECK(!there || !S_ISDIR(status->st_mode), "%s %s cannot be written: it is a folder", flag, name);
    CHECK(!there || stream_of(status) >= 0 || access(name, W_OK) == 0, "%s %s cannot be written: %s", flag,
          name, strerror(errno));
    return there;
}

// Whether a file belongs to a checkpoint: weights, or what describes those beside it.
static bool of_a_checkpoint(const char *name) {
    static const char ending[] = ".safetensors";
    size_t length = strlen(name), last = strlen(ending);
    if (length >= last && !strcmp(name + length - last, ending)) return true;
    const char *slash = strrchr(name, '/'), *own = slash ? slash + 1 : name;
    if (strcmp(own, "config.json") && strcmp(own, "generation_config.json")) return false;
    char *weights = format_text("%.*smodel%s", (int)(own - name), name, ending);
    bool there = access(weights, F_OK) == 0;
    free(weights);
    return there;
}

void output_check(const char *flag, const char *name) {
    struct stat status;
    if (base_rank() > 0) return;
    if (check_name(flag, name, &status)) {
        CHECK(!of_a_checkpoint(name), "%s %s would overwrite a part of a checkpoint", flag, name);
        return;  // if its folder allows no new file, it is written in place
    }
    int file = open_part(name);
    CHECK(file >= 0, "%s %s cannot be written: %s", flag, name, strerror(errno));
    close(file);
    char *part = part_of(name);
    unlink(part);
    free(part);
}

FILE *output_open(const char *flag, const char *name) {
    struct stat status;
    bool there = check_name(flag, name, &status);
    int stream = there ? stream_of(&status) : -1, file;
    if (stream >= 0) {
        fflush(stdout);
        file = dup(stream);
    } else if (there && !S_ISREG(status.st_mode)) {
        file = open_through(flag, name);
    } else {
        file = open_part(name);
        if (file >= 0 && there) fchmod(file, status.st_mode & 07777);
        if (file < 0 && there) file = open(name, O_WRONLY | O_TRUNC | O_CLOEXEC);
    }
    FILE *out = file >= 0 ? fdopen(file, "w") : NULL;
    CHECK(out, "%s %s cannot be written: %s", flag, name, strerror(errno));
    return out;
}

void output_close(FILE *out, const char *flag, const char *name) {
    struct stat open_one, named;
    char *part = part_of(name), *target = follow(name);
    bool beside = fstat(fileno(out), &open_one) == 0 && stat(part, &named) == 0 &&
                  open_one.st_dev == named.st_dev && open_one.st_ino == named.st_ino;
    errno = 0;
    bool whole = fflush(out) == 0 && !ferror(out);
    int error = errno;
    // The errno of an earlier failure is lost; writing one more byte fails in the same way.
    if (!whole && !error && write(fileno(out), "", 1) < 0) error = errno;
    if (fclose(out) != 0 && whole) whole = false, error = errno;
    if (whole && beside && rename(part, target) != 0) whole = false, error = errno;
    if (!whole && beside) unlink(part);
    CHECK(whole, "%s %s could not be written whole: %s%s", flag, name, strerror(error ? error : EIO),
          beside ? "; an older one is as it was" : "");
    free(part);
    free(target);
}

const char *file_close_flushed(FILE *file, const char *path) {
    bool flushed = !ferror(file) && fflush(file) == 0 && fsync(fileno(file)) == 0;
    int error = errno;                // fclose may overwrite the cause
    bool closed = fclose(file) == 0;  // some file systems report a full disk here at the earliest
    if (!flushed) errno = error;
    return flushed && closed ? NULL : file_fault("write", path);
}

// ---- reading ----

static struct sigaction before_watching;

// The path of the file that is mapped at this address, or NULL; *shared: what is written there goes to it.
// The caller frees it.
static char *file_at(const void *address, bool *shared) {
    char *line = NULL, *path = NULL, mode;
    size_t room = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && !path && getline(&line, &room, maps) > 0) {
        uintptr_t begin, end;
        int at = 0;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*3c%c %*s %*s %*s %n", &begin, &end, &mode, &at) < 3 ||
            (uintptr_t)address < begin || (uintptr_t)address >= end || line[at] != '/')
            continue;
        line[strcspn(line, "\n")] = '\0';
        path = format_text("%s", line + at);
        *shared = mode == 's';
    }
    if (maps) fclose(maps);
    free(line);
    return path;
}

// The signal comes from the access itself, not at some random point, so this handler may call any function.
static void on_bus_error(int number, siginfo_t *info, void *unused) {
    (void)unused;
    bool shared;
    sigaction(number, &before_watching, NULL);
    char *path = info->si_code == BUS_ADRERR ? file_at(info->si_addr, &shared) : NULL;
    if (path && shared)
        fatal("%.*s is full, where the ranks of this machine share memory: mount it larger (docker run "
              "--shm-size), or start fewer ranks",
              (int)(strrchr(path, '/') - path), path);
    if (path) fatal("%s became shorter while it was read, or its disk fails", path);
    // Not in a mapped file: returning repeats the access, and ends the program as without this handler.
    // After kill() there is no access to repeat.
    if (info->si_code <= 0) raise(number);
}

void watch_mapped_files(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO}, now;
    sigaction(SIGBUS, &action, &now);
    if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_bus_error) before_watching = now;
}

// The descriptor of a regular file, or -1 and the sentence in *wrong.
static int open_input(const char *path, size_t *size, const char **wrong) {
    static const char cannot[] = "cannot open %s: %s",
                      is[] = "%s is a %s, and what is read is a file on a disk";
    struct stat status;
    // Opening a FIFO would wait for its writer, and opening a device may start it.
    bool there = stat(path, &status) == 0;
    *wrong = !there                     ? fault_text(cannot, path, strerror(errno))
             : S_ISDIR(status.st_mode)  ? fault_text(is, path, "directory")
             : !S_ISREG(status.st_mode) ? fault_text(is, path, "pipe or a device")
                                        : NULL;
    if (*wrong) return -1;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) != 0) *wrong = fault_text(cannot, path, strerror(errno));
    *size = (size_t)status.st_size;
    return file;
}

const char *input_map(const char *path, const uint8_t **bytes, size_t *size) {
    static const uint8_t nothing[1];
    const char *wrong;
    int file = open_input(path, size, &wrong);
    if (wrong) return wrong;
    *bytes = nothing;
    if (*size) {
        void *memory = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, file, 0);
        if (memory == MAP_FAILED)
            wrong = fault_text("%s cannot be mapped into memory: %s", path, strerror(errno));
        else *bytes = memory;
        watch_mapped_files();
    }
    close(file);
    return wrong;
}

void input_unmap(const uint8_t *bytes, size_t size) {
    if (bytes && size) munmap((void *)bytes, size);
}

const char *input_text(const char *path, size_t most, char **text, size_t *size) {
    const char *wrong;
    int file = open_input(path, size, &wrong);
    if (wrong) return wrong;
    if (*size >= most) wrong = fault_text("%s is too long", path);
    size_t done = 0;
    ssize_t got = 1;
    *text = wrong ? NULL : host_alloc(*size + 1);
    while (!wrong && done < *size && got > 0) {
        got = read(file, *text + done, *size - done);
        if (got > 0) done += (size_t)got;
    }
    close(file);
    if (!wrong && done < *size)
        wrong = fault_text("cannot read %s: %s", path, got < 0 ? strerror(errno) : "it became shorter");
    // What a crash of the machine may leave; whoever reads up to the first zero would take it for whole.
    const char *zero = wrong ? NULL : memchr(*text, 0, done);
    if (zero) wrong = fault_text("%s: it is no text: byte %zu is a zero", path, (size_t)(zero - *text));
    if (wrong) return free(*text), *text = NULL, wrong;
    (*text)[done] = '\0';
    return NULL;
}

char *input_in_memory(const void *bytes, size_t size) {
    int file = memfd_create("input", 0);
    CHECK(file >= 0 && write(file, bytes, size) == (ssize_t)size, "out of memory for %s of input: %s",
          bytes_text((double)size), strerror(errno));
    return format_text("/proc/self/fd/%d", file);
}
