// base.c: errors that name their cause, a start with the best BLAS kernel for this processor, and printing.
#include "base.h"

#include <cblas.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <math.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static bool line_is_open;  // a progress line is on the terminal, without its newline

static void close_line(void) {
    if (line_is_open) putchar('\n');
    line_is_open = false;
}

// ---- ranks ----

static int rank, ranks = 1;
static void (*end_all)(const char *sentence, int status);

void base_set_rank(int mine, int all, void (*end)(const char *sentence, int status)) {
    rank = mine;
    ranks = all;
    end_all = end;
}

// The rank that Open MPI's mpirun, or srun with PMIx or PMI, gave this process; 0 without them.
static int launched_rank(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return 0;
}

int base_launched(void) {
    // Of Open MPI, of srun, and of MPICH and its kin.
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"};
    size_t i = 0;
    while (i < sizeof names / sizeof *names && !getenv(names[i])) i++;
    int count = i < sizeof names / sizeof *names ? atoi(getenv(names[i])) : 1;
    return count > 1 ? count : 1;
}

// ---- errors ----

static char context[64];

void fatal_context(const char *format, ...) {
    context[0] = 0;
    if (!format) return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(context, sizeof context, format, arguments);
    va_end(arguments);
}

static jmp_buf *trying;
static char refused[1024];

const char *refusal(void (*act)(const void *context), const void *context) {
    jmp_buf here;
    trying = &here;
    if (setjmp(here) == 0) {
        act(context);
        trying = NULL;
        return NULL;
    }
    trying = NULL;
    return refused;
}

enum { MOST_AT_FATAL = 4 };
static void (*at_fatal[MOST_AT_FATAL])(const char *sentence);
static int at_fatals;

void base_at_fatal(void (*act)(const char *sentence)) {
    for (int i = 0; i < at_fatals; i++)
        if (at_fatal[i] == act) return;
    CHECK(at_fatals < MOST_AT_FATAL, "more than %d are told of an end", MOST_AT_FATAL);
    at_fatal[at_fatals++] = act;
}

void base_last_words(const char *sentence) {
    int acts = at_fatals;
    at_fatals = 0;  // one that is fatal itself says so, and the rest is left undone
    char *own = strdup(sentence);
    fputs(sentence, stderr);
    for (int i = 0; i < acts && own; i++) {
        own[strcspn(own, "\n")] = 0;
        at_fatal[i](own);
    }
    fflush(NULL);
}

void fatal(const char *format, ...) {
    static char sentence[4096];
    if (trying) {
        va_list why;
        va_start(why, format);
        vsnprintf(refused, sizeof refused, format, why);
        va_end(why);
        longjmp(*trying, 1);
    }
    char who[32] = "";
    if (ranks > 1) snprintf(who, sizeof who, "rank %d: ", rank);
    int length = snprintf(sentence, sizeof sentence, "%s: %s%s%s", base_program(), who, context,
                          context[0] ? ": " : "");
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(sentence + length, sizeof sentence - (size_t)length - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof sentence - 2) length = (int)sizeof sentence - 2;
    strcpy(sentence + length, "\n");
    close_line();
    fflush(stdout);
    if (end_all) end_all(sentence, STATUS_USAGE);
    // If all ranks fail alike before they have met, only rank 0 prints, and its end ends the others.
    if (rank > 0) usleep(3000000);
    base_last_words(sentence);
    // No atexit handlers: other threads may be running, and what they use must not be torn down.
    _exit(STATUS_USAGE);
}

static int sharers = 1;

void host_share(int ranks) { sharers = ranks; }
int host_sharers(void) { return sharers; }

// Checks at each large request, and whenever small ones add up to as much: memory is written to soon after.
static void check_host_memory(size_t bytes) {
    static const size_t look = 64 << 20;
    static size_t since;  // approximate: threads may lose some
    since += bytes < look ? bytes : look;
    if (since < look) return;
    since = 0;
    double left = host_memory_left();
    if ((double)bytes * sharers + (double)look < left) return;
    char each[64] = "";
    if (sharers > 1) snprintf(each, sizeof each, " to each of the %d ranks of this machine", sharers);
    fatal("out of host memory: %s more were asked for, and %s are left%s", bytes_text((double)bytes),
          bytes_text(left / sharers), each);
}

