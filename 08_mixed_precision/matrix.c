// matrix.c: every technique with every other: the composition matrix, executed. Playbook: "5D parallelism
// in a nutshell", "which ones should we use and efficiently combine together?"
//
// A cell is one combination of dp, pp, cp, tp, ep, ZeRO's stage, sequence parallelism, recomputation and
// precision (matrix_cells.c). It is either refused with a sentence that names the flags, or trained for two
// steps and compared: losses, raw gradients and parameters with one device's, within the bound of its
// precision; what ranks send and store with the sum of the records' closed forms; copies of a weight bit for
// bit. A flag that a layout ignored would show as a difference in one of these.
//
//     one start of N ranks   ->   all cells of N ranks, one after the other; each baseline once
//
// Without --part it takes only as many cells as it needs for every pair of choices to occur in one of them.
// --table keeps the results, cell by cell: an interrupted run continues after the last one, and a cell that
// ended the program has failed.
//
// Bytes sent and memory per rank: those of each cell.
// Run: build/08_mixed_precision/matrix       (--ranks 8, --part 3/20, --cell N, --list …)
// Last line: PASS matrix: … combinations on 4 ranks proven, … of 7200 refused …
#include "matrix.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef NO_MAIN

// ---- the baseline: a cell's model on one device, on rank 0 ----

enum { MOST_BASELINES = 256 };
typedef struct Baseline {
    Config config;
    Record record;
    Bound bound;
} Baseline;
static Baseline baseline[MOST_BASELINES];
static int baselines;

static bool same_run(const Config *a, const Config *b) {
    return a->layers == b->layers && a->kv_heads == b->kv_heads && a->seq == b->seq &&
           a->experts == b->experts && a->tied == b->tied && a->dtype == b->dtype &&
           a->grad_acc == b->grad_acc && config_number(a, "master") == config_number(b, "master") &&
           config_number(a, "fp8") == config_number(b, "fp8");
}

static const Baseline *baseline_of(const Config *config, Mesh mesh) {
    Config c = program_on_one_device(config, mesh);
    c.recompute = RECOMPUTE_NONE;
    for (int i = 0; i < baselines; i++)
        if (same_run(&baseline[i].config, &c)) return &baseline[i];
    CHECK(baselines < MOST_BASELINES, "more than %d baselines", MOST_BASELINES);
    Baseline *b = &baseline[baselines++];
    b->config = c;
    b->record = program_record(&c, mesh_single(), five_d_one_device(), false, false, "one device");
    b->bound = train_bound_with(&c, five_d_one_device(), false, &b->record);
    return b;
}

// ---- one cell ----

static void check(const void *context) {
    const Config *config = context;
    Config c = *config;
    layout_check(&c, (int)(c.dp * c.pp * c.cp * c.tp), five_d_layouts());
}

// All cells of one shape share the groups.
static Mesh mesh_of(const Config *config) {
    enum { SHAPES = 256 };
    static MeshShape shape[SHAPES];
    static Mesh mesh[SHAPES];
    static int shapes;
    MeshShape wanted = layout_shape(config);
    for (int i = 0; i < shapes; i++)
        if (!memcmp(&shape[i], &wanted, sizeof wanted)) return mesh[i];
    CHECK(shapes < SHAPES, "more than %d shapes of a mesh", SHAPES);
    shape[shapes] = wanted;
    return mesh[shapes++] = mesh_new(wanted);
}

// Whether it holds, the same on every rank.
static bool prove(const Cell *cell, bool verbose) {
    Config c = matrix_config(cell);
    c.verbose = verbose;
    Mesh mesh = mesh_of(&c);
    fatal_context("%s", matrix_text(cell));
    bool quiet = report_quiet(!verbose);
    Record run = program_record(&c, mesh, five_d_layouts(), false, true, "all ranks");
    comm_one_works(true);
    if (mesh.world.rank == 0) {
        const Baseline *one = baseline_of(&c, mesh);
        report_compare(&run, &one->record, train_proof(&c), one->bound);
    }
    comm_one_works(false);
    report_quiet(quiet);
    record_free(&run);
    fatal_context(NULL);
    return comm_max(!report_holds(), mesh.world) == 0;
}

