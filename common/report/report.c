// report.c: see report.h. Every check goes through `judge`, which remembers the first that failed; only it
// determines the verdict and the exit status.
#include "report.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "comm/comm.h"
#include "diagnosis.h"
#include "difference.h"
#include "files.h"
#include "quantity.h"

// Beyond this bound a factor of two would pass, so it proves nothing.
static const double WEAKEST_BOUND = 0.5;

enum { SENTENCE = 600 };
static struct {
    int failures, checks, equalities, equal;
    char first_failure[SENTENCE];
    bool quiet;                 // rows that hold are not shown
    char coarse[400];           // why nothing was proven; "": it was
    bool compared[3];           // by ProofClass
    bool differs;               // a comparison that should be exact is not
    double worst[3], bound[3];  // relative, of the comparison nearest to its bound
    char note[100];             // of report_note
    int64_t choices, ties;      // Routing's, of all comparisons
    const char *file_name;      // --json
    bool stepped;               // report_step
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

// cJSON prints 15 digits if it finds them close enough; we want the exact number. A number that is not
// finite becomes null: JSON cannot represent it.
static cJSON *json_number(double value) {
    if (!isfinite(value)) return cJSON_CreateNull();
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

// ---- comparison of runs ----

static bool worse(double error, double than) { return isnan(error) || error > than; }

// One row: a quantity is represented by its worst tensor.
typedef struct Row {
    char title[64], fault[200];  // "30 gradients"; why nothing could be compared, or ""
    const char *name, *tensor;   // "gradients"; "": there is one array alone
    Difference worst;
    int64_t differing;  // elements whose bits differ
    int failing, alike,
        tensors;  // tensors that fail, and those of them that are off by the worst one's factor
    bool holds;
} Row;

// A tensor below noise has no direction, so its scale is not checked.
static bool tensor_holds(const Difference *d, int64_t bits, bool noise, ProofClass proof, double bound) {
    if (proof == PROOF_EXACT) return bits == 0;
    return d->relative <= bound && (noise || fabs(d->scale - 1) <= bound / 2);
}

static void put_difference(cJSON *object, const Difference *d) {
    put_number(object, "relative", d->relative);
    put_number(object, "maximum", d->maximum);
    put_number(object, "scale", d->scale);
}

// The verdict shows the comparison that comes nearest to its bound; of equally near ones the last.
static void note_nearest(ProofClass proof, double error, double bound) {
    if (isnan(report.worst[proof]) || error / bound < report.worst[proof] / report.bound[proof]) return;
    report.worst[proof] = error;
    report.bound[proof] = bound;
}

static Row compare_quantity(Quantity x, Quantity y, double least, const Record *baseline, ProofClass proof,
                            double bound, cJSON *json) {
    Row row = {.name = y.name, .tensor = "", .worst = {"", -1, 0, 1}, .tensors = y.tensors};
    snprintf(row.title, sizeof row.title, "%lld %s", (long long)(y.tensors > 1 ? y.tensors : y.count[0]),
             y.name);
    if (!quantities_pair(&x, &y, row.fault)) return row;
    if (quantity_is_zero(&y)) {
        snprintf(row.fault, sizeof row.fault, "all of %s's are zero, so nothing was compared",
                 baseline->title);
        return row;
    }
    double *factor = host_alloc(sizeof(double) * (size_t)y.tensors);
    row.holds = true;
    for (int i = 0; i < y.tensors; i++) {
        int j = quantity_partner(&x, &y, i, row.fault);
        Difference d = difference_above(y.tensor[i], x.values[j], y.values[i], y.count[i], least);
        int64_t bits = differing_elements(x.values[j], y.values[i], y.count[i]);
        bool holds =
            tensor_holds(&d, bits, difference_norm(y.values[i], y.count[i]) <= least, proof, bound);
        // The row shows one tensor: one that fails rather than one that holds, then the larger error.
        if (row.holds == holds ? worse(d.relative, row.worst.relative) : row.holds) row.worst = d;
        row.holds = row.holds && holds;
        row.differing += bits;
        factor[i] = holds ? NAN : d.scale;
        row.failing += !holds;
        put_difference(json_child(json_child(json, y.name, false), d.what, false), &d);
    }
    for (int i = 0; i < y.tensors; i++)
        row.alike += fabs(factor[i] - row.worst.scale) <= 1e-2 * fabs(row.worst.scale);
    free(factor);
    if (y.tensors > 1) row.tensor = row.worst.what;
    note_nearest(proof, row.worst.relative, bound);
    return row;
}

static void print_row(const Row *row) {
    if (*row->fault) {
        say("  %-18s  %s  FAIL", row->title, row->fault);
        return;
    }
    const Difference *d = &row->worst;
    say("  %-18s  %9.2e  %9.2e  %13.10f  %-4s  %s", row->title, d->relative, d->maximum, d->scale,
        row->holds ? "ok" : "FAIL", row->holds && d->relative == 0 ? "" : row->tensor);
}

// The gradients of routers: judged together with all others, by the same measure of noise, but shown in a
// row of their own, as their error has other causes. If a token takes one expert, routers get no gradient.
static void print_apart(const Record *run, const Record *baseline, double least, ProofClass proof,
                        double bound, cJSON *json) {
    Record own = record_apart(run), other = record_apart(baseline);
    Quantity x = quantity_of(&own, GRADIENTS), y = quantity_of(&other, GRADIENTS);
    x.name = y.name = "router gradients";
    if (y.tensors && !quantity_is_zero(&y)) {
        Row row = compare_quantity(x, y, least, baseline, proof, bound, json);
        print_row(&row);
    }
    Record *const both[] = {&own, &other};
    for (int i = 0; i < 2; i++) free(both[i]->name), free(both[i]->count), free(both[i]->grad);
}

// What a quantity that fails usually means, when those before it in the step are right.
static const char *meaning(const Row *row, const Record *run, const Record *baseline, bool first_loss) {
    static char text[400];
    const char *usually = "";
    if (row->name == quantity_of(baseline, GRADIENTS).name)
        usually = diagnose_gradient(row->worst.scale, row->worst.relative);
    else if (row->name == quantity_of(baseline, LOSSES).name)
        usually = first_loss
                      ? diagnose_loss(run->loss[0], baseline->loss[0])
                      : "the first step's gradients are right: usually what the optimizer leaves behind";
    else if (row->name == quantity_of(baseline, PARAMETERS).name)
        usually =
            "the first step's gradients are right: usually the optimizer's step, or weights that did "
            "not come back";
    else usually = "the gradients are right: usually a norm that counts a shard twice, or not at all";
    int used = 0;
    text[0] = 0;
    if (row->tensors > 1 && row->failing)
        used = snprintf(text, sizeof text, "; %d of %d fail%s", row->failing, row->tensors,
                        row->alike == row->failing && row->failing > 1 ? ", all by this factor" : "");
    if (*usually) snprintf(text + used, sizeof text - (size_t)used, ": %s", usually);
    return text;
}

static void judge_row(const Row *row, const Record *run, const Record *baseline, ProofClass proof,
                      double bound, bool first_loss) {
    const char *comma = *row->tensor ? ", " : "";
    const Difference *d = &row->worst;
    if (*row->fault) judge(false, "%s of %s: %s", row->name, run->title, row->fault);
    else if (row->holds) judge(true, " ");
    else if (proof == PROOF_EXACT)
        judge(false, "%s of %s%s%s: %lld elements differ from %s in all (relative %.2e, scale %.6g)%s",
              row->name, run->title, comma, row->tensor, (long long)row->differing, baseline->title,
              d->relative, d->scale, meaning(row, run, baseline, first_loss));
    else
        judge(false, "%s of %s%s%s: off from %s by %.2e relative (bound %.2e), scale %.6g%s", row->name,
              run->title, comma, row->tensor, baseline->title, d->relative, bound, d->scale,
              meaning(row, run, baseline, first_loss));
}

// Once: every later comparison of this program has the same dtype and size.
static void note_coarse(double bound) {
    if (*report.coarse) return;
    snprintf(report.coarse, sizeof report.coarse,
             "this dtype is too coarse for this size: its own error makes a bound of %.2e, which lets a "
             "factor of two pass; a larger model or a wider --dtype can be judged",
             bound);
    say("  %s", report.coarse);
}

// Where a baseline that follows the run would have taken other experts, no more than rounding may be why.
static bool judge_ties(const Record *run, const Record *baseline, double bound, cJSON *json) {
    const Routing *r = &baseline->routing;
    bool near = r->ties == 0 || r->apart <= bound;
    if (r->choices == 0) return true;
    report.choices += r->choices, report.ties += r->ties;
    put_number(json, "choices of experts", (double)r->choices);
    put_number(json, "near ties", (double)r->ties);
    put_number(json, "scores apart at near ties", r->apart);
    if (!near || (r->ties && !report.quiet))
        say("  %lld of %lld choices of experts: %s would take others, by scores %.2e apart  %s",
            (long long)r->ties, (long long)r->choices, baseline->title, r->apart, near ? "ok" : "FAIL");
    return judge(near,
                 "experts of %s: scores are off from %s by %.2e relative (bound %.2e) where tokens take "
                 "other experts, %lld of %lld choices: no near ties that rounding decides",
                 run->title, baseline->title, r->apart, bound, (long long)r->ties, (long long)r->choices);
}

bool report_compare(const Record *run, const Record *baseline, ProofClass proof, Bound bound) {
    char rule[80] = "no bit may differ";
    if (proof == PROOF_EXACT) bound = bound_of(0);
    else if (bound.gradients == bound.others)
        snprintf(rule, sizeof rule, "within %.2e relative", bound.others);
    else
        snprintf(rule, sizeof rule, "within %.2e relative, gradients within %.2e", bound.others,
                 bound.gradients);
    const double most = fmax(bound.gradients, bound.others);
    double allowed[QUANTITIES];
    for (int i = 0; i < QUANTITIES; i++) allowed[i] = i == GRADIENTS ? bound.gradients : bound.others;
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "run", run->title);
    cJSON_AddStringToObject(json, "baseline", baseline->title);
    cJSON_AddStringToObject(json, "class", class_name(proof));
    put_number(json, "bound", bound.others);
    put_number(json, "bound of gradients", bound.gradients);
    report.compared[proof] = true;
    bool all = judge(isfinite(most), "%s: a bound of %g lets everything pass", run->title, most);
    Row row[QUANTITIES];
    double least = 0;
    for (int i = 0; i < QUANTITIES; i++) {
        Quantity y = quantity_of(baseline, i);
        double floor = REPORT_NOISE * quantity_largest(&y);
        if (i == GRADIENTS) least = floor;
        row[i] = compare_quantity(quantity_of(run, i), y, floor, baseline, proof, allowed[i], json);
        all = all && row[i].holds;
    }
    if (proof == PROOF_EXACT && !all) report.differs = true;
    if (!all || !report.quiet) {
        say("%s against %s: %s, %s", run->title, baseline->title, class_name(proof), rule);
        say("  %-18s  %9s  %9s  %13s        worst tensor", "", "relative", "maximum", "scale");
        for (int i = 0; i < QUANTITIES; i++) {
            print_row(&row[i]);
            if (i == GRADIENTS) print_apart(run, baseline, least, proof, bound.gradients, json);
        }
    }
    if (isfinite(most) && most >= WEAKEST_BOUND) note_coarse(most);
    // In the order in which a step computes them, since the first fault is the cause: the first loss, the
    // first step's gradients, their norm, the later losses, the final parameters.
    double first = baseline->steps > 0 ? run->loss[0] / baseline->loss[0] : 1;
    bool first_loss = *row[LOSSES].fault || !(fabs(first - 1) <= bound.others);
    const int early[] = {LOSSES, GRADIENTS, GRADIENT_NORMS, PARAMETERS},
              late[] = {GRADIENTS, GRADIENT_NORMS, LOSSES, PARAMETERS};
    for (int i = 0; i < QUANTITIES; i++) {
        int which = first_loss ? early[i] : late[i];
        judge_row(&row[which], run, baseline, proof, allowed[which], first_loss);
    }
    all = judge_ties(run, baseline, bound.others, json) && all;
    cJSON_AddBoolToObject(json, "holds", all);
    cJSON_AddItemToArray(json_child(json_root(), "comparisons", true), json);
    return all;
}

Bound report_bound(const Record *baseline, const Record *reference, double usual) {
    const double f64_bound = 1e-10, k = 4;
    if (!reference) return bound_of(f64_bound);
    // Two runs in this dtype may differ by twice the error of one; k = 4 doubles that as a margin.
    double worst = usual, gradients = 0;
    for (int which = 0; which < QUANTITIES; which++) {
        Quantity x = quantity_of(baseline, which), y = quantity_of(reference, which);
        char fault[200];
        if (!quantities_pair(&x, &y, fault)) return bound_of(NAN);  // which no comparison passes
        double least = REPORT_NOISE * quantity_largest(&y);
        for (int i = 0; i < y.tensors; i++) {
            int j = quantity_find(&x, y.tensor[i]);
            Difference d = difference_above("", x.values[j], y.values[i], y.count[i], least);
            if (worse(d.relative, worst)) worst = d.relative;
            if (which == GRADIENTS && worse(d.relative, gradients)) gradients = d.relative;
        }
    }
    return (Bound){worse(k * gradients, f64_bound) ? k * gradients : f64_bound,
                   worse(k * worst, f64_bound) ? k * worst : f64_bound};
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
    cJSON_AddItemToArray(json_child(json_root(), "counts", true), json);
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
    cJSON_AddItemToArray(json_child(json_root(), "conditions", true), json);
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

int report_verdict(const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
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
