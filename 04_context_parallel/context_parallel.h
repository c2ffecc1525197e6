// context_parallel.h: chapter 04 as signatures. s is the tokens of a sequence, cp the ranks that share it.
#ifndef CONTEXT_PARALLEL_H
#define CONTEXT_PARALLEL_H

#include "00_single_gpu/flash.h"
#include "00_single_gpu/harness.h"
#include "03_tensor_parallel/tensor_parallel.h"

// ======================================================================================================
// 04_context_parallel/sequence_layout.c: which rank has which tokens of a sequence
// ======================================================================================================

// For any s, even below cp: each of n chunks has s / n tokens, and the first s % n have one more.
typedef struct SequenceLayout {
    const char *name;
    // How many tokens rank `rank` of cp has.
    int64_t (*count)(int64_t s, int cp, int rank);
    // Which ones: count(…) of them, in the order in which they are stored, which is ascending.
    void (*tokens)(int64_t s, int cp, int rank, int32_t *tokens);
    // Score entries that a head computes in one hop: pairs of a query of rank `queries` and a key of rank
    // `keys` that the query sees, without documents. Closed forms, exact for any s.
    double (*pairs)(int64_t s, int cp, int queries, int keys);
} SequenceLayout;

extern const SequenceLayout sequence_contiguous;  // rank r: chunk r of cp
extern const SequenceLayout sequence_zigzag;      // rank r: chunks r and 2 cp - 1 - r of 2 cp
extern const SequenceLayout sequence_striped;     // rank r: tokens r, r + cp, r + 2 cp, …

// In hop `hop` of a ring, rank r computes with the keys that rank hop_owner(r) stores, as keys move from each
// rank to the next.
int hop_owner(int cp, int rank, int hop);
// The score entries that a head of rank `rank` computes in all cp hops of a sequence.
double sequence_rank_pairs(const SequenceLayout *layout, int64_t s, int cp, int rank);

// Takes the rank's entries from those of whole sequences: positions, tokens, or labels (already shifted).
// all (b, s), mine (b, count).
void sequence_take(const SequenceLayout *layout, int cp, int rank, int64_t b, int64_t s, int32_t *mine,
                   const int32_t *all);

// ======================================================================================================
// context_parallel.c: what the four methods share
// ======================================================================================================

// Each rank of mesh.cp has its own tokens of every sequence, through the whole model; only attention combines
// tokens of different ranks. Gradients are summed over dp x cp. --context chooses one of these; --layout says
// which rank has which tokens.
extern const Technique ring_attention;         // K/V hop from rank to rank; contiguous
extern const Technique zigzag_ring_attention;  // the same on balanced chunks
extern const Technique all_gather_attention;   // all K/V at once; zig-zag
extern const Technique ulysses;                // all tokens of some heads; contiguous
typedef enum ContextMethod {
    CONTEXT_RING,
    CONTEXT_ZIGZAG,
    CONTEXT_ALL_GATHER,
    CONTEXT_ULYSSES,
    CONTEXT_METHODS  // how many; in chapter 05 also --context none
} ContextMethod;
extern const char *const context_method_name[CONTEXT_METHODS];  // as --context says

// What the programs of this chapter list: data parallelism and ZeRO's stages, tensor parallelism, the above,
// recomputation.
extern const Technique *const context_layouts[];
extern const Option context_options[];  // each of the four has these
enum { CONTEXT_OPTIONS = 3 };
// The small model of these programs, except for heads, tokens and method.
#define CONTEXT_MODEL                                                                                \
    "layers=3 hidden=48 kv-heads=2 ffn=88 micro-batch=2 grad-acc=2 steps=3 dtype=f64 optimizer=sgd " \
    "lr=0.1 "                                                                                        \
    "clip=0.5 cp=0 bucket-mb=0.1 "

typedef void AttentionForward(void *context, const MicroBatch *micro, Tensor o, AttentionKept *kept,
                              Tensor q, Tensor k, Tensor v, AttentionShape shape);