void *host_alloc(size_t bytes) {
    check_host_memory(bytes);
    void *memory = malloc(bytes ? bytes : 1);
    CHECK(memory, "out of host memory: %s more were asked for", bytes_text((double)bytes));
    return memory;
}

const char *plural(int64_t n) { return n == 1 ? "" : "s"; }

char *format_text(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *text;
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    CHECK(length >= 0, "out of host memory for a line of text");
    check_host_memory((size_t)length + 1);
    return text;
}

bool word_among(const char *names, const char *word) {
    size_t length = strlen(word);
    for (const char *at = names; (at = strstr(at, word)); at++)
        if ((at == names || at[-1] == ' ') && (at[length] == ' ' || !at[length])) return true;
    return false;
}

const char *printable(const char *text) {
    static char texts[4][100];
    static unsigned turn;
    char *shown = texts[turn++ % 4];
    snprintf(shown, sizeof *texts, "%s", text);
    for (char *c = shown; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?';  // non-ASCII as well: some of it commands terminals
    return shown;
}

// ---- start ----

// Classes of OpenBLAS kernels by the vectors that they use; those not named here use SSE.
typedef enum KernelClass { KERNEL_SSE, KERNEL_AVX, KERNEL_AVX2, KERNEL_AVX512 } KernelClass;

static KernelClass kernel_class(const char *core) {
    static const struct {
        const char *core;
        KernelClass class;
    } known[] = {
        {"SkylakeX", KERNEL_AVX512}, {"Cooperlake", KERNEL_AVX512}, {"SapphireRapids", KERNEL_AVX512},
        {"Haswell", KERNEL_AVX2},    {"Zen", KERNEL_AVX2},          {"Excavator", KERNEL_AVX2},
        {"Sandybridge", KERNEL_AVX}, {"Bulldozer", KERNEL_AVX},     {"Piledriver", KERNEL_AVX},
        {"Steamroller", KERNEL_AVX},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcasecmp(core, known[i].core) == 0) return known[i].class;
    return KERNEL_SSE;
}

// The best kernel that this processor can run, or NULL to accept OpenBLAS's own choice.
static const char *best_kernel(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
    return NULL;
}

static bool kernel_is_below(const char *best) {
    return kernel_class(openblas_get_corename()) < kernel_class(best);
}

#define PIN       "OPENBLAS_CORETYPE"
#define RESTARTED "ULTRASCALE_RESTARTED"  // set along with PIN: the pin is ours, and one restart is enough

// A thread that waits for others spins for 300,000 turns, milliseconds, before it sleeps: that is libgomp's
// default. On a busy machine it does so whenever another thread of ours has no core, and a run takes five
// times as long. 1,000 turns take about as long as falling asleep and waking up.
#define SPIN       "GOMP_SPINCOUNT"
#define SPIN_TURNS "1000"

static bool spins_too_long(void) {
    return omp_get_max_threads() > 1 && !getenv(SPIN) && !getenv("OMP_WAIT_POLICY");
}

// OpenBLAS reads PIN, and libgomp SPIN, when it is loaded, before main: the only way to change its mind is to
// start over.
static void restart_with_better_settings(char **argv) {
    const char *best = best_kernel(), *preload = getenv("LD_PRELOAD");
    bool pins = best && !getenv(PIN) && !getenv(RESTARTED) && kernel_is_below(best);
    if (!pins && !spins_too_long()) return;
    if (preload && strstr(preload, "vgpreload")) return;  // exec would leave valgrind behind
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) return;
    self[length] = '\0';
    if (spins_too_long()) setenv(SPIN, SPIN_TURNS, 1);
    if (pins) setenv(PIN, best, 1);
    if (pins) setenv(RESTARTED, "1", 1);
    execv(self, argv);
    if (pins) unsetenv(PIN);  // could not restart: go on with the slow kernel, which base_blas_name reports
}

