// cost_table.c: what share of a machine's peaks is reached, in one table for the search and for the clock.
// Playbook: "Benchmarking thousands of configurations".
//
//     multiply     peak x reached(GPU) / (1 + half / FLOPs)      a small multiply leaves most of a GPU idle
//     attention    peak x reached(GPU) x attention
//     memory       bandwidth x memory
//     collective   bandwidth of the link x links
//
// A GPU whose power limit is below its datasheet's multiplies more slowly: its clock is lowered until it
// stays within the limit. Attention keeps fewer of its units busy, and is not affected. This file has no
// main: find_config.c uses it.
#include <math.h>

#include "cost.h"
#include "fitted.h"

// Speed falls less than in proportion to power: near the limit a higher clock also needs a higher voltage.
#define POWER_EXPONENT 0.7

// clang-format off
const struct FactorRange factor_range[FACTORS] = {
    {"matmul, A100",    "of the 16-bit peak, by large multiplies",           0.4,   1,    0.75},
    {"matmul, H100",    "likewise",                                          0.4,   1,    0.68},
    {"matmul, 8 bits",  "of twice that",                                     0.4,   1,    0.8},
    {"small multiplies", "TFLOP of one that reaches half of what large ones do", 0.0005, 0.1, 0.01},
    {"attention",       "of what large multiplies reach",                    0.2,   1,    0.6},
    {"memory",          "of memory bandwidth",                               0.4,   1,    0.9},
    {"links",           "of the bandwidth of NVLink and network",            0.2,   1,    0.6},
    {"hidden",          "of communication that a program overlaps",          0.3,   0.95, 0.8},
};
// clang-format on

Factors factors_fitted(void) { return (Factors){FITTED_FACTORS}; }

Factors factors_guessed(void) {
    Factors f;
    for (int i = 0; i < FACTORS; i++) f.value[i] = factor_range[i].guess;
    return f;
}

double cost_reached(const CostTable *table, WorkKind kind, double size) {
    int exponent;
    double mantissa = frexp(size, &exponent);  // size = mantissa 2^exponent, 0.5 <= mantissa < 1
    int step = 2 * (exponent - 1 - EFFICIENCY_FIRST) + (mantissa >= M_SQRT1_2);
    if (step < 0) step = 0;
    return table->reached[kind][step < EFFICIENCY_STEPS ? step : EFFICIENCY_STEPS - 1];
}

CostTable cost_table(const Machine *machine, const Factors *factors, double power) {
    const double *f = factors->value;
    CostTable table = {.machine = *machine};
    bool a100 = machine->flops[E4M3] == machine->flops[BF16];  // no 8-bit tensor cores
    double limit = pow(fmin(power, 1), POWER_EXPONENT);
    double large = (a100 ? f[FACTOR_MATMUL_A100] : f[FACTOR_MATMUL_H100]) * limit;
    for (int type = 0; type < DTYPES; type++) table.machine.flops[type] *= large;
    table.machine.flops[E4M3] *= a100 ? 1 : f[FACTOR_MATMUL_FP8];
    table.machine.flops[E5M2] *= a100 ? 1 : f[FACTOR_MATMUL_FP8];
    table.machine.memory_bytes_per_second *= f[FACTOR_MEMORY];
    table.machine.node_bytes_per_second *= f[FACTOR_LINKS];
    table.machine.network_bytes_per_second *= f[FACTOR_LINKS];
    for (int i = 0; i < EFFICIENCY_STEPS; i++) {
        double size = exp2(EFFICIENCY_FIRST + i / 2.0 + 0.25);  // the middle of the step
        table.reached[WORK_MATMUL][i] = 1 / (1 + f[FACTOR_SMALL] * 1e12 / size);
        table.reached[WORK_ATTENTION][i] = f[FACTOR_ATTENTION] / limit;
        table.reached[WORK_MEMORY][i] = table.reached[WORK_COLLECTIVE][i] = 1;
    }
    return table;
}

void cost_table_clock(const CostTable *table) {
    static Machine machine;  // the clock keeps pointers
    static Efficiency row[EFFICIENCY_STEPS + 1];
    machine = table->machine;
    for (int i = 0; i < EFFICIENCY_STEPS; i++)
        row[i] = (Efficiency){WORK_MATMUL, i ? exp2(EFFICIENCY_FIRST + i / 2.0) : 0,
                              table->reached[WORK_MATMUL][i]};
    row[EFFICIENCY_STEPS] = (Efficiency){WORK_ATTENTION, 0, table->reached[WORK_ATTENTION][0]};
    clock_set_machine(&machine);
    clock_set_efficiency(row, EFFICIENCY_STEPS + 1);
}