// ---- the table ----

typedef struct Table {
    const char *path;
    int file;     // on rank 0; else -1
    off_t whole;  // bytes before the rows of the cell that is at work
    bool *done;   // (cells)
    int64_t proven, failed;
} Table;

// A cell whose rows do not fit writes none of them: a continued run begins with it.
static void table_row(const Table *t, const char *format, ...) PRINTF_LIKE(2, 3);
static void table_row(const Table *t, const char *format, ...) {
    char row[1024];
    va_list arguments;
    if (t->file < 0) return;
    va_start(arguments, format);
    int length = vsnprintf(row, sizeof row, format, arguments);
    va_end(arguments);
    CHECK(length < (int)sizeof row, "a row of --table has %d letters", length);
    ssize_t written = write(t->file, row, (size_t)length);
    if (written == length) return;
    const char *why = strerror(written < 0 ? errno : ENOSPC);
    bool cut = ftruncate(t->file, t->whole) == 0;
    fatal("--table %s could not be written: %s%s", t->path, why,
          cut ? "; what it says of earlier cells is whole" : "");
}

static void table_result(const Table *t, const Cell *cell, const char *what, const char *why) {
    table_row(t, "%lld %s %s%s\n", (long long)cell->number, what, matrix_text(cell), why);
}

// The results of earlier runs. A cell that ended two of them has failed; one in which a run was interrupted
// is begun again.
static Table table_open(const char *path, int64_t cells) {
    Table t = {.path = path, .file = -1, .done = calloc((size_t)cells, sizeof *t.done)};
    CHECK(t.done, "out of host memory for %lld cells", (long long)cells);
    if (!path) return t;
    struct stat status;
    CHECK(stat(path, &status) != 0 || S_ISREG(status.st_mode),
          "--table %s is not a regular file: a continued run must find its results there", path);
    FILE *old = fopen(path, "r");
    char line[1024] = "\n", what[16];
    int read = 0;
    int64_t begun = -1, fatal_cell = -1;
    for (long long number; old && fgets(line, sizeof line, old);) {
        if (sscanf(line, "%lld %15s%n", &number, what, &read) != 2 || number < 0 || number >= cells)
            continue;
        bool begins = !strcmp(what, "begun"), proven = !strcmp(what, "proven");
        if (!begins && !proven && strcmp(what, "failed") != 0) continue;  // cut off
        const Cell cell = matrix_cell(number);
        char *ends = format_text(" %s\n", matrix_text(&cell));
        CHECK(!proven || !strcmp(line + read, ends), "--table %s has results of other cells: %lld is %s",
              path, number, matrix_text(&cell));
        free(ends);
        if (begins && begun == number) fatal_cell = number;
        begun = begins ? number : -1;
        t.done[number] = t.done[number] || !begins;
        t.proven += proven;
        t.failed += !begins && !proven;
    }
    if (old) fclose(old);
    if (fatal_cell >= 0 && !t.done[fatal_cell]) t.done[fatal_cell] = true, t.failed++;
    else fatal_cell = -1;
    comm_wait(comm_barrier(comm_world()));  // all have read it
    if (base_rank() > 0) return t;
    t.file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    CHECK(t.file >= 0, "--table %s cannot be written: %s", path, strerror(errno));
    t.whole = lseek(t.file, 0, SEEK_END);
    if (!strchr(line, '\n')) table_row(&t, "\n");  // a killed run has truncated its last row
    if (fatal_cell < 0) return t;
    Cell cell = matrix_cell(fatal_cell);
    table_result(&t, &cell, "failed", ": it ends the program");
    return t;
}

static void table_close(Table *t) {
    CHECK(t->file < 0 || close(t->file) == 0, "--table %s could not be written whole: %s", t->path,
          strerror(errno));
    free(t->done);
}

// ---- all cells ----

typedef struct Refused {
    char sentence[400];
    int64_t cells;
} Refused;
enum { MOST_REFUSALS = 400 };

