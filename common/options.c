// options.c: a program's flags exist in one place only, its option table. Parser, defaults, bounds and --help
// are derived from it, so they cannot contradict each other.
#include <ctype.h>
#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base.h"
#include "files.h"

enum { HELP_WIDTH = 100, LONGEST_NAME = 40 };

// So that a program can say to which programs a flag that it lacks belongs.
static const struct {
    const char *names, *where;
} book_flags[] = {
    {"ranks timeout trust-calls gpus-per-node compute-efficiency network-efficiency timeline timeline-svg "
     "dp bucket-mb",
     "it belongs to chapter 01, data parallelism"},
    {"gather no-prefetch zero-r shard-ranks", "it belongs to chapter 02, ZeRO"},
    {"zero", "zero1, zero2 and zero3 are one stage each; programs from chapter 03 on have --zero"},
    {"tp sp vocab-parallel async-tp", "it belongs to chapter 03, tensor and sequence parallelism"},
    {"cp context layout", "it belongs to chapter 04, context parallelism"},
    {"pp schedule chunks stage-layers load", "it belongs to chapter 05, pipeline parallelism"},
    {"stages micro-batches", "chapter 05's schedule has it; programs that train have --pp and --grad-acc"},
    {"ep experts top-k expert-ffn shared-experts moe expert-groups groups-kept routed-scale capacity "
     "aux-loss z-loss balance-bias",
     "it belongs to chapter 06, expert parallelism"},
    {"size rows gpu", "it belongs to chapter 07, kernels"},
    {"fp8 fp8-tile fp8-wire master moments rounding gradient sum loss-scale scale scale-interval",
     "it belongs to chapter 08, mixed precision"},
    {"model layers hidden heads kv-heads head-size ffn vocab seq tied dtype micro-batch grad-acc steps seed "
     "data documents optimizer lr weight-decay clip warmup recompute attention kernels init save save-every "
     "resume eval-every sample temperature json trace svg curves machine dry-run proof-only no-check verbose",
     "other programs of this book have it"},
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
    for (size_t i = 0; i < sizeof book_flags / sizeof *book_flags; i++)
        if (*name && !strchr(name, ' ') && word_among(book_flags[i].names, name))
            fatal("--%s is not one of %s's flags (%s); --help lists them", name, base_program(),
                  book_flags[i].where);
    const char *nearest = "help";
    int least = edit_distance(name, nearest);
    for (int i = 0; i < count; i++) {
        if (table[i].type == OPTION_HEADING) continue;
        int distance = edit_distance(name, table[i].name);
        if (distance < least) least = distance, nearest = table[i].name;
    }
    if (least <= 1 + (int)strlen(nearest) / 3)
        fatal("--%s is not one of %s's flags (is --%s meant?); --help lists them", name, base_program(),
              nearest);
    fatal("--%s is not one of %s's flags; --help lists them", name, base_program());
}

enum { PLAIN_LIMIT = 10000 };  // bounds beyond it only guard against overflow: not in --help