#define COLUMNS "ULTRASCALE_COLUMNS"  // tells ranks, whose output goes through mpirun, the terminal's

int terminal_columns(void) { return getenv(COLUMNS) ? atoi(getenv(COLUMNS)) : 100; }

// mpirun gives its ranks pseudo-terminals wherever its output goes; so its own output is looked at.
static bool launched(void) { return getenv("OMPI_COMM_WORLD_RANK") != NULL; }

static void tell_columns(void) {
    struct winsize window;
    char text[32];
    snprintf(text, sizeof text, "/proc/%d/fd/1", (int)getppid());
    int out = launched() ? open(text, O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC) : STDOUT_FILENO;
    if (out >= 0 && isatty(out) && ioctl(out, TIOCGWINSZ, &window) == 0 && window.ws_col) {
        snprintf(text, sizeof text, "%d", window.ws_col);
        setenv(COLUMNS, text, 1);
    }
    if (out > STDERR_FILENO) close(out);
}

// Whether the user has SIGHUP ignored (nohup). Libraries may catch it before main, as UCX does, which some
// builds of Open MPI use.
static struct sigaction on_hangup;

// OpenBLAS repeats a refused request for memory until it is granted: with too little address space it would
// hang, already when it is loaded. It takes two buffers of 128 MB for each thread.
static void check_address_space(char **argv, char **environment) {
    enum { OWN = 96, EACH = 256, MOST = 128 };  // MB; threads, as Debian builds OpenBLAS
    static const char name[] = "OMP_NUM_THREADS=";
    cpu_set_t cores;
    long threads = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    for (; *environment; environment++)
        if (!strncmp(*environment, name, sizeof name - 1) && atol(*environment + sizeof name - 1) > 0)
            threads = atol(*environment + sizeof name - 1);
    if (threads > MOST) threads = MOST;
    struct rlimit space;
    rlim_t takes = (rlim_t)(OWN + EACH * threads) << 20;
    if (getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur >= takes) return;
    dprintf(STDERR_FILENO,
            "%s: OpenBLAS with %ld thread%s takes %llu MB of address space, and %llu are allowed (ulimit -v; "
            "OMP_NUM_THREADS=1 needs %d)\n",
            argv[0] ? basename(argv[0]) : "", threads, plural(threads), (unsigned long long)takes >> 20,
            (unsigned long long)space.rlim_cur >> 20, OWN + EACH);
    _exit(STATUS_USAGE);
}

static void before_libraries(int argc, char **argv, char **environment) {
    (void)argc;
    sigaction(SIGHUP, NULL, &on_hangup);
    check_address_space(argv, environment);
}

// Functions in this section run before those of any library.
__attribute__((section(".preinit_array"), used)) static void (*const preinit)(int, char **, char **) =
    before_libraries;

static void open_standard_streams(void) {
    for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++)
        if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) _exit(STATUS_USAGE);
}

// The pipe that carries our output to its reader, or -1. A rank writes to mpirun, which goes on reading
// even when nobody reads what it writes; so it is the pipe that mpirun writes to.
static int pipe_to_reader(void) {
    struct stat status;
    char path[32] = "/dev/stdout";
    if (launched()) snprintf(path, sizeof path, "/proc/%d/fd/1", (int)getppid());
    if (stat(path, &status) != 0 || !S_ISFIFO(status.st_mode)) return -1;
    return open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
}

typedef struct Watch {
    int pipe;
    sem_t begun;
} Watch;

static void *wait_for_reader_to_leave(void *context) {
    Watch *watch = context;
    struct pollfd end = {.fd = watch->pipe};
    sem_post(&watch->begun);
    while (poll(&end, 1, -1) < 0) {
    }
    if (!(end.revents & POLLERR) || rank > 0) return NULL;
    if (end_all) end_all("", STATUS_UNREAD);
    _exit(STATUS_UNREAD);
}