typedef struct ContextParallel {
    Group cp;
    AttentionForward *forward;  // the method's
    const SequenceLayout *layout;
    int64_t s, own;              // tokens of a sequence, and how many of them are on this rank …
    int32_t *token;              // … and which, (own)
    MaskKey key;                 // which micro-batch the following were made for
    AttentionPositions *tokens;  // (cp) each rank's tokens; Ulysses: (1), those of all ranks in turn
    AttentionMask *mask;         // (cp) this rank's queries against each rank's keys; Ulysses: (1)
} ContextParallel;

bool context_on(const Config *config, ContextMethod method);
const SequenceLayout *context_layout(const Config *config);  // by --layout, or the usual one of --context
void context_check(const Config *config);
// For the programs that show one method: fatal if --context asks for another.
void context_only(const Config *config, ContextMethod method);
// Fills the tokens socket and, with a method's forward, the attention socket, except for backward.
ContextParallel *context_plug(Model *model, AttentionForward *forward);
void context_unplug(Model *model, void *context);
// Columns of one token's keys, on a rank of tensor parallelism; 0 if the rank stores no block.
int64_t context_key_columns(const Model *model);
// Makes each rank's tokens, and masks against its keys, once for all layers of a micro-batch.
void context_masks(ContextParallel *context, const MicroBatch *micro);
int64_t context_rows(const ContextParallel *context, int64_t b, int rank);  // b times the tokens of a rank
// What this rank keeps: its tokens' part of everything, with lse in place of probs; and the positions of each
// rank's tokens.
void context_price_kept(Price *price, const Model *model, const ContextParallel *context);
void context_price_positions(Price *price, const Model *model, const ContextParallel *context);

// ring_attention.c, for zigzag_ring_attention.c
void *ring_plug(Model *model);
void ring_price(Price *price, const Model *model, const void *context);

// ======================================================================================================
// context_clock.c, context_memory.c, context_masks.c: what the methods cost, for the programs to show
// ======================================================================================================

// Attention of one layer, on the model clock and counted on this rank; by Pass.
typedef struct ContextCost {
    double seconds[2], exposed[2], bytes[2];
    double held[2];    // peak bytes to be sent or received
    double computing;  // seconds of attention's own operations, both passes
    double entries;    // score entries of one head, forward
} ContextCost;
ContextCost context_attention_cost(Mesh mesh, const Config *config);  // dry
// The same for Llama 3 8B in bf16 with 1,024 tokens on each rank, against closed forms of bytes and held.
typedef struct ContextSizes {
    double ranks, tokens;         // of this rank
    double q, kv, kv_here, size;  // heads; key/value heads kv; kv' = max(kv, ranks); head size
    double e, sum;                // bytes of an element, and of a sum
} ContextSizes;
typedef ContextCost ContextFormula(const ContextSizes *sizes);
void context_check_cost(Mesh mesh, ContextMethod method, ContextFormula *formula);
extern ContextFormula ring_formula;  // ring_attention.c
// Llama 3 8B in bf16 with `layers` layers, on cp ranks; and whether a method can shard it.
Config context_llama(ContextMethod method, int64_t layers, int64_t seq, int cp);
bool context_fits(int cp, ContextMethod method);
// A step of its 32 layers on this mesh, one sequence for each group of cp, with ZeRO-3 over dp x cp and full
// recomputation; device_dry_run must be on. Of the result, only the time, its exposed part and the peaks of
// activations and of everything are for 32 layers; the rest is a step of four.
StepCost context_step(Mesh mesh, ContextMethod method, int64_t seq, Techniques techniques);
// Its attention and step with s = 131,072 on these ranks, by all four methods, in one node and across
// nodes.
void context_compare(Mesh mesh, const Config *config);
// Its peak memory as s grows, as a table and as a picture in --memory-svg's file; without that, nothing.
void context_memory(Mesh mesh, const Config *config);

// Which rank computes which block of scores in which hop, as pictures; and the score entries of each rank.
void context_print_masks(int cp);
void context_balance(Mesh mesh, const Config *config);

#endif
