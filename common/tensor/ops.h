// ops.h: the operations of a transformer, forward and backward, on device tensors.
// ops.c is the front: it checks shapes and dtypes, counts FLOPs and bytes (clock.h), and calls the back end
// that is linked in (kernels.h: ops_cpu.c or ops_cuda.cu). Wrong shapes, dtypes or overlaps are fatal (of
// elementwise operations, only the numbers of elements must be equal). The caller owns all tensors; an
// operation writes only into those that it is given. A tensor (..., c) is taken as a matrix (rows, c). "="
// means that an output is set, "+=" that it is added to. Outputs must not alias inputs unless the comment
// allows it, and then must coincide with them. All floating-point tensors of a call have the same dtype
// unless stated; the gradient of a weight, and c of a matrix multiply, may be f32 beside 16-bit storage,
// and what is added to it is then rounded only to f32.
// Storage may be f64, f32, bf16 or f16; arithmetic is f64 for f64 storage and f32 for the others, and each
// stored result is rounded once. In 16-bit attention a back end may also round the probabilities and the
// gradients of scores when they become operands of a matrix multiply, since tensor cores take only 16-bit
// operands. Sums have a fixed order: the same inputs on the same number of threads (or the same GPU) give
// the same bits; except for matrix multiplies, any number of threads gives the same bits. Tokens and
// positions are checked when they are read: on a GPU the error is reported when the host next waits for it.
// The FLOPs counted are those of matrix multiplies, 2 per multiply-add, as is usual; causal attention
// counts only the s (s + 1) / 2 pairs that the mask leaves. The bytes counted are each tensor argument once
// if it is read and once if it is written; of an embedding table, only the rows of the n tokens; of a part
// of a table, the part's proportional share of n rows.
#ifndef OPS_H
#define OPS_H

#include "attention_mask.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IGNORED_LABEL = -1 };  // a target that does not count in the loss

// ---- elementwise ----
void op_fill(Tensor y, double value);       // y = value
void op_copy(Tensor y, Tensor x);           // y = x, converted to y's dtype (any dtype to any)
void op_add(Tensor y, Tensor a, Tensor b);  // y = a + b; y may alias either
void op_accumulate(Tensor y, Tensor x);     // y += x; the dtypes may differ (f32 accumulators of bf16)
void op_scale(Tensor y, double factor);     // y = factor y

// ---- reductions to the host (they wait for the device); 0 in a dry run ----
double op_sum(Tensor x);          // in f64
double op_sum_squares(Tensor x);  // in f64; NaN and infinity propagate

// ---- the same into a tensor, without waiting for the device: y (1) f64 ----
void op_add_sum(Tensor y, Tensor x, double factor);  // y += factor * sum of x, the sum in f64
// y (number of ranges) f64 = the sum of x^2 over each range of x, all in one pass. The bits of a range's
// sum depend only on its own elements.
typedef struct FlatRange {
    int64_t first, count;
} FlatRange;
void op_squares_of_ranges(Tensor y, Tensor x, const FlatRange *ranges);

// ---- matrix multiply:  C (m, n) = A B + beta C,  A is (m, k), or (k, m) if transpose_a; B likewise ----
void op_matmul(Tensor c, Tensor a, Tensor b, bool transpose_a, bool transpose_b,
               double beta);  // beta is 0 or 1
// C = the sum of `count` products A B, + beta C. On a CPU a 16-bit C is rounded once; on a GPU, and by the
// kernels of a table (kernel_table.h), after each product.
void op_matmul_sum(Tensor c, const Tensor *a, const Tensor *b, int count, bool transpose_a,
                   bool transpose_b, double beta);
// Several products of the same form: of one a with several b (as = 1), or of several a with one b (bs = 1).
// Each c is bit for bit what op_matmul computes; the shared operand is read only once. No c may overlap an
// operand or another c.
void op_matmuls(const Tensor *c, const Tensor *a, int as, const Tensor *b, int bs, bool transpose_a,
                bool transpose_b, double beta);

