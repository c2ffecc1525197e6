// base.c: errors, the option table, progress, and a start on the BLAS kernel that this processor deserves.
//
// The option table is the one place where a flag exists. Parser, defaults, bounds and --help are read from
// it, so none of them can say what another does not do.
#include "base.h"

#include <cblas.h>
#include <ctype.h>
#include <errno.h>
#include <malloc.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { HELP_WIDTH = 100, LONGEST_NAME = 40 };

static bool line_is_open;  // a progress line stands on the terminal without its newline

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

// What Open MPI's mpirun, or srun with PMIx or PMI, tells the processes that it starts; 0 without them.
static int launched_rank(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return atoi(getenv(names[i]));
    return 0;
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

void fatal(const char *format, ...) {
    static char sentence[4096];
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
    // Ranks that fail alike before they know each other: rank 0 speaks, and its end is the others' end.
    if (rank > 0) usleep(300000);
    fputs(sentence, stderr);
    fflush(NULL);
    // No atexit handlers: other threads may be at work, and what they hold is not ours to take apart.
    _exit(STATUS_USAGE);
}

void *host_alloc(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    CHECK(memory, "out of host memory: %s more were asked for", bytes_text((double)bytes));
    return memory;
}

char *format_text(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *text;
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    CHECK(length >= 0, "out of host memory for a line of text");
    return text;
}

// ---- start ----

// Classes of OpenBLAS kernels by the vectors that they use; what is not named here runs on SSE.
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

// The best kernel that this processor runs, or NULL where OpenBLAS's own choice is not second-guessed.
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
    return best && kernel_class(openblas_get_corename()) < kernel_class(best);
}

#define PIN       "OPENBLAS_CORETYPE"
#define RESTARTED "ULTRASCALE_RESTARTED"  // set by us beside PIN: the pin is ours, and once is enough

// OpenBLAS reads PIN when it is loaded, before main: the only way to change its mind is to start over.
static void restart_on_best_kernel(char **argv) {
    const char *best = best_kernel(), *preload = getenv("LD_PRELOAD");
    if (getenv(PIN) || getenv(RESTARTED) || !kernel_is_below(best)) return;
    if (preload && strstr(preload, "vgpreload")) return;  // exec would leave valgrind behind
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) return;
    self[length] = '\0';
    setenv(PIN, best, 1);
    setenv(RESTARTED, "1", 1);
    execv(self, argv);
    unsetenv(PIN);  // could not start: go on with the slow kernel, of which base_blas_name tells
}

#define COLUMNS "ULTRASCALE_COLUMNS"  // of the terminal, for ranks, whose output goes through mpirun

int terminal_columns(void) { return getenv(COLUMNS) ? atoi(getenv(COLUMNS)) : 100; }

static void tell_columns(void) {
    struct winsize window;
    char digits[16];
    if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) < 0 || !window.ws_col) return;
    snprintf(digits, sizeof digits, "%d", window.ws_col);
    setenv(COLUMNS, digits, 1);
}

void base_start(int argc, char **argv) {
    CHECK(argc > 0, "started without a program name");
    restart_on_best_kernel(argv);
    rank = launched_rank();
    tell_columns();
    // Buffers of many megabytes come and go every step. By default each would be mapped, zeroed page by
    // page by the kernel, and unmapped again; kept on the heap, the pages are touched once.
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    setvbuf(stdout, NULL, _IOLBF, 0);  // a log shows lines as they come
}

const char *base_blas_name(void) {
    static char name[128];
    char version[32] = "?";
    sscanf(openblas_get_config(), "OpenBLAS %31s", version);
    if (!*name && rank == 0 && kernel_is_below(best_kernel())) {
        if (getenv(PIN) && !getenv(RESTARTED))
            fprintf(stderr,
                    "%s: warning: " PIN
                    "=%s holds OpenBLAS below this processor's %s kernel; try: env -u " PIN " %s\n",
                    base_program(), getenv(PIN), best_kernel(), program_invocation_name);
        else
            fprintf(stderr, "%s: warning: OpenBLAS runs its %s kernel, this processor deserves %s\n",
                    base_program(), openblas_get_corename(), best_kernel());
    }
    int threads = omp_get_max_threads();
    snprintf(name, sizeof name, "OpenBLAS %s %s, %d thread%s", version, openblas_get_corename(), threads,
             threads == 1 ? "" : "s");
    return name;
}

const char *base_program(void) { return program_invocation_short_name; }

double wall_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ---- options ----

// Flags of the whole book, so that a program can say where one that it lacks belongs.
static const struct {
    const char *names, *where;
} book_flags[] = {
    {" ranks timeout gpus-per-node compute-efficiency network-efficiency timeline timeline-svg dp ",
     "it belongs to chapter 01, data parallelism"},
    {" zero ", "it belongs to chapter 02, ZeRO"},
    {" tp sp ", "it belongs to chapter 03, tensor and sequence parallelism"},
    {" cp ", "it belongs to chapter 04, context parallelism"},
    {" pp ", "it belongs to chapter 05, pipeline parallelism"},
    {" ep ", "it belongs to chapter 06, expert parallelism"},
    {" model layers hidden heads kv-heads ffn vocab seq tied dtype micro-batch grad-acc steps seed data "
     "optimizer lr weight-decay clip warmup recompute init save save-every resume json trace machine "
     "no-check ",
     "other programs of the book have it"},
};

