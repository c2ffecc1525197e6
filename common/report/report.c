// report.c: see report.h. Every check goes through `judge`, which remembers the first that failed; the
// verdict and the exit status come from there and from nowhere else.
#include "report.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "files.h"

// A gradient whose baseline is smaller than this part of the largest one is noise of the sums that made the
// others: its error is measured against that floor, and never skipped.
static const double NOISE = 1e-6;
// Beyond this bound a factor of two would pass, so it proves nothing.
static const double WEAKEST_BOUND = 0.5;

static struct {
    int failures, checks, equalities;
    char first_failure[400];
    char coarse[200];           // why nothing was proven; "": it was
    bool compared[3];           // by ProofClass
    double worst[3], bound[3];  // relative, of the comparison nearest to its bound
    char note[100];             // of report_note
    const char *file_name;      // --json
    cJSON *json;
} report;

static const char *class_name(ProofClass proof) {
    return (const char *[]){"exact", "reassociated", "rounded"}[proof];
}

static bool judge(bool holds, const char *format, ...) PRINTF_LIKE(2, 3);
static bool judge(bool holds, const char *format, ...) {
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

// cJSON prints 15 digits where it finds them near enough; we want the very number. JSON has no NaN or
// infinity: they become strings.
static cJSON *json_number(double value) {
    if (isnan(value)) return cJSON_CreateString("NaN");
    if (isinf(value)) return cJSON_CreateString(value > 0 ? "Infinity" : "-Infinity");
    char text[32];
    snprintf(text, sizeof text, "%.17g", value);
    return cJSON_CreateRaw(text);
}

static void put_number(cJSON *object, const char *name, double value) {
    cJSON_AddItemToObject(object, name, json_number(value));
}

// The object or array `name` of `parent`, made at first use.
static cJSON *json_child(cJSON *parent, const char *name, bool array) {
    cJSON *child = cJSON_GetObjectItemCaseSensitive(parent, name);
    if (!child) {
        child = array ? cJSON_CreateArray() : cJSON_CreateObject();
        cJSON_AddItemToObject(parent, name, child);
    }
    return child;
}

static cJSON *json_root(void) {
    if (!report.json) report.json = cJSON_CreateObject();
    return report.json;
}

void report_json(const char *file) {
    if (!file || base_rank() > 0) return;
    output_check("--json", file);  // before the run, and not after it
    report.file_name = file;
}

void report_number(const char *group, const char *name, double value, const char *unit) {
    cJSON *numbers = json_child(json_child(json_root(), "numbers", false), group, false);
    cJSON *number = cJSON_CreateObject();
    put_number(number, "value", value);
    cJSON_AddStringToObject(number, "unit", unit);
    cJSON_DeleteItemFromObjectCaseSensitive(numbers, name);  // a later figure takes its place
    cJSON_AddItemToObject(numbers, name, number);
}

void report_series(const char *name, const double *values, int64_t count) {
    cJSON *series = json_child(json_root(), "series", false), *array = cJSON_CreateArray();
    for (int64_t i = 0; i < count; i++) cJSON_AddItemToArray(array, json_number(values[i]));
    cJSON_DeleteItemFromObjectCaseSensitive(series, name);
    cJSON_AddItemToObject(series, name, array);
}

void report_text(const char *name, const char *value) {
    cJSON *texts = json_child(json_root(), "texts", false);
    cJSON_DeleteItemFromObjectCaseSensitive(texts, name);
    cJSON_AddStringToObject(texts, name, value);
}

// ---- records ----

Record record_new(const char *title, int64_t steps, const Params *params) {
    size_t n = (size_t)params->count;
    Record record = {.steps = steps, .tensors = params->count};
    snprintf(record.title, sizeof record.title, "%s", title);
    record.loss = host_alloc(sizeof(double) * (size_t)steps);
    record.grad_norm = host_alloc(sizeof(double) * (size_t)steps);
    record.name = host_alloc(sizeof(char *) * n);
    record.count = host_alloc(sizeof(int64_t) * n);
    record.grad = host_alloc(sizeof(double *) * n);
    record.param = host_alloc(sizeof(double *) * n);
    // A step that nobody filled in must not pass.
    for (int64_t i = 0; i < steps; i++) record.loss[i] = record.grad_norm[i] = NAN;
    for (size_t i = 0; i < n; i++) {
        record.name[i] = format_text("%s", params->param[i].name);
        record.count[i] = params->param[i].full[0] * params->param[i].full[1];
        record.grad[i] = record.param[i] = NULL;
    }
    return record;
}

// The whole parameter's values or gradient as f64. The caller frees them.
static double *whole_doubles(const Params *params, const Param *param, ParamTensor which) {
    DType dtype = which == PARAM_GRAD ? params->recipe.sum : params->recipe.weight;
    int64_t count = param->full[0] * param->full[1];
    double *doubles = host_alloc(count * sizeof *doubles);
    void *stored = host_alloc(count * dtype_size(dtype));
    param_gather(params, param, which, stored);
    dtype_convert(doubles, F64, stored, dtype, count);
    free(stored);
    return doubles;
}

void record_grads(Record *record, const Params *params, double factor) {
    for (int i = 0; i < params->count; i++) {
        free(record->grad[i]);
        record->grad[i] = whole_doubles(params, &params->param[i], PARAM_GRAD);
        for (int64_t j = 0; j < record->count[i]; j++) record->grad[i][j] *= factor;
    }
}

void record_params(Record *record, const Params *params) {
    for (int i = 0; i < params->count; i++) {
        free(record->param[i]);
        record->param[i] = whole_doubles(params, &params->param[i], PARAM_VALUE);
    }
}

void record_free(Record *record) {
    for (int i = 0; i < record->tensors; i++) {
        free(record->name[i]);
        free(record->grad[i]);
        free(record->param[i]);
    }
    free(record->loss);
    free(record->grad_norm);
    free(record->name);
    free(record->count);
    free(record->grad);
    free(record->param);
    *record = (Record){0};
}

// ---- differences ----

// Sums run over elements in order, in double: a record's own numbers are exact images of 64 bits or fewer.
static double norm(const double *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

// The difference, and the relative error against max(||y||, least).
static Difference difference_above(const char *what, const double *x, const double *y, int64_t count,
                                   double least) {
    double xy = 0, yy = 0, squares = 0, maximum = 0;
    for (int64_t i = 0; i < count; i++) {
        double delta = fabs(x[i] - y[i]);
        xy += x[i] * y[i];
        yy += y[i] * y[i];
        squares += delta * delta;
        if (!(delta <= maximum)) maximum = delta;  // a NaN stays: no later comparison with it holds …
        if (isnan(maximum)) break;                 // … so stop at it
    }
    if (isnan(maximum)) return (Difference){what, NAN, NAN, NAN};
    double against = sqrt(yy) > least ? sqrt(yy) : least;
    double relative = maximum == 0 ? 0 : sqrt(squares) / against;
    return (Difference){what, relative, maximum, maximum == 0 ? 1 : xy / yy};
}

Difference difference(const char *what, const double *x, const double *y, int64_t count) {
    return difference_above(what, x, y, count, 0);
}

// Elements whose bits differ; NaN differs from everything, itself too.
static int64_t differing_elements(const double *x, const double *y, int64_t count) {
    int64_t differing = 0;
    for (int64_t i = 0; i < count; i++)
        differing += isnan(x[i]) || isnan(y[i]) || memcmp(&x[i], &y[i], sizeof *x) != 0;
    return differing;
}

// ---- comparison of runs ----

// A quantity is one row: one array (losses), or one array for each parameter, found by name.
typedef struct Quantity {
    const char *name;
    int tensors;
    char *const *tensor;
    const int64_t *count;
    double *const *values;
} Quantity;

enum { QUANTITIES = 4 };
static Quantity record_quantity(const Record *r, int which) {
    static char *const loss[] = {"losses"}, *const grad_norm[] = {"gradient norms"};
    switch (which) {
        case 0:
            return (Quantity){"losses", 1, loss, &r->steps, &r->loss};
        case 1:
            return (Quantity){"gradient norms", 1, grad_norm, &r->steps, &r->grad_norm};
        case 2:
            return (Quantity){"gradients", r->tensors, r->name, r->count, r->grad};
        default:
            return (Quantity){"parameters", r->tensors, r->name, r->count, r->param};
    }
}

// What "noise" is measured by.
static double largest_norm(const Quantity *q) {
    double largest = 0;
    for (int i = 0; i < q->tensors; i++)
        if (q->values[i]) largest = fmax(largest, norm(q->values[i], q->count[i]));
    return largest;
}

static bool all_zero(const Quantity *q) {
    for (int i = 0; i < q->tensors; i++)
        for (int64_t j = 0; j < q->count[i]; j++)
            if (q->values[i][j] != 0) return false;  // a NaN is not zero
    return true;
}

static int find_tensor(const Quantity *q, const char *name) {
    for (int i = 0; i < q->tensors; i++)
        if (!strcmp(q->tensor[i], name)) return i;
    return -1;
}

// Index in x of y's tensor i, or -1 with the reason in `fault`.
static int partner(const Quantity *x, const Quantity *y, int i, char fault[static 200]) {
    const char *name = y->tensor[i];
    int j = find_tensor(x, name);
    if (j < 0) snprintf(fault, 200, "%s is missing", name);
    else if (x->count[j] != y->count[i])
        snprintf(fault, 200, "%s has %lld elements, not %lld", name, (long long)x->count[j],
                 (long long)y->count[i]);
    else if (!x->values[j] || !y->values[i]) snprintf(fault, 200, "%s was never recorded", name);
    else return j;
    return -1;
}

// Every tensor of both sides must have a partner.
static bool same_tensors(const Quantity *x, const Quantity *y, char fault[static 200]) {
    for (int i = 0; i < y->tensors; i++)
        if (partner(x, y, i, fault) < 0) return false;
    for (int j = 0; j < x->tensors; j++)
        if (find_tensor(y, x->tensor[j]) < 0) {
            snprintf(fault, 200, "%s is not in the baseline", x->tensor[j]);
            return false;
        }
    return true;
}

static bool worse(double error, double than) { return isnan(error) || error > than; }

static bool compare_quantity(const Record *run, const Record *baseline, int which, ProofClass proof,
                             double bound, cJSON *json) {
    Quantity x = record_quantity(run, which), y = record_quantity(baseline, which);
    char fault[200], title[64];
    snprintf(title, sizeof title, "%lld %s", (long long)(y.tensors > 1 ? y.tensors : y.count[0]), y.name);
    if (!same_tensors(&x, &y, fault)) {
        say("  %-18s  %s  FAIL", title, fault);
        return judge(false, "%s of %s: %s", y.name, run->title, fault);
    }
    double least = NOISE * largest_norm(&y);
    if (all_zero(&y)) {
        say("  %-18s  all are zero: nothing was compared  FAIL", title);
        return judge(false, "%s of %s: all of %s's are zero, so nothing was compared", y.name, run->title,
                     baseline->title);
    }
    Difference worst = {"", -1, 0, 1};
    int64_t differing = 0;
    bool all = true;
    for (int i = 0; i < y.tensors; i++) {
        int j = partner(&x, &y, i, fault);
        Difference d = difference_above(y.tensor[i], x.values[j], y.values[i], y.count[i], least);
        int64_t bits = differing_elements(x.values[j], y.values[i], y.count[i]);
        // What is below noise has no direction, so no scale is asked of it.
        bool noise = norm(y.values[i], y.count[i]) <= least;
        bool holds = d.relative <= bound && (noise || fabs(d.scale - 1) <= bound / 2);
        if (proof == PROOF_EXACT) holds = bits == 0;
        // The row shows one tensor: one that fails rather than one that holds, then the larger error.
        if (all == holds ? worse(d.relative, worst.relative) : all) worst = d;
        all = all && holds;
        differing += bits;
        cJSON *object = json_child(json_child(json, y.name, false), d.what, false);
        put_number(object, "relative", d.relative);
        put_number(object, "maximum", d.maximum);
        put_number(object, "scale", d.scale);
    }
    if (worse(worst.relative, report.worst[proof])) report.worst[proof] = worst.relative;
    const char *comma = y.tensors > 1 ? ", " : "", *tensor = y.tensors > 1 ? worst.what : "";
    say("  %-18s  %9.2e  %9.2e  %13.10f  %-4s  %s", title, worst.relative, worst.maximum, worst.scale,
        all ? "ok" : "FAIL", all && worst.relative == 0 ? "" : tensor);
    if (proof == PROOF_EXACT)
        return judge(all, "%s of %s%s%s: %lld elements differ from %s in all (relative %.2e, scale %.6g)",
                     y.name, run->title, comma, tensor, (long long)differing, baseline->title,
                     worst.relative, worst.scale);
    return judge(all, "%s of %s%s%s: off from %s by %.2e relative (bound %.2e), scale %.6g", y.name,
                 run->title, comma, tensor, baseline->title, worst.relative, bound, worst.scale);
}

// Once: every later comparison of this program has the same dtype and size.
static void note_coarse(double bound) {
    if (*report.coarse) return;
    snprintf(report.coarse, sizeof report.coarse,
             "this dtype is too coarse for this size: its own error makes a bound of %.2e, which lets a "
             "factor of "
             "two pass; a larger model or a wider --dtype can be judged",
             bound);
    say("  %s", report.coarse);
}

bool report_compare(const Record *run, const Record *baseline, ProofClass proof, double bound) {
    char rule[64] = "no bit may differ";
    if (proof == PROOF_EXACT) bound = 0;
    else snprintf(rule, sizeof rule, "within %.2e relative", bound);
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "run", run->title);
    cJSON_AddStringToObject(json, "baseline", baseline->title);
    cJSON_AddStringToObject(json, "class", class_name(proof));
    put_number(json, "bound", bound);
    report.compared[proof] = true;
    report.bound[proof] = fmax(report.bound[proof], bound);
    say("%s against %s: %s, %s", run->title, baseline->title, class_name(proof), rule);
    say("  %-18s  %9s  %9s  %13s        worst tensor", "", "relative", "maximum", "scale");
    bool all = judge(isfinite(bound), "%s: a bound of %g lets everything pass", run->title, bound);
    if (isfinite(bound) && bound >= WEAKEST_BOUND) note_coarse(bound);
    for (int which = 0; which < QUANTITIES; which++)
        all = compare_quantity(run, baseline, which, proof, bound, json) && all;
    cJSON_AddBoolToObject(json, "holds", all);
    cJSON_AddItemToArray(json_child(json_root(), "comparisons", true), json);
    return all;
}

double report_bound(const Record *baseline, const Record *reference) {
    const double f64_bound = 1e-10, k = 4;
    if (!reference) return f64_bound;
    // Two runs in this dtype may be off from each other by twice the error of one; k = 4 leaves as much
    // again.
    double worst = 0;
    for (int which = 0; which < QUANTITIES; which++) {
        Quantity x = record_quantity(baseline, which), y = record_quantity(reference, which);
        char fault[200];
        if (!same_tensors(&x, &y, fault)) return NAN;  // which no comparison passes
        double least = NOISE * largest_norm(&y);
        for (int i = 0; i < y.tensors; i++) {
            int j = find_tensor(&x, y.tensor[i]);
            Difference d = difference_above("", x.values[j], y.values[i], y.count[i], least);
            if (worse(d.relative, worst)) worst = d.relative;
        }
    }
    return worse(k * worst, f64_bound) ? k * worst : f64_bound;
}

// ---- counts, conditions, the verdict ----

static bool same_count(double predicted, double measured) {
    double largest = fmax(fabs(predicted), fabs(measured)), rounding = 1e-12 * largest;
    if (fmin(fabs(predicted), fabs(measured)) < 0x1p53) rounding = fmin(rounding, 0.25);
    return predicted == measured || fabs(predicted - measured) < rounding;
}

bool report_equal(const char *what, double predicted, double measured, const char *unit) {
    bool equal = same_count(predicted, measured);
    say("  %-32s  predicted %18.15g  measured %18.15g %-6s %s", what, predicted, measured, unit,
        equal ? "equal" : "FAIL");
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "what", what);
    put_number(json, "predicted", predicted);
    put_number(json, "measured", measured);
    cJSON_AddStringToObject(json, "unit", unit);
    cJSON_AddBoolToObject(json, "equal", equal);
    cJSON_AddItemToArray(json_child(json_root(), "counts", true), json);
    report.equalities++;
    return judge(equal, "%s: predicted %.15g %s, measured %.15g, off by %.15g", what, predicted, unit,
                 measured, measured - predicted);
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
    cJSON_AddItemToArray(json_child(json_root(), "conditions", true), json);
    return judge(condition, "%s", text);
}