// ---- embedding: weight (v, h), tokens (n) i32 in [0, v) ----
void op_embedding_forward(Tensor y, Tensor tokens, Tensor weight);  // y (n, h) = weight[tokens]
void op_embedding_backward(Tensor dweight, Tensor dy,
                           Tensor tokens);  // dweight[tokens[i]] += dy[i], in order of i

// ---- RMSNorm: y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps);  x, y (n, h), weight (h) ----
// rstd (n) is f32, or f64 for f64 storage.
void op_rmsnorm_forward(Tensor y, Tensor rstd, Tensor x, Tensor weight, double eps);
// dx = dresidual + d(norm)/dx dy;  dweight +=. dresidual may be {0}: zero. dx may alias dresidual or dy.
void op_rmsnorm_backward(Tensor dx, Tensor dweight, Tensor dresidual, Tensor dy, Tensor x, Tensor weight,
                         Tensor rstd);

// ---- RoPE, half-split as in Hugging Face: dims i and i + d/2 of each head are rotated by the angle
// ---- position * theta^(-2i/d). x (n, heads * d) in place; positions (n) i32. direction: +1 forward, -1
// ---- backward (the inverse rotation).
// Llama 3.1 extends RoPE to contexts `factor` times the original length, `original` positions: dims that
// make fewer than `low` turns over the original positions turn `factor` times slower, those that make more
// than `high` turns are unchanged, and in between the slowdown is interpolated. factor 0 or 1: none is
// slower.
typedef struct Rope {
    double theta;
    double factor, low, high, original;
} Rope;
void op_rope(Tensor x, Tensor positions, int64_t head_size, Rope rope, int direction);
// The angle, in radians, by which dims i and i + d/2 turn from one position to the next.
double rope_frequency(Rope rope, int64_t i, int64_t head_size);

// ---- causal attention of b sequences of s tokens: q, o (b s, a d); k, v (b s, kv d); a divisible by kv.
// ---- Query head j uses key/value head j / (a / kv); scores are scaled by 1 / sqrt(d).
typedef struct AttentionShape {
    int64_t b, s, heads, kv_heads, head_size;
} AttentionShape;
// probs (b, a, s, s) = softmax of the masked scores, kept for backward; o = probs v. The entries of probs
// above the diagonal are unspecified: back ends use them as they like.
void op_attention_forward(Tensor o, Tensor probs, Tensor q, Tensor k, Tensor v, AttentionShape shape);
// Only probs, bit for bit as op_attention_forward computes them: what selective recomputation repeats
void op_attention_probs(Tensor probs, Tensor q, Tensor k, AttentionShape shape);
// dq, dk, dv (=) from d_o (b s, a d). dq may alias q, dk alias k, dv alias v.
void op_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor q, Tensor k, Tensor v,
                           Tensor probs, AttentionShape shape);

// ---- causal attention over a part of the keys: flash attention on one device, and the work of a context
// ---- parallel rank on each chunk that arrives (Milakov, Gimelshein 2018; Dao et al. 2022). No scores are
// ---- stored. Shapes: q, d_o, o (b s_q, a d); k, v (b s_k, kv d); lse, dots (b s_q, a).
// ---- o, lse, dots, dq, dk, dv are f32 for any storage but f64, and f64 for f64; op_copy rounds them once.
typedef struct AttentionHeads {
    int64_t heads, kv_heads, head_size;  // as in AttentionShape
} AttentionHeads;
// Merges a chunk into o and lse, both updated: after all chunks, in any order, o is the attention over all
// keys and lse the log-sum-exp of each query's scaled scores. The caller initializes o = 0 and lse =
// -infinity; rows that have seen no key yet keep these. 4 d FLOPs for each pair that the mask leaves; empty
// tiles are not read.
void op_attention_chunk_forward(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                                const AttentionMask *mask, AttentionHeads heads);
// dots = sum(o * d_o) over each head of each query: all that backward needs from o, the same for all
// chunks. o may be the f32 accumulator or its copy in the storage dtype.
void op_attention_chunk_dots(Tensor dots, Tensor o, Tensor d_o, AttentionHeads heads);
// dq (b s_q, a d), dk, dv (b s_k, kv d): accumulators, += the gradients of one chunk. lse is that of all
// chunks together. Scores are recomputed: 10 d FLOPs for each pair.
void op_attention_chunk_backward(Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor q, Tensor k, Tensor v,
                                 Tensor lse, Tensor dots, const AttentionMask *mask, AttentionHeads heads);