// Levenshtein's distance: letters to insert, delete or replace.
static int edit_distance(const char *a, const char *b) {
    int row[LONGEST_NAME + 1], n = (int)strlen(b);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; *a; a++, i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int replaced = diagonal + (*a != b[j - 1]);
            diagonal = row[j];
            int shifted = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            row[j] = replaced < shifted ? replaced : shifted;
        }
    }
    return row[n];
}

static void refuse_unknown(const char *name, const Option *table, int count) NO_RETURN;
static void refuse_unknown(const char *name, const Option *table, int count) {
    char *word = format_text(" %s ", name);
    for (size_t i = 0; i < sizeof book_flags / sizeof *book_flags; i++)
        if (strlen(name) > 0 && !strchr(name, ' ') && strstr(book_flags[i].names, word))
            fatal("--%s is not one of %s's flags (%s); --help lists them", name, base_program(),
                  book_flags[i].where);
    const char *nearest = "help";
    int least = edit_distance(name, nearest);
    for (int i = 0; i < count; i++) {
        int distance = edit_distance(name, table[i].name);
        if (distance < least) least = distance, nearest = table[i].name;
    }
    if (least <= 1 + (int)strlen(nearest) / 3)
        fatal("--%s is not one of %s's flags (is --%s meant?); --help lists them", name, base_program(),
              nearest);
    fatal("--%s is not one of %s's flags; --help lists them", name, base_program());
}

enum { PLAIN_LIMIT = 10000 };  // bounds beyond it guard against overflow, and are no news in --help

// "from 1 to 64", "at least 1", or "" where the bounds say nothing. Static buffer.
static const char *bounds_text(const Option *option, double limit) {
    static char text[96];
    bool low = option->min >= -limit, high = option->max <= limit;
    if (low && high) snprintf(text, sizeof text, "from %.10g to %.10g", option->min, option->max);
    if (low && !high) snprintf(text, sizeof text, "at least %.10g", option->min);
    if (!low && high) snprintf(text, sizeof text, "at most %.10g", option->max);
    if (!low && !high) *text = '\0';
    return text;
}

static void check_bounds(const Option *option, const char *value, double number) {
    CHECK(number >= option->min && number <= option->max, "--%s %s is out of bounds: it is %s",
          option->name, value, bounds_text(option, INFINITY));
}

static int choice_index(const Option *option, const char *value) {
    int index = 0;
    for (const char *word = option->detail;; index++) {
        size_t length = strcspn(word, "|");
        if (strlen(value) == length && strncmp(word, value, length) == 0) return index;
        if (!word[length]) break;
        word += length + 1;
    }
    fatal("--%s %s is not one of %s", option->name, value, option->detail);
}

// The whole text must be the number: no blanks before it, no letters after it.
static void set_value(Option *option, const char *value) {
    char *end = NULL;
    bool begins = *value && !isspace((unsigned char)*value);
    errno = 0;
    switch (option->type) {
        case OPTION_INT: {
            int64_t number = strtoll(value, &end, 10);
            CHECK(begins && !*end, "--%s %s is not a whole number", option->name, value);
            CHECK(errno == 0, "--%s %s is too large for 64 bits", option->name, value);
            check_bounds(option, value, (double)number);
            *(int64_t *)option->target = number;
            break;
        }
        case OPTION_REAL: {
            double number = strtod(value, &end);
            CHECK(begins && !*end && isfinite(number), "--%s %s is not a finite number", option->name,
                  value);
            check_bounds(option, value, number);
            *(double *)option->target = number;
            break;
        }
        case OPTION_TEXT:
            CHECK(*value, "--%s needs a %s that is not empty", option->name, option->detail);
            *(const char **)option->target = value;
            break;
        case OPTION_CHOICE:
            *(int *)option->target = choice_index(option, value);
            break;
        case OPTION_FLAG:
            *(bool *)option->target = strcmp(value, "1") == 0;
            break;
    }
}

static const char *value_name(const Option *option) {
    switch (option->type) {
        case OPTION_INT:
            return "N";
        case OPTION_REAL:
            return "X";
        case OPTION_FLAG:
            return "";
        default:
            return option->detail;
    }
}

static const char *value_hint(const Option *option) {
    switch (option->type) {
        case OPTION_INT:
            return "a whole number";
        case OPTION_REAL:
            return "a number";
        default:
            return option->detail;
    }
}

