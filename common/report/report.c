// report.c: see report.h. Every check goes through `judge`, which remembers the first that failed; only it
// determines the verdict and the exit status.
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "comm/comm.h"
#include "diagnosis.h"
#include "files.h"
#include "report_inside.h"

struct Report report;

const char *class_name(ProofClass proof) {
    return (const char *[]){"exact", "reassociated", "rounded"}[proof];
}

bool judge(bool holds, const char *format, ...) {
    report.checks++;
    if (holds) return true;
    if (!report.failures++) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(report.first_failure, sizeof report.first_failure, format, arguments);
        va_end(arguments);
    }
    return false;
}

// ---- JSON ----

// cJSON prints 15 digits if it finds them close enough; we want the exact number. A number that is not
// finite becomes null: JSON cannot represent it.
static cJSON *json_number(double value) {
    if (!isfinite(value)) return cJSON_CreateNull();
    char text[32];
    snprintf(text, sizeof text, "%.17g", value);
    return cJSON_CreateRaw(text);
}

void put_number(cJSON *object, const char *name, double value) {
    cJSON_AddItemToObject(object, name, json_number(value));
}

// The object or array `name` of `parent`, made at first use.
cJSON *json_child(cJSON *parent, const char *name, bool array) {
    cJSON *child = cJSON_GetObjectItemCaseSensitive(parent, name);
    if (!child) {
        child = array ? cJSON_CreateArray() : cJSON_CreateObject();
        cJSON_AddItemToObject(parent, name, child);
    }
    return child;
}

cJSON *json_root(void) {
    if (!report.json) report.json = cJSON_CreateObject();
    return report.json;
}

// Adds to a list of the report, if there is to be one: a program that proves thousands of layouts in one run
// would hold more of their rows than of anything else.
void json_keep(const char *list, cJSON *row) {
    if (report.file_name) cJSON_AddItemToArray(json_child(json_root(), list, true), row);
    else cJSON_Delete(row);
}

// Once: where this fails, the sentence that says so is not written there either.
static void write_json(void) {
    const char *file = report.file_name;
    report.file_name = NULL;
    char *json = cJSON_Print(json_root());
    CHECK(json, "out of host memory for --json %s", file);
    make_utf8(json);
    FILE *out = output_open("--json", file);
    fprintf(out, "%s\n", json);
    output_close(out, "--json", file);
    free(json);
}

static void put_verdict(const char *status, const char *reason, const char *evidence) {
    cJSON *verdict = json_child(json_root(), "verdict", false);
    cJSON_AddStringToObject(verdict, "program", base_program());
    cJSON *arguments = cJSON_AddArrayToObject(verdict, "arguments");
    for (char **a = base_arguments(); *a; a++) cJSON_AddItemToArray(arguments, cJSON_CreateString(*a));
    cJSON_AddStringToObject(verdict, "status", status);
    cJSON_AddStringToObject(verdict, "text", reason);
    cJSON_AddStringToObject(verdict, "class", evidence);
    put_number(verdict, "checks", report.checks);
    put_number(verdict, "failures", report.failures);
}

// A run that breaks has no verdict: the report has what was found until then, and why it ended. The rank
// that prints the sentence writes it; all ranks make the same checks. Before its first step a run leaves an
// earlier report alone: a mistyped flag must not cost it.
static void write_ended(const char *sentence) {
    struct stat earlier;
    if (!report.file_name) return;
    if (!report.stepped && !report.json && stat(report.file_name, &earlier) == 0 && earlier.st_size > 0)
        return;
    put_verdict("ENDED", sentence, report_evidence());
    write_json();
}

void report_json(const char *file) {
    if (!file) return;
    output_check("--json", file);  // before the run, and not after it
    report.file_name = file;
    base_at_fatal(write_ended);
}

void report_step(void) { report.stepped = true; }

void report_number(const char *group, const char *name, double value, const char *unit) {
    if (!report.file_name) return;
    cJSON *numbers = json_child(json_child(json_root(), "numbers", false), group, false);
    cJSON *number = cJSON_CreateObject();
    put_number(number, "value", value);
    cJSON_AddStringToObject(number, "unit", unit);
    cJSON_DeleteItemFromObjectCaseSensitive(numbers, name);  // a later figure takes its place
    cJSON_AddItemToObject(numbers, name, number);
}

void report_series(const char *name, const double *values, int64_t count) {
    if (!report.file_name) return;
    cJSON *series = json_child(json_root(), "series", false), *array = cJSON_CreateArray();
    for (int64_t i = 0; i < count; i++) cJSON_AddItemToArray(array, json_number(values[i]));
    cJSON_DeleteItemFromObjectCaseSensitive(series, name);
    cJSON_AddItemToObject(series, name, array);
}

// ---- counts, conditions, the verdict ----

static bool same_count(double predicted, double measured) {
    double largest = fmax(fabs(predicted), fabs(measured)), rounding = 1e-12 * largest;
    if (fmin(fabs(predicted), fabs(measured)) < 0x1p53) rounding = fmin(rounding, 0.25);
    return predicted == measured || fabs(predicted - measured) < rounding;
}