// ---- SwiGLU: act = silu(gate) * up, all (n, f) ----
void op_swiglu_forward(Tensor act, Tensor gate, Tensor up);
// dgate = and dup =. dgate may alias gate and dup may alias up; neither may alias dact.
void op_swiglu_backward(Tensor dgate, Tensor dup, Tensor dact, Tensor gate, Tensor up);

// ---- softmax cross-entropy: logits (n, v), targets (n) i32 in [0, v) or IGNORED_LABEL ----
// losses (n) = lse - logits[target], 0 where ignored; lse (n) = log sum exp of the row. Both are f32, or
// f64 for f64 logits.
void op_cross_entropy_forward(Tensor losses, Tensor lse, Tensor logits, Tensor targets);
// dlogits = scale * (softmax - onehot), 0 in ignored rows; may alias logits.
void op_cross_entropy_backward(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, double scale);
// What f16 has lost in dlogits since the program began, in all calls on this process of this backward and of
// op_cross_entropy_part_backward with f16 logits: sets *all to the number of elements that were not zero
// before rounding to f16, and returns how many of them became zero. Nothing that backward computes after
// dlogits is counted. Waits for the device.
double op_underflows(double *all);

// ---- the same over a part of the vocabulary: the rows of the table, and the columns of the logits, that
// ---- one of several ranks stores. Token and target numbers are those of the whole vocabulary. Stored rows
// ---- and columns beyond `count` are padding: never read, and with gradient 0.
typedef struct VocabularyPart {
    int64_t whole;         // size of the whole vocabulary
    int64_t first, count;  // tokens [first, first + count) are in this part
} VocabularyPart;
// y (n, h) = weight[token - first], 0 where another part has the token
void op_embedding_part_forward(Tensor y, Tensor tokens, Tensor weight, VocabularyPart part);
// dweight[token - first] += dy, in order of the tokens; tokens of other parts are skipped
void op_embedding_part_backward(Tensor dweight, Tensor dy, Tensor tokens, VocabularyPart part);
// The loss in three steps, logits (n, columns). After the first the caller takes the maximum of the parts'
// maxima, after the second the sum of their sums. maxima (n) = the maximum of each row, -inf if the part is
// empty. A NaN may be ignored here: it then shows in the sums.
void op_cross_entropy_part_maxima(Tensor maxima, Tensor logits, VocabularyPart part);
// sums (2, n): row 0 = the sum of exp(logit - maximum) over the part's columns; row 1 = the target's logit, 0
// if the target is ignored or in another part
void op_cross_entropy_part_sums(Tensor sums, Tensor logits, Tensor maxima, Tensor targets,
                                VocabularyPart part);
// From maxima and sums of all parts: lse (n) = maximum + log(sum), losses (n) = lse - the target's logit, 0
// where ignored
void op_cross_entropy_part_losses(Tensor losses, Tensor lse, Tensor maxima, Tensor sums, Tensor targets);
// As op_cross_entropy_backward, for the part's columns, with lse of the whole row; 0 in padding.
void op_cross_entropy_part_backward(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, double scale,
                                    VocabularyPart part);

// ---- sum of what ranks sent: y (…) = x[0] + x[1] + …, x (parts, …), in order, rounded once ----
void op_sum_parts(Tensor y, Tensor x, int64_t parts);

// ---- columns, such as those of heads, split over ranks ----

// The c / w groups of w columns of x (n, c), each copied to parts / (c / w) consecutive parts:
// y (parts, n, w): part i = columns [g w, g w + w) of x (n, c),  g = i (c / w) / parts
void op_split_columns(Tensor y, Tensor x);
// Its inverse, y (n, c) from x (parts, n, w): a group that was copied to several parts becomes their sum,
// in order, rounded once.
void op_join_columns(Tensor y, Tensor x);

