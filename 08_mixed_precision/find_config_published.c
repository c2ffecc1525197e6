// find_config_published.c: predicted times compared with published ones, and the errors of the cost model.
// Playbook: "Benchmarking thousands of configurations".
//
// There are four columns of errors: with factors fitted to all runs; with factors fitted to all series but
// the run's own, which shows what a prediction is worth; with these factors, but as a step of this book's own
// programs (find_config_own.c), which shows what the search's figures are worth; and with a constant share of
// the peak for each kind of GPU, which needs no model. This file has no main: find_config.c uses it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "find_config.h"
#include "report/report.h"

typedef struct Judged {
    double all, left_out, own, constant;  // predicted / published - 1
    CostTime time;
} Judged;

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    if (count == 0) return NAN;
    qsort(values, (size_t)count, sizeof *values, by_size);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

// ---- a constant share of the peak ----

static double share_of(const Published *r) {
    double flops = cost_token_flops(&r->model, false) * (double)r->sequences * r->model.seq;
    return flops / r->cluster.gpus / r->peak / r->seconds;
}

static double constant_share(const Runs *runs, const Published *like) {
    double *shares = host_alloc((size_t)runs->count * sizeof *shares);
    int count = 0;
    for (int i = 0; i < runs->count; i++)
        if (!strcmp(runs->run[i].gpu, like->gpu)) shares[count++] = share_of(&runs->run[i]);
    double share = median(shares, count);
    free(shares);
    return share;
}

// ---- the judgement ----

static int first_of_series(const Runs *runs, int run) {
    int first = 0;
    while (strcmp(runs->run[first].series, runs->run[run].series)) first++;
    return first;
}

static Judged *judge(Runs *runs, const Factors *fitted) {
    int series = 0;
    for (int i = 0; i < runs->count; i++) series += first_of_series(runs, i) == i;
    Judged *judged = host_alloc((size_t)runs->count * sizeof *judged);
    Factors *without = host_alloc((size_t)runs->count * sizeof *without);
    for (int i = 0; i < runs->count; i++) {
        Published *r = &runs->run[i];
        int first = first_of_series(runs, i);
        without[i] = first < i ? without[first] : factors_guessed();
        if (first == i && series > FACTORS) fit(&without[i], runs, r->series);
        double seconds = run_predict(r, &without[i]).step;
        judged[i].left_out = series > FACTORS ? seconds / r->seconds - 1 : NAN;
        judged[i].own = series > FACTORS ? run_own_step(r, &without[i]) / r->seconds - 1 : NAN;
        judged[i].constant = share_of(r) / constant_share(runs, r) - 1;
    }
    for (int i = 0; i < runs->count; i++) {  // last, so that open settings are filled by the whole fit
        judged[i].time = run_predict(&runs->run[i], fitted);
        judged[i].all = judged[i].time.step / runs->run[i].seconds - 1;
    }
    free(without);
    return judged;
}

static const char *filled_text(const Published *r) {
    static char text[64];
    static const char *const names[] = {"none", "selective", "full"};
    int used = 0;
    *text = 0;
    if (r->open_micro_batch)
        used += snprintf(text, sizeof text, " mbs %lld", (long long)r->layout.micro_batch);
    if (r->open_recompute)
        used += snprintf(text + used, sizeof text - (size_t)used, " rec %s", names[r->layout.recompute]);
    if (r->open_chunks) snprintf(text + used, sizeof text - (size_t)used, " vpp %d", r->layout.chunks);
    return *text ? text + 1 : "";
}