// Prints text in the columns from `left` to HELP_WIDTH, broken at blanks; the cursor stands at `column`.
static void print_wrapped(const char *text, int left, int column) {
    if (column + 2 > left) column = HELP_WIDTH;  // what stands there is too long: begin on a new line
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column + 1 + length > HELP_WIDTH) {
            printf("\n%*s", left, "");
            column = left;
        } else if (column >= left) {
            column += printf(" ");
        } else {
            column += printf("%*s", left - column, "");
        }
        column += printf("%.*s", length, text);
        text += length + (text[length] == ' ');
    }
    putchar('\n');
}

// `purpose` is one line, then, if it has more lines, examples.
static void print_help(const char *purpose, const Option *table, int count) {
    enum { LEFT = 30 };
    int first = (int)strcspn(purpose, "\n");
    printf("%s: %.*s\n\nflags (--name value, or --name=value):\n", base_program(), first, purpose);
    for (int i = 0; i < count; i++) {
        const Option *option = &table[i];
        bool number = option->type == OPTION_INT || option->type == OPTION_REAL;
        const char *note[] = {number && option->detail ? option->detail : "",
                              number ? bounds_text(option, PLAIN_LIMIT) : "",
                              option->standard && option->type != OPTION_FLAG ? option->standard : ""};
        const char *before[] = {"", "", "default "};
        char text[1024];
        int length = snprintf(text, sizeof text, "%s", option->help), notes = 0;
        for (int j = 0; j < 3 && length < (int)sizeof text; j++)
            if (*note[j])
                length += snprintf(text + length, sizeof text - (size_t)length, "%s%s%s",
                                   notes++ ? ", " : " (", before[j], note[j]);
        if (notes && length < (int)sizeof text) snprintf(text + length, sizeof text - (size_t)length, ")");
        int column = printf("  --%s %s", option->name, value_name(option));
        print_wrapped(text, LEFT, column);
    }
    print_wrapped("prints this and ends", LEFT, printf("  --help"));
    if (purpose[first]) printf("\nexamples:%s\n", purpose + first);
    printf("\nexit status: 0 all checks passed, 1 a check failed, 2 wrong use\n");
}

static void check_table(const Option *table, int count) {
    for (int i = 0; i < count; i++) {
        bool number = table[i].type == OPTION_INT || table[i].type == OPTION_REAL;
        CHECK(strlen(table[i].name) <= LONGEST_NAME, "option table: --%s is too long", table[i].name);
        CHECK(!number || table[i].min < table[i].max, "option table: --%s has no bounds", table[i].name);
        for (int j = 0; j < i; j++)
            CHECK(strcmp(table[i].name, table[j].name), "option table: --%s stands twice", table[i].name);
    }
}

void options_parse(int argc, char **argv, const char *purpose, Option *table, int count) {
    check_table(table, count);
    for (int i = 0; i < count; i++) {
        table[i].given = false;
        if (table[i].standard) set_value(&table[i], table[i].standard);
        else if (table[i].type == OPTION_FLAG) *(bool *)table[i].target = false;
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            if (rank == 0) print_help(purpose, table, count);
            exit(STATUS_PASS);
        }
        CHECK(strncmp(argv[i], "--", 2) == 0,
              "\"%s\" is not a flag: flags begin with --; --help lists them", argv[i]);
        const char *name = argv[i] + 2, *value = strchr(name, '=');
        size_t length = value ? (size_t)(value - name) : strlen(name);
        Option *option = NULL;
        for (int j = 0; j < count && !option; j++)
            if (strlen(table[j].name) == length && strncmp(table[j].name, name, length) == 0)
                option = &table[j];
        if (!option) refuse_unknown(format_text("%.*s", (int)length, name), table, count);
        CHECK(!option->given, "--%s is given twice", option->name);
        option->given = true;
        if (option->type == OPTION_FLAG) {
            CHECK(!value, "--%s takes no value", option->name);
            set_value(option, "1");
        } else if (value) {
            set_value(option, value + 1);
        } else {
            CHECK(i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0, "--%s needs a value: %s",
                  option->name, value_hint(option));
            set_value(option, argv[++i]);
        }
    }
}

bool option_given(const Option *table, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (strcmp(table[i].name, name) == 0) return table[i].given;
    return false;
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

void progress(int64_t done, int64_t total, const char *text) {
    static double began;
    static int64_t first, before;
    if (rank > 0) return;
    if (done <= before || before == 0) began = wall_seconds(), first = done;
    before = done;
    if (!isatty(STDOUT_FILENO)) {
        if (done == total || done * 10 / total > (done - 1) * 10 / total) printf("%s\n", text);
        return;
    }
    struct winsize window;
    int width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col ? window.ws_col : 80;
    char left[48] = "";
    if (done > first && done < total)
        time_left_text((wall_seconds() - began) / (double)(done - first) * (double)(total - done), left,
                       sizeof left);
    char *line = format_text("%s  %s", text, left);
    printf("\r%.*s\033[K", width - 1, line);  // one column less: a full line would wrap and stay
    free(line);
    line_is_open = true;
    if (done == total) close_line();
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
