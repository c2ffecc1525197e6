// report_compare.c: a run beside its baseline: losses, gradients and parameters, and choices of experts.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "diagnosis.h"
#include "quantity.h"
#include "report_inside.h"

// Beyond this bound a factor of two would pass, so it proves nothing.
static const double WEAKEST_BOUND = 0.5;

static bool worse(double error, double than) { return isnan(error) || error > than; }

// One row: a quantity is represented by its worst tensor.
typedef struct Row {
    const char *name, *tensor;  // "gradients"; "": there is one array alone
    char fault[200];            // why nothing could be compared, or ""
    int tensors;
    int64_t elements;  // of the last tensor
    Difference worst;
    double bound;        // by which the worst was judged
    double largest;      // norm of a baseline
    int64_t differing;   // elements whose bits differ
    int failing, alike;  // tensors that fail, and those of them that are off by the worst one's factor
    bool holds;
} Row;

static Row row_new(const char *name) {
    return (Row){.name = name, .tensor = "", .worst = {"", -1, 0, 1}, .holds = true};
}

// One tensor beside its baseline.
typedef struct Compared {
    Difference difference;
    int64_t elements, differing;
    double norm;  // of the baseline
    bool holds;
} Compared;

// The row shows one tensor: one that fails rather than one that holds, then the larger error.
static void row_add(Row *row, const Compared *c) {
    bool worst = row->holds == c->holds ? worse(c->difference.relative, row->worst.relative) : row->holds;
    if (worst) row->worst = c->difference;
    if (row->tensors++) row->tensor = row->worst.what;
    row->elements = c->elements;
    row->largest = fmax(row->largest, c->norm);
    row->differing += c->differing;
    row->failing += !c->holds;
    row->holds = row->holds && c->holds;
}

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

// Of a bound so weak, what follows step 1 is not judged, but for NaN: when rounding has grown to the size of
// the figures, a right run may be off by any factor.
static double judged_by(double bound) { return isfinite(bound) && bound >= WEAKEST_BOUND ? INFINITY : bound; }

// The gradients of routers are judged together with all others, by the same measure of noise, but also shown
// in a row of their own, *routers, as their error has other causes.
static Row compare_quantity(const Record *run, const Record *baseline, int which, ProofClass proof,
                            Bound bounds, Row *routers, cJSON *json) {
    const Quantity x = quantity_of(run, which), y = quantity_of(baseline, which);
    const double least = REPORT_NOISE * quantity_largest(&y);
    const double bound = which == GRADIENTS ? bounds.gradients : judged_by(bounds.others);
    Row row = row_new(y.name);
    row.bound = bound;
    if (quantities_pair(&x, &y, row.fault) && quantity_is_zero(&y))
        snprintf(row.fault, sizeof row.fault, "those of %s are all zero, so nothing was compared",
                 baseline->title);
    if (*row.fault) {
        row.tensors = y.tensors, row.elements = y.count[0];
        row.holds = false;
        return row;
    }
    double *factor = host_alloc(sizeof(double) * (size_t)y.tensors);
    for (int i = 0; i < y.tensors; i++) {
        int j = quantity_partner(&x, &y, i, row.fault);
        Difference d = difference_above(y.tensor[i], x.values[j], y.values[i], y.count[i], least);
        Compared c = {d, y.count[i], differing_elements(x.values[j], y.values[i], y.count[i]),
                      difference_norm(y.values[i], y.count[i]), false};
        c.holds = tensor_holds(&d, c.differing, c.norm <= least, proof, bound);
        if ((which == LOSSES || which == GRADIENT_NORMS) && proof != PROOF_EXACT) {
            // Of step 1: no optimizer's step has made anything of rounding yet.
            Difference first = difference(y.name, x.values[j], y.values[i], y.count[i] > 0);
            if (!tensor_holds(&first, 0, false, proof, bounds.gradients))
                c.holds = false, c.difference = first, row.bound = bounds.gradients;
        }
        row_add(&row, &c);
        if (which == GRADIENTS && baseline->apart[i]) row_add(routers, &c);
        factor[i] = c.holds ? NAN : d.scale;
        put_difference(json_child(json_child(json, y.name, false), d.what, false), &d);
    }
    for (int i = 0; i < y.tensors; i++)  // a scale of 1 is no factor
        row.alike += fabs(factor[i] - row.worst.scale) < 1e-2 * fabs(row.worst.scale - 1);
    free(factor);
    if (bound < INFINITY) note_nearest(proof, row.worst.relative, row.bound);
    return row;
}

static void print_row(const Row *row) {
    char title[64];
    snprintf(title, sizeof title, "%lld %s", (long long)(row->tensors > 1 ? row->tensors : row->elements),
             row->name);
    if (*row->fault) {
        say("  %-18s  %s  FAIL", title, row->fault);
        return;
    }
    const Difference *d = &row->worst;
    say("  %-18s  %9.2e  %9.2e  %13.10f  %-4s  %s", title, d->relative, d->maximum, d->scale,
        !row->holds                                    ? "FAIL"
        : row->bound < INFINITY || row->differing == 0 ? "ok"
                                                       : "?",
        row->holds && d->relative == 0 ? "" : row->tensor);
}

// What a quantity that fails usually means, when those before it in the step are right.
static const char *meaning(const Row *row, const Record *run, const Record *baseline, double first_bound,
                           bool first_loss) {
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
    else
        usually = fabs(run->grad_norm[0] / baseline->grad_norm[0] - 1) <= first_bound
                      ? "the first step's norm is right: usually the optimizer's step"
                      : "the gradients are right: usually a norm that counts a shard twice, or not at all";
    int used = 0;
    text[0] = 0;
    if (row->tensors > 1 && row->failing)
        used = snprintf(text, sizeof text, "; %d of %d fail%s", row->failing, row->tensors,
                        row->alike == row->failing && row->failing > 1 ? ", all by this factor" : "");
    if (*usually) snprintf(text + used, sizeof text - (size_t)used, ": %s", usually);
    return text;
}