// ---- mixture of experts: each of n tokens takes k of e experts (Shazeer et al. 2017) ----
// Logits and weights are f32, or f64 beside f64 storage. There are n k pairs of a token and an expert that
// it takes; "rows" are these pairs sorted by expert, and for each expert by token.
typedef struct RouteRule {
    bool by_sigmoid;  // false: weights are the softmax over the logits of the chosen (Mixtral); true: their
                      // sigmoids, divided by their sum (DeepSeek-V3)
    // Of the experts' `groups` equal groups only the `kept` may be chosen from whose two best values
    // (sigmoid or logit, plus bias) have the largest sum; 1, 1: any expert.
    int64_t groups, kept;
    double scale;          // multiplies the weights
} RouteRule;
// chosen (n, k) i32 = the numbers of the best experts, best first, and among equals the lower number first;
// weights (n, k) =. logits (n, e). bias (e) affects only the choice, and may be {0}.
void op_route_forward(Tensor chosen, Tensor weights, Tensor logits, Tensor bias, RouteRule rule);
// dlogits (n, e) =, 0 where an expert was not chosen
void op_route_backward(Tensor dlogits, Tensor dweights, Tensor weights, Tensor chosen, Tensor logits,
                       RouteRule rule);
// The loss that balances the experts within each sequence of s tokens. For one sequence and each expert i
// of the e experts, f_i is e times the fraction of the sequence's choices that went to i, and P_i the mean
// of i's score over the tokens (the softmax; or the sigmoid, divided by the sum of the token's sigmoids):
//   auxiliary (sum over i of f_i P_i)  +  z mean over tokens of lse^2    (Fedus 2021; Zoph 2022)
typedef struct BalanceRule {
    double auxiliary, z;  // z is 0 with sigmoids
    double scale;         // multiplies the gradient, not the losses
} BalanceRule;
// losses (n) = each token's part; their sum over a sequence is the sequence's loss. dlogits (n, e) += scale
// d(loss)/d(logits), with f as a constant
void op_route_balance(Tensor losses, Tensor dlogits, Tensor logits, Tensor chosen, int64_t s,
                      BalanceRule balance, RouteRule rule);
// left (n, k) = chosen (n, k) if each of e experts takes only the first `room` pairs of each sequence of s
// tokens, in order of token and then of choice (j of k); the pairs that it drops get the number e.
void op_route_capacity(Tensor left, Tensor chosen, int64_t s, int64_t e, int64_t room);
// From chosen (n, k): tokens (n k) i32 = the token of each row; place (n, k) i32 = the row of each pair;
// counts (e) i32 = the number of rows of each expert
void op_route_order(Tensor tokens, Tensor place, Tensor counts, Tensor chosen);
// The first `each` experts are on node 0, the next `each` on node 1, and so on for `count` nodes. nodes (n,
// m) i32 = the nodes of the experts in chosen (n, k), each once, in order of first use; the rest of a row
// is filled with `count`. A token with more than m nodes is fatal.
void op_route_nodes(Tensor nodes, Tensor chosen, int64_t each, int64_t count);
// left (n, k) = chosen - first for the experts first … first + count - 1, and `count` for all others.
void op_route_within(Tensor left, Tensor chosen, int64_t first, int64_t count);
// y (m, c) = rows index[0], index[1], … of x (n, c); index (m) i32 in [0, n); x may be i32
void op_gather_rows(Tensor y, Tensor x, Tensor index);
// y[i] = sum over j, in order, of weights[i, j] z[place[i, j]]. weights {0}: all 1, which is the backward
// of gathering rows by `tokens`. z may have fewer than n k rows: missing rows count as zeros.
void op_combine_forward(Tensor y, Tensor z, Tensor place, Tensor weights);
// dz[place[i, j]] = weights[i, j] dy[i];  dweights[i, j] = <dy[i], z[place[i, j]]>, 0 for a missing row
void op_combine_backward(Tensor dz, Tensor dweights, Tensor dy, Tensor z, Tensor place, Tensor weights);