// Makes `| head` end a long run at once, and not only when it next prints something. Returns when the
// watcher is running: a fork while a thread starts would leave the child with locks that nobody releases.
static void watch_reader(void) {
    static Watch watch;
    watch.pipe = rank == 0 ? pipe_to_reader() : -1;
    if (watch.pipe < 0 || sem_init(&watch.begun, 0, 0) != 0) return;
    pthread_t watcher;
    sigset_t all, before;
    sigfillset(&all);  // signals are for the main thread
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&watcher, NULL, wait_for_reader_to_leave, &watch) == 0) {
        pthread_detach(watcher);
        while (sem_wait(&watch.begun) != 0) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Output lost to a full disk is a failure. A pipe whose reader has left is handled by watch_reader.
static void check_printed(void) {
    struct stat stream;
    bool whole = !fflush(stdout) && !ferror(stdout);
    if (whole || fstat(STDOUT_FILENO, &stream) < 0 || S_ISFIFO(stream.st_mode) || S_ISSOCK(stream.st_mode))
        return;
    fprintf(stderr, "%s: stdout could not be written whole: is the disk full?\n", base_program());
    _exit(STATUS_USAGE);
}

static char **arguments = (char *[]){NULL};

char **base_arguments(void) { return arguments; }

void base_start(int argc, char **argv) {
    arguments = argv;
    open_standard_streams();
    sigaction(SIGHUP, &on_hangup, NULL);
    // A write that nobody reads, or beyond the limit on file sizes, returns an error and does not kill us.
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    CHECK(argc > 0, "started without a program name");
    restart_with_better_settings(argv);
    atexit(check_printed);
    rank = launched_rank();
    watch_reader();
    tell_columns();
    // Buffers of many megabytes are allocated and freed in every step. By default each would be mapped,
    // zeroed page by page by the kernel, and unmapped again; on the heap, the pages are touched once. The
    // heap grows by several pages of 2 MB at a time, so that the device can ask for huge pages.
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TOP_PAD, 16 << 20);
    mallopt(M_TRIM_THRESHOLD, -1);
    setvbuf(stdout, NULL, _IOLBF, 0);  // a log shows lines as they come
    const char *threads = getenv("OMP_NUM_THREADS");
    if (threads && !*threads) threads = NULL, unsetenv("OMP_NUM_THREADS");  // empty: not set, as for OpenMP
    if (!threads) omp_set_num_threads(host_cores(omp_get_max_threads()));
    // OpenBLAS waits for as many threads as it has asked for, so OpenMP must not start fewer. Beyond 1,024
    // it crashes.
    omp_set_dynamic(0);
    int most = omp_get_max_active_levels() > 0 ? omp_get_thread_limit() : 1;
    if (most > 1024) most = 1024;
    if (omp_get_max_threads() > most) omp_set_num_threads(most);
}

const char *base_blas_name(void) {
    static char name[128];
    const char *best = best_kernel();
    char version[32] = "?";
    sscanf(openblas_get_config(), "OpenBLAS %31s", version);
    if (!*name && rank == 0 && best && kernel_is_below(best)) {
        if (getenv(PIN) && !getenv(RESTARTED))
            fprintf(stderr,
                    "%s: warning: " PIN
                    "=%s holds OpenBLAS below this processor's %s kernel; try: env -u " PIN " %s\n",
                    base_program(), getenv(PIN), best, program_invocation_name);
        else
            fprintf(stderr, "%s: warning: OpenBLAS runs its %s kernel, this processor deserves %s\n",
                    base_program(), openblas_get_corename(), best);
    }
    int threads = omp_get_max_threads();
    snprintf(name, sizeof name, "OpenBLAS %s %s, %d thread%s", version, openblas_get_corename(), threads,
             plural(threads));
    return name;
}

int base_rank(void) { return rank; }

const char *base_program(void) { return program_invocation_short_name; }

double wall_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ---- printing ----