// "from 1 to 64", "at least 1", or "" where the bounds say nothing. Static buffer.
static const char *bounds_text(const Option *option, double limit) {
    static char text[96];
    bool low = option->min >= -limit, high = option->max <= limit;
    int digits = option->type == OPTION_INT ? 19 : 10;  // 1e+12 would not be read as a whole number
    if (low && high)
        snprintf(text, sizeof text, "from %.*g to %.*g", digits, option->min, digits, option->max);
    if (low && !high) snprintf(text, sizeof text, "at least %.*g", digits, option->min);
    if (!low && high) snprintf(text, sizeof text, "at most %.*g", digits, option->max);
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
        case OPTION_OUTPUT:
            CHECK(*value, "--%s needs a value: %s", option->name, option->detail);
            *(const char **)option->target = value;
            break;
        case OPTION_CHOICE:
            *(int *)option->target = choice_index(option, value);
            break;
        case OPTION_FLAG:
            *(bool *)option->target = strcmp(value, "1") == 0;
            break;
        case OPTION_HEADING:
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

// Prints text in the columns from `left` to HELP_WIDTH, broken at blanks; the cursor is at `column`.
static void print_wrapped(const char *text, int left, int column) {
    if (column + 2 > left) column = HELP_WIDTH;  // what is there is too long: begin on a new line
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
    print_wrapped("print this help and exit", LEFT, printf("  --help"));
    for (int i = 0; i < count; i++) {
        const Option *option = &table[i];
        if (option->type == OPTION_HEADING) {
            printf("\n%s\n", option->name);
            continue;
        }
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
    if (purpose[first]) printf("\nexamples:%s\n", purpose + first);
    printf(
        "\nexit status: 0 all checks passed, 1 a check failed, 2 wrong use, 3 rounding is too coarse to "
        "prove anything\n");
}

static void check_table(const Option *table, int count) {
    for (int i = 0; i < count; i++) {
        bool number = table[i].type == OPTION_INT || table[i].type == OPTION_REAL;
        if (table[i].type == OPTION_HEADING) continue;
        CHECK(strlen(table[i].name) <= LONGEST_NAME, "option table: --%s is too long", table[i].name);
        CHECK(!number || table[i].min < table[i].max, "option table: --%s has no bounds", table[i].name);
        for (int j = 0; j < i; j++)
            CHECK(strcmp(table[i].name, table[j].name), "option table: --%s stands twice", table[i].name);
    }
}

static bool same_inode(const char *a, const char *b) {
    struct stat one, other;
    return stat(a, &one) == 0 && stat(b, &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

// Whether both paths lead to the same file, or would if it existed.
static bool same_file(const char *a, const char *b) {
    if (!strcmp(a, b) || same_inode(a, b)) return true;
    char *folder = format_text("%s", a), *other = format_text("%s", b);
    bool same = !strcmp(basename(folder), basename(other)) && same_inode(dirname(folder), dirname(other));
    free(folder), free(other);
    return same;
}

void options_parse(int argc, char **argv, const char *purpose, Option *table, int count) {
    check_table(table, count);
    for (int i = 0; i < count; i++) {
        table[i].given = false;
        if (table[i].standard) set_value(&table[i], table[i].standard);
        else if (table[i].type == OPTION_FLAG) *(bool *)table[i].target = false;
    }
    // --help takes precedence over mistakes after it and over missing flags; mistakes before it come first.
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            if (base_rank() == 0) print_help(purpose, table, count);
            exit(STATUS_PASS);
        }
        CHECK(strncmp(argv[i], "--", 2) == 0,
              "\"%s\" is not a flag: flags begin with --; --help lists them", argv[i]);
        const char *name = argv[i] + 2, *value = strchr(name, '=');
        size_t length = value ? (size_t)(value - name) : strlen(name);
        Option *option = NULL;
        for (int j = 0; j < count && !option; j++)
            if (table[j].type != OPTION_HEADING && strlen(table[j].name) == length &&
                strncmp(table[j].name, name, length) == 0)
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
            // A flag in place of the value means that the value was forgotten; it is not taken as a text.
            CHECK(i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0, "--%s needs a value: %s",
                  option->name, value_hint(option));
            set_value(option, argv[++i]);
        }
    }
    // Last, when everything else is known to be right, but still before the run.
    const char *text = getenv("ULTRASCALE_DATA");
    for (int i = 0; i < count; i++) {
        if (table[i].type != OPTION_OUTPUT || !table[i].given) continue;
        const char *path = *(const char **)table[i].target;
        CHECK(!text || !same_file(path, text), "--%s would overwrite %s, which ULTRASCALE_DATA names",
              table[i].name, path);
        CHECK(!same_file(path, "/proc/self/exe"), "--%s would overwrite this program, %s", table[i].name,
              path);
        for (int j = 0; j < count && strncmp(path, "/dev/", 5); j++) {
            const bool reads = table[j].type == OPTION_TEXT && !strncmp(table[j].detail, "FILE", 4);
            const bool writes = table[j].type == OPTION_OUTPUT && table[j].given && j < i;
            const char *other = reads || writes ? *(const char **)table[j].target : NULL;
            CHECK(!other || !writes || !same_file(path, other),
                  "--%s and --%s would write the same file, %s: give each its own", table[j].name,
                  table[i].name, path);
            CHECK(!other || !reads || !same_file(path, other), "--%s would overwrite %s, which --%s reads",
                  table[i].name, path, table[j].name);
        }
        char *flag = format_text("--%s", table[i].name);
        output_check(flag, path);
        free(flag);
    }
}

const char *option_typed(int argc, char **argv, const char *flag) {
    size_t length = strlen(flag);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], flag, length) && argv[i][length] == '=') return argv[i] + length + 1;
        if (!strcmp(argv[i], flag))
            return i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0 ? argv[i + 1] : "";
    }
    return NULL;
}

const char *option_given(const Option *table, int count, const char *names) {
    for (int i = 0; i < count; i++)
        if (table[i].given && word_among(names, table[i].name)) return table[i].name;
    return NULL;
}

void options_need(const Option *table, int count, const char *names, const char *reader) {
    const char *name = option_given(table, count, names);
    CHECK(!name, "--%s has an effect only with %s: add that, or leave out --%s", name, reader, name);
}
