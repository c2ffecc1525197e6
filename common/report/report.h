// report.h: compare a run with its baseline, check counts against formulas, print the table and the verdict.
#ifndef REPORT_H
#define REPORT_H

#include "difference.h"
#include "tensor/clock.h"
#include "train/config.h"
#include "train/params.h"

#ifdef __cplusplus
extern "C" {
#endif

// How the tokens of a run chose their experts. A choice is not a sum: where two scores are almost equal,
// rounding after another order of sums may decide otherwise, and then whole gradients differ. So the baseline
// of a comparison follows the run: each token takes the experts that the run's logits choose, and all else
// comes from the baseline's own. Where its own logits would have chosen others, the two must be near.
typedef struct Routing {
    float *logits;          // (steps, samples, s, L, e), 0 where another rank has the token; NULL: not kept
    int64_t count;          // of logits
    const float *followed;  // logits of the run whose choices this one repeats; NULL: it chooses itself
    int64_t step;           // the one that runs, of those recorded
    int64_t choices, ties;  // one for each token and block; of these, those that differ by its own logits …
    double apart;           // … and the largest distance of such logits, over their root mean square
    const float *beside;    // logits of the run with which this one's are compared; NULL: none
    double off;             // their largest distance at any token, over their root mean square
} Routing;

// What one training run leaves behind for the comparison. Host memory, owned by the record.
typedef struct Record {
    char title[64];  // "recompute full"
    int64_t steps;
    double *loss, *grad_norm;  // (steps)
    int tensors;
    char **name;         // (tensors)
    int64_t *count;      // elements of each whole weight
    bool *apart;         // which gradients are also compared in a row of their own
    double **grad;       // raw gradients of the first step, before clipping
    double **param;      // parameters after the last step
    Memory memory;       // peaks over the run
    int64_t kept_bytes;  // activations held at the end of a micro-batch's forward, the largest of the run
    double flops;        // counted over the run
    double model_seconds;  // of the whole run
    Routing routing;
} Record;

// Until the trainer sets them, losses and norms are NaN and tensors absent: what it forgets cannot pass.
// The caller ends it with record_free.
Record record_new(const char *title, int64_t steps, const Params *params);
// Record whole gradients, multiplied by `factor`, and whole parameters, whoever stores them: collective
// over the ranks that share them (params.h). Call the first when the gradients of the first step are
// complete, the second after the last step.
void record_grads(Record *record, const Params *params, double factor);
void record_params(Record *record, const Params *params);
// The record's routing, for training step `step` (from 0) of `samples` sequences, borrowed; NULL without a
// record, without experts and in a dry run. In f64 its logits are not kept: there rounding decides no tie.
Routing *record_routing_begin(Record *record, const Config *config, int64_t step, int64_t samples);
// Collective: sums the ranks' logits on the first rank of the group, which alone has any then.
void record_routing(Record *record, Group group);
void record_free(Record *record);
// Copies the record of root, which has trained alone, to all other members; each member frees its own.
void record_share(Record *record, int root, Group group);

// A gradient whose baseline is smaller than this fraction of the largest one is noise from the sums that
// made the others: its error is measured relative to that floor, and never skipped.
#define REPORT_NOISE 1e-6

// What may differ: EXACT: not a single bit; REASSOCIATED: the order of sums, in f64 (1e-10 relative) or f32;
// ROUNDED: that, and how 16-bit results are rounded.
typedef enum ProofClass { PROOF_EXACT, PROOF_REASSOCIATED, PROOF_ROUNDED } ProofClass;

// How far a run may be from its baseline, relative. `gradients` bounds all of step 1 that precedes the
// optimizer: the gradients, the first loss and the first norm. `others` bounds what follows, in which each
// optimizer step has enlarged the rounding errors.
typedef struct Bound {
    double gradients, others;
    const char *steps;  // the flag that sets how many there are, for a message; NULL: --steps
    double logits;      // of routers, where two runs take other experts, if larger than `others`
} Bound;

static inline Bound bound_of(double both) {
    Bound bound = {both, both, NULL, 0};
    return bound;
}

// Compares losses, gradient norms, first-step gradients (per parameter, by name) and final parameters;
// prints one row for each with the worst tensor, and returns whether all are within the bound: no differing
// bit for EXACT, the bound relative otherwise; NaN never passes. The scale must be within half of the bound
// of 1: two runs that are each within a quarter of the bound of the truth satisfy this, and a wrong factor
// does not. A tensor whose baseline is below noise (a millionth of the largest one) is not skipped but
// measured relative to that noise; but if the baseline of a quantity is zero as a whole, nothing was
// compared, and it fails. A bound of 0.5 or more would let a factor of two pass: the dtype is too coarse
// for this size, or rounding grows too much at this --lr. Then only step 1 and NaN can still fail; the rest
// is UNPROVEN, which is said once (report_verdict). Choices of experts in which the baseline followed the run
// are counted, and must have been near ties: logits no further apart than the bound.
bool report_compare(const Record *run, const Record *baseline, ProofClass proof, Bound bound);
// The bound for a dtype: 1e-10 for f64; for the others 4 times the error of the baseline against
// `reference`, the same run in f64, so that the dtype itself sets the bound. For gradients this is their own
// error; for the others the largest over all quantities, or `usual`, the error that such a run usually has,
// if its own is smaller by luck.
Bound report_bound(const Record *baseline, const Record *reference, double usual);

// Prints a row with the predicted and the measured count, and returns whether they are equal; if not, the
// run fails. Both are doubles, and formulas divide, so "equal" means within 1e-12 relative; but below 2^53,
// where doubles represent whole units, never a quarter of a unit or more apart.
bool report_equal(const char *what, double predicted, double measured, const char *unit);
// While quiet, comparisons and counts that hold are judged and written to --json, but not printed; those
// that fail are printed all the same. Returns the old value.
bool report_quiet(bool quiet);
bool report_holds(void);  // no check has failed so far, on this rank
// A summary of the checks so far: "reassociated, 3.3e-16 of 1.0e-10; 15 of 15 counts as predicted". Static
// buffer.
const char *report_evidence(void);
// Any other condition that the verdict depends on, which is returned; prints a row only if it does not hold.
bool report_that(bool condition, const char *format, ...) PRINTF_LIKE(2, 3);

// Prints the last line: "PASS <program>: <text> (<class and error, number of counts>)", "FAIL <program>:
// <what failed first, where, and what that usually means (diagnosis.h)>" or, if no check failed but a bound
// was too coarse, "UNPROVEN <program>: <why>". Returns the exit status: STATUS_PASS, STATUS_FAIL or
// STATUS_UNPROVEN. It takes into account every check since the start or the last verdict, and ends --json:
// a later verdict writes no file.
int report_verdict(const char *format, ...) PRINTF_LIKE(1, 2);
// Tells the verdict over how many ranks its claim splits something, of which axis ("tp"; NULL: all ranks).
// Over one it splits nothing: checks may hold, but a PASS then says this instead of the claim.
void report_split(int ranks, const char *axis);
// A text that a PASS verdict adds; only the latest note counts.
void report_note(const char *format, ...) PRINTF_LIKE(1, 2);

// --json: everything in the tables at full precision. Whether the file can be written is checked at once;
// the functions above and these fill it, and report_verdict writes it. A run that ends by fatal() writes it
// with status ENDED and the sentence, but before its first step (report_step) it leaves an earlier report
// alone. Numbers that are not finite become null.
void report_json(const char *file);
void report_step(void);  // a training step begins
void report_number(const char *group, const char *name, double value, const char *unit);
void report_series(const char *name, const double *values, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