static void count_refusal(Refused *refused, int *count, const char *sentence) {
    int i = 0;
    while (i < *count && strcmp(refused[i].sentence, sentence) != 0) i++;
    if (i == MOST_REFUSALS) return;
    if (i == *count) {
        snprintf(refused[i].sentence, sizeof refused->sentence, "%s", sentence);
        refused[i].cells = 0;
        ++*count;
    }
    refused[i].cells++;
}

// The cells of this many ranks that are not refused; the caller frees them.
static CellList accepted_cells(int ranks, int64_t *all, Refused *refused, int *refusals) {
    CellList accepted = {host_alloc((size_t)matrix_cells() * sizeof(Cell)), 0};
    *all = *refusals = 0;
    for (int64_t number = 0; number < matrix_cells(); number++) {
        Cell here = matrix_cell(number);
        if (matrix_ranks(&here) != ranks) continue;
        ++*all;
        Config c = matrix_config(&here);
        const char *sentence = refusal(check, &c);
        if (sentence) count_refusal(refused, refusals, sentence);
        else accepted.cell[accepted.count++] = here;
    }
    return accepted;
}

// Every n-th of them, from the i-th on, for "i/n".
static int64_t part_of(CellList cells, const char *part) {
    int index, parts;
    char rest;
    CHECK(sscanf(part, "%d/%d%c", &index, &parts, &rest) == 2 && index >= 1 && index <= parts,
          "--part %s: which of how many, as in 3/20", part);
    int64_t count = 0;
    for (int64_t i = index - 1; i < cells.count; i += parts) cells.cell[count++] = cells.cell[i];
    return count;
}

// As few as cover all pairs that the cells of `met_on` ranks do not cover.
static int64_t pairwise(CellList cells, int met_on, uint64_t seed) {
    int64_t all;
    int refusals;
    Refused *refused = host_alloc(MOST_REFUSALS * sizeof *refused);
    CellList none = {NULL, 0}, elsewhere = accepted_cells(met_on, &all, refused, &refusals);
    elsewhere.count = matrix_pairwise(elsewhere, none, seed);
    int64_t chosen = matrix_pairwise(cells, elsewhere, seed);
    report_equal("pairs of choices that do not meet", 0,
                 (double)matrix_missing_pairs(cells, chosen, elsewhere), "");
    free(elsewhere.cell);
    free(refused);
    return chosen;
}

static void walk(const Cell *cell, int64_t cells, Table *table, bool verbose, const char *json) {
    for (int64_t i = 0; i < cells; i++) {
        if (table->done[cell[i].number]) continue;
        if (table->file >= 0) table->whole = lseek(table->file, 0, SEEK_END);
        table_row(table, "%lld begun\n", (long long)cell[i].number);
        progress_on_terminal(i + 1, cells, matrix_text(&cell[i]));
        if (verbose) say("%lld: %s", (long long)cell[i].number, matrix_text(&cell[i]));
        bool holds = prove(&cell[i], verbose);
        *(holds ? &table->proven : &table->failed) += 1;
        table_result(table, &cell[i], holds ? "proven" : "failed", "");
        if (holds) continue;
        say("cell %lld, %s:", (long long)cell[i].number, matrix_text(&cell[i]));
        report_verdict("a cell");  // prints its sentence; the next cell begins afresh
        report_json(json);
    }
}

static const char *const purpose =
    "The composition matrix: every combination of techniques, proven against one device or refused.";

// Nothing that was typed is ignored.
static void check_typed(const Option *option, int count) {
    const char *cell = option_given(option, count, "cell");
    const char *chosen = cell ? cell : option_given(option, count, "part"),
               *others = cell ? "part pairs-seed met-on" : "pairs-seed met-on";
    const char *unread = chosen ? option_given(option, count, others) : NULL;
    CHECK(!unread, "--%s says which cells, and nothing reads --%s then: leave out one of them", chosen,
          unread);
    unread = option_given(option, count, "list") ? option_given(option, count, "table verbose") : NULL;
    CHECK(!unread, "--list proves no cell, and --%s tells of those that are: leave out one of them",
          unread);
}