static void print_rows(const Runs *runs, const Judged *judged) {
    say("\n%-5s %-12s %10s %10s %8s %9s %9s %9s  %s", "run", "kind", "published", "predicted", "fitted",
        "left out", "own step", "constant", "filled");
    for (int i = 0; i < runs->count; i++) {
        const Published *r = &runs->run[i];
        char left_out[16] = "-", own[16] = "-";
        if (!isnan(judged[i].left_out))
            snprintf(left_out, sizeof left_out, "%+.1f%%", 100 * judged[i].left_out);
        if (!isnan(judged[i].own)) snprintf(own, sizeof own, "%+.1f%%", 100 * judged[i].own);
        say("%-5s %-12s %8.3f s %8.3f s %+7.1f%% %9s %9s %+8.1f%%  %s", r->id, r->kind, r->seconds,
            judged[i].time.step, 100 * judged[i].all, left_out, own, 100 * judged[i].constant,
            filled_text(r));
        report_number(r->id, "published", r->seconds, "s");
        report_number(r->id, "predicted", judged[i].time.step, "s");
        report_number(r->id, "error of the fit", judged[i].all, "");
        report_number(r->id, "error left out", judged[i].left_out, "");
    }
}

// ---- errors by kind, and of ratios ----

typedef struct Summary {
    double median, worst, within;  // share of runs within 20%
    int count;
} Summary;

// Of those that are not NAN, as no prediction is.
static Summary summary_of(const double *errors, int count) {
    Summary s = {.count = 0};
    double *sizes = host_alloc((size_t)(count + 1) * sizeof *sizes);
    for (int i = 0; i < count; i++)
        if (!isnan(errors[i])) sizes[s.count++] = fabs(errors[i]);
    for (int i = 0; i < s.count; i++) {
        s.worst = fmax(s.worst, sizes[i]);
        s.within += (sizes[i] <= 0.2) / (double)s.count;
    }
    s.median = median(sizes, s.count);
    free(sizes);
    return s;
}

static void print_summary(const char *what, Summary s) {
    if (s.count == 0) {
        say("  %-34s %3d %9s %9s %12s", what, 0, "-", "-", "-");
        return;
    }
    say("  %-34s %3d %8.1f%% %8.1f%% %11.0f%%", what, s.count, 100 * s.median, 100 * s.worst,
        100 * s.within);
    report_number(what, "median error", s.median, "");
    report_number(what, "worst error", s.worst, "");
    report_number(what, "within 20%", s.within, "");
}

static void print_kinds(const Runs *runs, const Judged *judged) {
    double *errors = host_alloc((size_t)runs->count * sizeof *errors);
    for (int i = 0; i < runs->count; i++) {
        int first = 0, count = 0;
        while (strcmp(runs->run[first].kind, runs->run[i].kind)) first++;
        if (first < i) continue;
        for (int j = i; j < runs->count; j++)
            if (!strcmp(runs->run[j].kind, runs->run[i].kind)) errors[count++] = judged[j].left_out;
        char *what = format_text("left out, %s", runs->run[i].kind);
        print_summary(what, summary_of(errors, count));
        free(what);
    }
    free(errors);
}

static bool partners(const Published *a, const Published *b) {
    const CostModel *x = &a->model, *y = &b->model;
    return !strcmp(a->gpu, b->gpu) && x->layers == y->layers && x->hidden == y->hidden &&
           x->ffn == y->ffn && x->heads == y->heads && x->vocab == y->vocab && x->experts == y->experts &&
           !strncmp(a->framework, b->framework, 4);
}

// Seconds of a GPU for a token.
static double of_token(const Published *r, double seconds) {
    return seconds * r->cluster.gpus / ((double)r->sequences * r->model.seq);
}

static Summary print_ratios(const Runs *runs, const Judged *judged) {
    double *errors = host_alloc((size_t)(runs->count * runs->count) * sizeof *errors);
    int count = 0;
    say("\nThe same model on the same GPUs, by programs of one family: seconds of a GPU for a token");
    for (int i = 0; i < runs->count; i++)
        for (int j = i + 1; j < runs->count; j++) {
            const Published *a = &runs->run[i], *b = &runs->run[j];
            if (!partners(a, b)) continue;
            double published = of_token(b, b->seconds) / of_token(a, a->seconds);
            double predicted = of_token(b, judged[j].time.step) / of_token(a, judged[i].time.step);
            errors[count++] = predicted / published - 1;
            say("  %-5s / %-5s published %6.3f, predicted %6.3f, %+6.1f%%", b->id, a->id, published,
                predicted, 100 * errors[count - 1]);
        }
    Summary s = summary_of(errors, count);
    free(errors);
    return s;
}

