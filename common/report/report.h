// report.h: compare a run with its baseline, hold counts against formulas, print the table and the verdict.
#ifndef REPORT_H
#define REPORT_H

#include "difference.h"
#include "tensor/clock.h"
#include "train/config.h"
#include "train/params.h"

#ifdef __cplusplus
extern "C" {
#endif

// What one training run leaves behind for the comparison. Host memory, owned by the record.
typedef struct Record {
    char title[64];  // "recompute full"
    int64_t steps;
    double *loss, *grad_norm;  // (steps)
    int tensors;
    char **name;         // (tensors)
    int64_t *count;      // elements of each, of the whole weight
    bool *apart;         // which gradients a row of their own shows, besides the row of all
    double **grad;       // raw gradients of the first step, before clipping
    double **param;      // parameters after the last step
    Memory memory;       // peaks over the run
    int64_t kept_bytes;  // activations held when the last forward of a micro-batch ended, peak
    double flops;        // counted over the run
    double model_seconds, wall_seconds;  // both clocks, whole run
} Record;

// Losses and norms are NaN, and tensors absent, until the trainer sets them: what was left out cannot pass.
Record record_new(const char *title, int64_t steps, const Params *params);
// Of whole parameters, whoever stores them: collective over the ranks that share them (params.h). Gradients
// when those of the first step are complete, times `factor`; parameters after the last step.
void record_grads(Record *record, const Params *params, double factor);
void record_params(Record *record, const Params *params);
void record_free(Record *record);
// The root's, which has trained alone, for the other members too: they free theirs as well.
void record_share(Record *record, int root, Group group);
// Those of its tensors that are apart: borrowed, and the caller frees name, count and grad.
Record record_apart(const Record *record);

// What may differ: EXACT, nothing, not one bit; REASSOCIATED, the order of sums (f64: 1e-10 relative);
// ROUNDED, the precision of a narrower dtype.
typedef enum ProofClass { PROOF_EXACT, PROOF_REASSOCIATED, PROOF_ROUNDED } ProofClass;

// Compares losses, gradient norms, first-step gradients (per parameter, by name) and final parameters;
// prints one row for each with the worst tensor, and returns whether all are within the bound: 0 bits for
// EXACT, `bound` relative otherwise; NaN never passes. The scale must be within half of the bound of 1: two
// runs that each are within a quarter of it of the truth differ by no more, while a wrong factor cannot
// hide in it. A tensor whose baseline is below noise (a millionth of the largest one) is measured against
// that floor, and not skipped; but when a quantity's baseline is zero as a whole nothing was compared, and
// it fails. A bound of 0.5 or more would let a factor of two pass: this dtype is too coarse for this size.
// What differs by more still fails; what does not is UNPROVEN, said once (report_verdict).
bool report_compare(const Record *run, const Record *baseline, ProofClass proof, double bound);
// The bound of a dtype: f64 1e-10; for the others k = 4 times the error of the baseline against
// `reference`, the same run in f64 (per quantity the largest), so that the dtype itself sets the bar.
double report_bound(const Record *baseline, const Record *reference);

// "predicted" beside "measured", equal or the run fails. Prints a row and returns the equality. Doubles
// carry both, and formulas divide, so they are equal within 1e-12 relative; but below 2^53, where doubles
// count whole units, never when they are a quarter of a unit apart or more.
bool report_equal(const char *what, double predicted, double measured, const char *unit);
// While quiet, comparisons and counts that hold are judged and written to --json, and not shown; those that
// fail are shown all the same. Returns what was before.
bool report_quiet(bool quiet);
bool report_holds(void);  // no check has failed so far, on this rank
// What the checks so far have shown: "reassociated, 3.3e-16 of 1.0e-10; 15 of 15 counts as predicted".
// Static buffer.
const char *report_evidence(void);
// Any other condition that the verdict depends on; prints a row only when it does not hold.
bool report_that(bool condition, const char *format, ...) PRINTF_LIKE(2, 3);

// Last line, "PASS <program>: <text> (<class and error, number of counts>)", "FAIL <program>: <what failed
// first, where, and what that usually means (diagnosis.h)>", or, when no check failed but a bound was too
// coarse, "UNPROVEN <program>: <why>". Returns the exit status: STATUS_PASS, STATUS_FAIL or
// STATUS_UNPROVEN. Every check since the start counts; the next check starts anew.
int report_verdict(const char *format, ...) PRINTF_LIKE(1, 2);
// What the verdict says besides, if it is a PASS: the latest note.
void report_note(const char *format, ...) PRINTF_LIKE(1, 2);

// --json: everything the tables showed at full precision. The place is checked at once; it is filled by the
// functions above and by these, and written by report_verdict. What is not finite is null there.
void report_json(const char *file);
void report_number(const char *group, const char *name, double value, const char *unit);
void report_series(const char *name, const double *values, int64_t count);
void report_text(const char *name, const char *value);

#ifdef __cplusplus
}
#endif
#endif
