// find_config_fit.c: fits the factors of the cost model to published runs. Playbook: "Benchmarking thousands
// of configurations".
//
// The fit is a coordinate search: each factor in turn is moved a step up and down, in logarithms, and the
// move is kept if the loss falls; when no move helps, the step is halved:
//
//     loss  =  sum over runs  sqrt(ln(predicted / published)^2 + 0.02^2)
//           +  0.02 sum over factors  ln(factor / guess)^2
//
// The first sum is nearly that of absolute errors, so one outlier moves little; the second keeps a factor
// about which these runs say nothing at its guess. This file has no main: find_config.c uses it.
#include <math.h>
#include <string.h>

#include "find_config.h"

static double loss(const Factors *factors, Runs *runs, const char *without) {
    double sum = 0;
    for (int i = 0; i < runs->count; i++) {
        Published *run = &runs->run[i];
        if (without && !strcmp(run->series, without)) continue;
        double error = log(run_predict(run, factors).step / run->seconds);
        sum += sqrt(error * error + 0.02 * 0.02);
    }
    for (int i = 0; i < FACTORS; i++) {
        double off = log(factors->value[i] / factor_range[i].guess);
        sum += 0.02 * off * off;
    }
    return sum;
}

// One round over all factors; whether any of them moved.
static bool improve(Factors *factors, double *best, Runs *runs, const char *without, double step) {
    bool better = false;
    for (int i = 0; i < FACTORS; i++)
        for (int sign = -1; sign <= 1; sign += 2) {
            Factors tried = *factors;
            double value = tried.value[i] * exp(sign * step);
            tried.value[i] = fmin(fmax(value, factor_range[i].low), factor_range[i].high);
            double now = loss(&tried, runs, without);
            if (!(now <= *best - 1e-4)) continue;  // no number is no gain
            *best = now, *factors = tried, better = true;
        }
    return better;
}

// To four digits: what is printed is what is used.
static double rounded(double value) {
    double unit = pow(10, floor(log10(value)) - 3);
    return round(value / unit) * unit;
}

void fit(Factors *factors, Runs *runs, const char *without) {
    double best = loss(factors, runs, without);
    for (double step = 0.16; step > 0.002; step /= 2)
        while (improve(factors, &best, runs, without, step)) continue;
    for (int i = 0; i < FACTORS; i++) factors->value[i] = rounded(factors->value[i]);
}