void say(const char *format, ...) {
    if (rank > 0) return;
    va_list arguments;
    va_start(arguments, format);
    close_line();
    vprintf(format, arguments);
    size_t length = strlen(format);
    if (length == 0 || format[length - 1] != '\n') putchar('\n');
    fflush(stdout);
    va_end(arguments);
}

static void time_left_text(double seconds, char *text, size_t size) {
    int64_t s = (int64_t)(seconds + 0.5);
    if (s >= 3600) snprintf(text, size, "%ld h %02ld min left", s / 3600, s / 60 % 60);
    else if (s >= 60) snprintf(text, size, "%ld min %02ld s left", s / 60, s % 60);
    else snprintf(text, size, "%ld s left", s);
}

// Columns of the terminal that shows this rank's output, directly or through mpirun; 0 in a log.
static int shown_columns(void) {
    struct winsize window;
    if (launched()) return getenv(COLUMNS) ? atoi(getenv(COLUMNS)) : 0;
    if (isatty(STDOUT_FILENO))
        return ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col ? window.ws_col : 80;
    return 0;
}

const char *colored(const char *text, Color color) {
    static char shown[64];
    const char *plain = getenv("NO_COLOR"), *kind = getenv("TERM");
    if (!shown_columns() || (plain && *plain) || (kind && !strcmp(kind, "dumb"))) return text;
    snprintf(shown, sizeof shown, "\033[%dm%s\033[0m", color, text);
    return shown;
}

// "[####------]  40%, 12 s left: step 4/10"; what does not fit a narrow terminal is cut off at the end.
static void rewrite_line(int width, int64_t done, int64_t total, const char *left, const char *text) {
    enum { BAR = 20 };
    char bar[64] = "";
    int full = (int)(done * BAR / total);
    if (width >= 3 * BAR)
        snprintf(bar, sizeof bar, "[%.*s%.*s] %3d%%%s", full, "####################", BAR - full,
                 "--------------------", (int)(100 * done / total), *left ? ", " : ": ");
    char *line = format_text("%s%s%s%s", bar, left, *left ? ": " : "", text);
    printf("\r%.*s\033[K", width - 1, line);  // one column less: a full line would wrap and stay
    free(line);
    line_is_open = true;
}

static void show_progress(int width, int64_t done, int64_t total, const char *text) {
    static double began;
    static int64_t first, before;
    if (done <= before || before == 0) began = wall_seconds(), first = done;
    before = done;
    char left[48] = "";
    if (done > first && done < total)
        time_left_text((wall_seconds() - began) / (double)(done - first) * (double)(total - done), left,
                       sizeof left);
    rewrite_line(width, done, total, left, text);
}

void progress(int64_t done, int64_t total, const char *text) {
    if (rank > 0) return;
    int width = shown_columns();
    if (width) show_progress(width, done, total, text);
    else if (done == total || done * 10 / total > (done - 1) * 10 / total) say("%s", text);
    if (done == total) close_line();
    fflush(stdout);
}

void progress_on_terminal(int64_t done, int64_t total, const char *text) {
    int width = rank > 0 ? 0 : shown_columns();
    if (!width) return;
    show_progress(width, done, total, text);
    if (done == total) printf("\r\033[K"), line_is_open = false;
    fflush(stdout);
}

static const char *scaled_text(double value, const char *unit) {
    static char buffers[8][32];
    static unsigned turn;
    static const char prefixes[] = " kMGTPEZY";
    char *text = buffers[turn++ % 8];
    int i = 0;
    while (fabs(value) >= 999.5 && prefixes[i + 1]) value /= 1000, i++;
    if (i == 0) snprintf(text, sizeof *buffers, "%.0f %s", value, unit);
    else
        snprintf(text, sizeof *buffers, "%.*f %c%s",
                 fabs(value) < 9.995   ? 2
                 : fabs(value) < 99.95 ? 1
                                       : 0,
                 value, prefixes[i], unit);
    return text;
}

const char *bytes_text(double bytes) { return scaled_text(bytes, "B"); }
const char *flops_text(double flops) { return scaled_text(flops, "FLOP"); }