int main(int argc, char **argv) {
    const char *part = NULL, *path = NULL;
    int64_t one, seed, met_on;
    bool verbose, list;
    Option options[] = {
        {"part", OPTION_TEXT, &part, NULL, 0, 0, "3/20",
         "this part of all cells; without it, as few cells as it takes for all pairs of choices to occur",
         false},
        {"cell", OPTION_INT, &one, "-1", -1, 1e9, "", "run only this cell; -1: no single one", false},
        {"table", OPTION_TEXT, &path, NULL, 0, 0, "FILE",
         "file of results, cell by cell; a run continues after the cells that are in it", false},
        {"pairs-seed", OPTION_INT, &seed, "1", 0, 1e9, "", "seed of the choice of these few cells", false},
        {"met-on", OPTION_INT, &met_on, "0", 0, 64, "ranks",
         "leave out pairs of choices that occur in the cells of so many ranks; 0: leave out none", false},
        {"list", OPTION_FLAG, &list, NULL, 0, 0, "", "show which cells would be proven, and prove none",
         false},
        {"verbose", OPTION_FLAG, &verbose, NULL, 0, 0, "", "show every cell and its counts", false},
    };
    base_start(argc, argv);
    Config c = config_parse(argc, argv, purpose, CONFIG_RANKS | CONFIG_REPORT, NULL, options,
                            sizeof options / sizeof *options);
    check_typed(options, sizeof options / sizeof *options);
    comm_start(argc, argv, 4);
    CHECK(one < matrix_cells(), "--cell %lld: there are cells 0 to %lld", (long long)one,
          (long long)matrix_cells() - 1);
    report_json(c.json);
    double start = wall_seconds();
    int64_t all, chosen = 1;
    int refusals;
    Refused *refused = host_alloc(MOST_REFUSALS * sizeof *refused);
    CellList cells = accepted_cells(comm_ranks(), &all, refused, &refusals);
    Cell *cell = cells.cell;
    CHECK(all > 0, "no combination of dp, pp, cp and tp of 1 to 4 takes %d ranks: --ranks 4 would fit",
          comm_ranks());
    if (one >= 0) {
        cell[0] = matrix_cell(one);
        const int ranks = matrix_ranks(&cell[0]);
        CHECK(ranks == comm_ranks(), "--cell %lld is of %d rank%s, and there are %d: --ranks %d would fit",
              (long long)one, ranks, plural(ranks), comm_ranks(), ranks);
        Config config = matrix_config(&cell[0]);
        check(&config);
    } else if (part) chosen = part_of(cells, part);
    else chosen = pairwise(cells, (int)met_on, (uint64_t)seed);
    say("%lld combinations of %d rank%s", (long long)all, comm_ranks(), plural(comm_ranks()));
    for (int i = 0; i < refusals; i++)
        say("  %6lld refused: %s", (long long)refused[i].cells, refused[i].sentence);
    say("  %6lld are possible, of which %s: %lld", (long long)cells.count,
        list ? "would be proven" : "are proven now", (long long)chosen);
    for (int64_t i = 0; i < chosen && list; i++)
        say("%8lld  %s", (long long)cell[i].number, matrix_text(&cell[i]));
    if (list) chosen = 0;
    Table table = table_open(path, matrix_cells());
    walk(cell, chosen, &table, verbose, c.json);
    table_close(&table);
    report_number("matrix", "cells", (double)all, "");
    report_number("matrix", "proven", (double)table.proven, "");
    report_number("matrix", "refused", (double)(all - cells.count), "");
    say("%.1f s", wall_seconds() - start);
    report_that(table.failed == 0, "%lld cells fail", (long long)table.failed);
    int status = report_verdict("%lld combinations on %d rank%s proven, %lld of %lld refused",
                                (long long)table.proven, comm_ranks(), plural(comm_ranks()),
                                (long long)(all - cells.count), (long long)all);
    free(cell);
    free(refused);
    return comm_finish(status);
}
#endif