// What was proven, and how tightly: "exact, 0 bits differ; 5 counts as predicted".
static void write_evidence(char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int proof = 0; proof < 3; proof++) {
        if (!report.compared[proof]) continue;
        if (proof == PROOF_EXACT)
            used += (size_t)snprintf(text + used, size - used, "%sexact, 0 bits differ", used ? "; " : "");
        else
            used +=
                (size_t)snprintf(text + used, size - used, "%s%s, %.1e of %.1e", used ? "; " : "",
                                 class_name((ProofClass)proof), report.worst[proof], report.bound[proof]);
    }
    if (report.equalities)
        used += (size_t)snprintf(text + used, size - used, "%s%d count%s as predicted", used ? "; " : "",
                                 report.equalities, report.equalities > 1 ? "s" : "");
    if (!report.checks) snprintf(text, size, "nothing was checked");
}

void report_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(report.note, sizeof report.note, format, arguments);
    va_end(arguments);
}

int report_verdict(const char *format, ...) {
    char text[400], evidence[400];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (*report.note && length < (int)sizeof text)
        snprintf(text + length, sizeof text - (size_t)length, "; %s", report.note);
    // Every rank judges what it holds; the verdict is the same on all.
    bool mine = report.failures == 0, pass = comm_max(!mine, comm_world()) == 0;
    if (!pass && mine)
        snprintf(report.first_failure, sizeof report.first_failure, "a check failed on another rank");
    if (!mine && base_rank() > 0)
        fprintf(stderr, "FAIL %s: rank %d: %s\n", base_program(), base_rank(), report.first_failure);
    bool coarse = pass && comm_max(*report.coarse != 0, comm_world()) > 0;
    const char *status = !pass ? "FAIL" : coarse ? "UNPROVEN" : "PASS";
    const char *reason = !pass ? report.first_failure : coarse ? report.coarse : text;
    write_evidence(evidence, sizeof evidence);
    cJSON *verdict = json_child(json_root(), "verdict", false);
    cJSON_AddStringToObject(verdict, "program", base_program());
    cJSON_AddStringToObject(verdict, "status", status);
    cJSON_AddStringToObject(verdict, "text", reason);
    cJSON_AddStringToObject(verdict, "class", evidence);
    put_number(verdict, "checks", report.checks);
    put_number(verdict, "failures", report.failures);
    if (report.file_name) {
        char *json = cJSON_Print(report.json);
        FILE *file = output_open("--json", report.file_name);
        fprintf(file, "%s\n", json);
        output_close(file, "--json", report.file_name);
        free(json);
    }
    if (pass && !coarse)
        say("PASS %s: %s%s%s%s", base_program(), text, evidence[0] ? " (" : "", evidence,
            evidence[0] ? ")" : "");
    else say("%s %s: %s", status, base_program(), reason);
    cJSON_Delete(report.json);
    memset(&report, 0, sizeof report);
    return !pass ? STATUS_FAIL : coarse ? STATUS_UNPROVEN : STATUS_PASS;
}