static void judge_row(const Row *row, const Record *run, const Record *baseline, ProofClass proof,
                      double first_bound, bool first_loss) {
    const char *comma = *row->tensor ? ", " : "";
    const Difference *d = &row->worst;
    if (*row->fault) judge(false, "%s of %s: %s", row->name, run->title, row->fault);
    else if (row->holds) judge(true, " ");
    else if (proof == PROOF_EXACT)
        judge(false, "%s of %s%s%s: %lld element%s from %s in all (relative %.2e, scale %.6g)%s",
              row->name, run->title, comma, row->tensor, (long long)row->differing,
              row->differing == 1 ? " differs" : "s differ", baseline->title, d->relative,
              d->scale, meaning(row, run, baseline, first_bound, first_loss));
    else {
        bool by_scale = d->relative <= row->bound;
        judge(false, "%s of %s%s%s: off from %s by %.2e %s (bound %.2e), scale %.6g%s", row->name, run->title,
              comma, row->tensor, baseline->title, by_scale ? fabs(d->scale - 1) : d->relative,
              by_scale ? "in scale" : "relative", by_scale ? row->bound / 2 : row->bound, d->scale,
              meaning(row, run, baseline, first_bound, first_loss));
    }
}

// Once: every later comparison of this program has the same dtype and size. If the gradients of step 1 can be
// judged, it is the steps that make rounding so large.
static void note_coarse(Bound bound) {
    if (*report.coarse) return;
    if (bound.gradients < WEAKEST_BOUND)
        snprintf(report.coarse, sizeof report.coarse,
                 "at this --lr rounding errors grow from step to step, to a bound of %.2e, which lets a "
                 "factor of two pass; a smaller --lr or fewer steps (%s) can be judged",
                 bound.others, bound.steps ? bound.steps : "--steps");
    else
        snprintf(report.coarse, sizeof report.coarse,
                 "this dtype is too coarse for this size: its own error makes a bound of %.2e, which lets a "
                 "factor of two pass; a larger model or a wider --dtype can be judged",
                 fmax(bound.gradients, bound.others));
    say("  %s", report.coarse);
}

// Where a baseline that follows the run would have taken other experts, no more than rounding may be why.
// Over many steps rounding may take a token's logits farther than any loss or weight, so what it has made of
// the baseline's own is a second bound, which is used only where the first does not hold.
static bool judge_ties(const Record *run, const Record *baseline, Bound bounds, cJSON *json) {
    const Routing *r = &baseline->routing;
    double bound = bounds.others;
    if (r->choices == 0) return true;
    if (r->ties > 0 && !(r->apart <= judged_by(bound)) && isfinite(bounds.logits) && bounds.logits > bound) {
        bound = bounds.others = bounds.logits;
        if (bound >= WEAKEST_BOUND) note_coarse(bounds);
    }
    bool near = r->ties == 0 || r->apart <= judged_by(bound);
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
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "run", run->title);
    cJSON_AddStringToObject(json, "baseline", baseline->title);
    cJSON_AddStringToObject(json, "class", class_name(proof));
    put_number(json, "bound", bound.others);
    put_number(json, "bound of gradients", bound.gradients);
    report.compared[proof] = true;
    bool all = judge(isfinite(most), "%s: a bound of %g lets everything pass", run->title, most), same = true;
    Row row[QUANTITIES], routers = row_new("router gradients");
    for (int i = 0; i < QUANTITIES; i++) {
        row[i] = compare_quantity(run, baseline, i, proof, bound, &routers, json);
        all = all && row[i].holds;
        same = same && row[i].holds && row[i].differing == 0;
    }
    if (proof == PROOF_EXACT && !all) report.differs = true;
    if (!all || !report.quiet) {
        say("%s against %s: %s, %s", run->title, baseline->title, class_name(proof), rule);
        say("  %-18s  %9s  %9s  %13s        worst tensor", "", "relative", "maximum", "scale");
        for (int i = 0; i < QUANTITIES; i++) {
            print_row(&row[i]);
            // If a token takes one expert, routers get no gradient.
            if (i == GRADIENTS && routers.largest > 0) print_row(&routers);
        }
    }
    // Where no bit differs, the bound lets nothing pass.
    if (isfinite(most) && most >= WEAKEST_BOUND && !same) note_coarse(bound);
    // In the order in which a step computes them, since the first fault is the cause: the first loss, the
    // first step's gradients, their norm, the later losses, the final parameters.
    double first = baseline->steps > 0 ? run->loss[0] / baseline->loss[0] : 1;
    bool first_loss = *row[LOSSES].fault || !(fabs(first - 1) <= bound.gradients);
    const int early[] = {LOSSES, GRADIENTS, GRADIENT_NORMS, PARAMETERS},
              late[] = {GRADIENTS, GRADIENT_NORMS, LOSSES, PARAMETERS};
    for (int i = 0; i < QUANTITIES; i++) {
        int which = first_loss ? early[i] : late[i];
        judge_row(&row[which], run, baseline, proof, bound.gradients, first_loss);
    }
    all = judge_ties(run, baseline, bound, json) && all;
    cJSON_AddBoolToObject(json, "holds", all);
    json_keep("comparisons", json);
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
                   worse(k * worst, f64_bound) ? k * worst : f64_bound, NULL, k * reference->routing.off};
}