bool report_equal(const char *what, double predicted, double measured, const char *unit) {
    bool equal = same_count(predicted, measured);
    if (!equal || !report.quiet)
        say("  %-32s  predicted %18.15g  measured %18.15g %-4s %s", what, predicted, measured, unit,
            equal ? "equal" : "FAIL");
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "what", what);
    put_number(json, "predicted", predicted);
    put_number(json, "measured", measured);
    cJSON_AddStringToObject(json, "unit", unit);
    cJSON_AddBoolToObject(json, "equal", equal);
    json_keep("counts", json);
    report.equalities++;
    report.equal += equal;
    const char *usually = equal ? "" : diagnose_count(measured, predicted, unit);
    return judge(equal, "%s: predicted %.15g%s%s, measured %.15g, off by %.15g%s%s", what, predicted,
                 *unit ? " " : "", unit, measured, measured - predicted, *usually ? ": " : "", usually);
}

bool report_that(bool condition, const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!condition) say("  FAIL: %s", text);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "otherwise", text);
    cJSON_AddBoolToObject(json, "holds", condition);
    json_keep("conditions", json);
    return judge(condition, "%s", text);
}

bool report_quiet(bool quiet) {
    bool before = report.quiet;
    report.quiet = quiet;
    return before;
}

bool report_holds(void) { return report.failures == 0; }

// "exact, 0 bits differ; 5 of 5 counts as predicted"
const char *report_evidence(void) {
    static char text[SENTENCE];
    size_t used = 0, size = sizeof text;
    text[0] = 0;
    for (int proof = 0; proof < 3; proof++) {
        if (!report.compared[proof]) continue;
        if (proof == PROOF_EXACT)
            used += (size_t)snprintf(text + used, size - used, "%s",
                                     report.differs ? "not exact" : "exact, 0 bits differ");
        else
            used +=
                (size_t)snprintf(text + used, size - used, "%s%s, %.1e of %.1e", used ? "; " : "",
                                 class_name((ProofClass)proof), report.worst[proof], report.bound[proof]);
    }
    if (report.ties)
        used += (size_t)snprintf(text + used, size - used,
                                 "%s%lld of %lld choices of experts were near ties, decided as in the run",
                                 used ? "; " : "", (long long)report.ties, (long long)report.choices);
    if (report.equalities)
        snprintf(text + used, size - used, "%s%d of %d counts as predicted", used ? "; " : "", report.equal,
                 report.equalities);
    if (!report.checks) snprintf(text, size, "nothing was checked");
    return text;
}

// The sentence of the first rank on which a check failed, for rank 0 to say.
static void fetch_failure(bool mine) {
    Group world = comm_world();
    int first = (int)-comm_max(mine ? -world.size : -world.rank, world);
    double letters[SENTENCE] = {0};
    for (int i = 0; i < SENTENCE && world.rank == first; i++) letters[i] = report.first_failure[i];
    comm_sum_all(letters, SENTENCE, world);
    if (first > 0 && mine) snprintf(report.first_failure, SENTENCE, "rank %d: ", first);
    size_t used = first > 0 && mine ? strlen(report.first_failure) : 0;
    for (size_t i = 0; mine && used + i + 1 < SENTENCE; i++)
        report.first_failure[used + i] = (char)letters[i];
    report.first_failure[SENTENCE - 1] = 0;
}

void report_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(report.note, sizeof report.note, format, arguments);
    va_end(arguments);
}

void report_split(int ranks, const char *axis) {
    snprintf(report.alone, sizeof report.alone, "%s%s%s splits nothing, and results are as on one device",
             axis ? "--" : "1 rank", axis ? axis : "", axis ? " 1" : "");
    if (ranks > 1) report.alone[0] = 0;
}

int report_verdict(const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (*report.alone) length = snprintf(text, sizeof text, "%s", report.alone);
    if (*report.note && length < (int)sizeof text)
        snprintf(text + length, sizeof text - (size_t)length, "; %s", report.note);
    // Every rank judges what it has; the verdict is the same on all.
    bool mine = report.failures == 0, pass = comm_max(!mine, comm_world()) == 0;
    if (!pass) fetch_failure(mine);
    bool coarse = pass && comm_max(*report.coarse != 0, comm_world()) > 0;
    const char *status = !pass ? "FAIL" : coarse ? "UNPROVEN" : "PASS";
    const char *reason = !pass ? report.first_failure : coarse ? report.coarse : text;
    const char *evidence = report_evidence();
    put_verdict(status, reason, evidence);
    if (report.file_name && base_rank() == 0) write_json();
    const char *shown = colored(status, pass && !coarse ? COLOR_GREEN : pass ? COLOR_YELLOW : COLOR_RED);
    if (pass && !coarse)
        say("%s %s: %s%s%s%s", shown, base_program(), text, evidence[0] ? " (" : "", evidence,
            evidence[0] ? ")" : "");
    else say("%s %s: %s", shown, base_program(), reason);
    cJSON_Delete(report.json);
    bool quiet = report.quiet;
    memset(&report, 0, sizeof report);
    report.quiet = quiet;
    return !pass ? STATUS_FAIL : coarse ? STATUS_UNPROVEN : STATUS_PASS;
}