// ---- fewer bits: random rounding, and 8-bit codes with scales (Micikevicius et al. 2022) ----
// Which random number each element gets: it depends on the step and on the element's place in the whole
// weight, whichever rank stores it. Element i of the tensor is element first + i of the rank's shard, whose
// rows have `columns` elements. The shard's element (0, 0) is element number `origin` of the whole weight,
// whose rows have whole_columns elements.
typedef struct RandomPlace {
    uint64_t seed, stream;
    int64_t step, first, columns, origin, whole_columns;
} RandomPlace;
// y (bf16) = one of the two bf16 neighbours of x (f32): the upper one with probability (x - lower) / (upper
// - lower)
void op_round_stochastic(Tensor y, Tensor x, RandomPlace place);

// The elements of a matrix that share a scale: this many rows and columns; 0: all of them. The last tiles
// may be smaller. With `transpose`, the codes are those of x's transpose, and so are the tiles.
typedef struct Tile {
    int64_t rows, columns;
} Tile;
// scale = amax / (largest number of the codes' dtype; for f16, e5m2's); 1 if amax is 0 or not finite.
typedef enum ScaleRule { SCALE_REAL, SCALE_POWER_OF_TWO } ScaleRule;  // rounded up: nothing saturates
int64_t tiles_of(int64_t size, int64_t of_tile);  // ceil(size / of_tile); of_tile 0: one tile
// amax (tiles of rows, tiles of columns) f32 = max(amax, the largest |x| in the tile); NaN if x has one
void op_tile_amax(Tensor amax, Tensor x, bool transpose, Tile tile);
void op_tile_scale(Tensor scale, Tensor amax, DType codes, ScaleRule rule);  // scale may alias amax
// codes (e4m3, e5m2 or f16) = x / scale, rounded to nearest and, in 8 bits, saturated
void op_encode(Tensor codes, Tensor x, Tensor scale, bool transpose, Tile tile);
void op_decode(Tensor y, Tensor codes, Tensor scale, Tile tile);  // y = codes * scale
// c (m, n) = beta c + sum over k of a (m, k) b (n, k), both given as codes and scales, as an 8-bit tensor
// core computes it: both operands have k along rows. beta is 0 or 1. Products of codes are exact; a partial
// sum ends with each tile of k, is scaled, and is added in f32 (f64 if c is f64). Both operands have the
// same tile.columns, unless one is 0.
typedef struct CodesSum {
    int bits;         // of a partial sum, as a Hopper adds 32 products to it (sum_in_bits); 0: f32
    int64_t promote;  // the most products in a partial sum before it is added in f32; 0: k, all in f32
} CodesSum;
// As `promote`: k products, and tensor cores may keep the sum in their own precision, the "fast
// accumulation" that Transformer Engine uses forward; f32 on a CPU.
enum { SUMMED_FAST = -1 };
typedef struct Codes {
    Tensor codes, scale;
    Tile tile;
} Codes;
void op_matmul_codes(Tensor c, Codes a, Codes b, CodesSum sum, double beta);

// ---- optimizers over flat ranges of equal length ----
typedef struct AdamW {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;  // multiplies the gradient first: the clipping coefficient
    int64_t step;       // from 1: bias correction is 1 - beta^step
} AdamW;
// Updates value, master, m and v. m, v and master are f32 (f64 for f64 values). Without a master ({0}) the
// value itself is updated; with one, the master is, and value = master rounded. grad may have another dtype
// than value. Weight decay is decoupled (Loshchilov, Hutter 2019), as in torch.optim.AdamW.
void op_adamw(Tensor value, Tensor master, Tensor m, Tensor v, Tensor grad, AdamW hyper);
// value -= lr * grad_scale * grad; with a master, the same on the master, and value = master rounded
void op_sgd(Tensor value, Tensor master, Tensor grad, double lr, double grad_scale);

#ifdef __cplusplus
}
#endif
#endif