static void print_factors(const Factors *fitted) {
    say("%d factors, fitted:", FACTORS);
    for (int i = 0; i < FACTORS; i++) {
        say("  %-17s %7.4f  %s", factor_range[i].name, fitted->value[i], factor_range[i].what);
        report_number("factors", factor_range[i].name, fitted->value[i], "");
    }
}

static void write_fitted(const char *file, const Factors *fitted, Summary own) {
    CHECK(own.count > 0,
          "--fitted %s has errors of runs that a fit has not seen, and there are none: --runs must have "
          "more than %d series, and runs that this book's programs could make",
          file, FACTORS);
    FILE *out = output_open("--fitted", file);
    fprintf(
        out,
        "// fitted.h: the factors of cost_table.c, and how far off the search's steps are with them on\n"
        "// published runs that they have not seen (find_config_own.c), as find_config has written it:\n"
        "//     find_config --runs 08_mixed_precision/published.csv --fit --fitted FILE\n"
        "#ifndef FITTED_H\n#define FITTED_H\n\n#define FITTED_FACTORS {");
    for (int i = 0; i < FACTORS; i++) fprintf(out, "%s%.4g", i ? ", " : "", fitted->value[i]);
    fprintf(out,
            "}\n#define FITTED_RUNS %d\n#define FITTED_MEDIAN %.3f  // errors of a step's seconds\n"
            "#define FITTED_WORST %.3f\n\n#endif\n",
            own.count, own.median, own.worst);
    output_close(out, "--fitted", file);
}

void say_left_out(void) {
    say("\nLeft out of the model: stragglers and jitter, which grow with the cluster; what communication "
        "kernels take\nfrom computing ones; a clock that falls with temperature; the framework's own "
        "work on the host; experts with\nmore tokens than others; input and checkpoints.");
}

void runs_report(Runs *runs, bool refit, const char *fitted_file) {
    Factors fitted = refit ? factors_guessed() : factors_fitted();
    if (refit) fit(&fitted, runs, NULL);
    print_factors(&fitted);
    device_dry_run(true);
    comm_stand_for_all(true);
    Judged *judged = judge(runs, &fitted);
    print_rows(runs, judged);
    Summary ratios = print_ratios(runs, judged);
    double *errors = host_alloc(4 * (size_t)runs->count * sizeof *errors);
    for (int i = 0; i < runs->count; i++) {
        errors[i] = judged[i].all;
        errors[runs->count + i] = judged[i].left_out;
        errors[2 * runs->count + i] = judged[i].constant;
        errors[3 * runs->count + i] = judged[i].own;
    }
    say("\n  %-34s %3s %9s %9s %12s", "", "", "median", "worst", "within 20%");
    print_summary(refit ? "fitted on these" : "as fitted on published.csv",
                  summary_of(errors, runs->count));
    print_summary("its series left out of the fit", summary_of(errors + runs->count, runs->count));
    Summary own = summary_of(errors + 3 * runs->count, runs->count);
    print_summary("the same, as this book's own step", own);
    if (fitted_file) write_fitted(fitted_file, &fitted, own);
    print_summary("constant share of a GPU's peak", summary_of(errors + 2 * runs->count, runs->count));
    print_summary("ratios of partners", ratios);
    print_kinds(runs, judged);
    double model = summary_of(errors, runs->count).median;
    double constant = summary_of(errors + 2 * runs->count, runs->count).median;
    report_that(runs->count < 8 || model < constant,
                "the model is off by %.3f in the median, and a constant share of the peak by %.3f", model,
                constant);
    say_left_out();
    free(errors);
    free(judged);
}
