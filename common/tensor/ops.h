// ops.h: the operations of a transformer, forward and backward, on device tensors.
//
// ops.c is the one front: it checks shapes and dtypes, counts FLOPs and bytes (clock.h), and hands over
// to the back end that is linked in (kernels.h: ops_cpu.c or ops_cuda.cu). A tensor of shape (..., c) is
// seen as (rows, c). "=" means the output is set, "+=" that it is added to. Outputs do not alias inputs
// unless said. All floating tensors of one call have one dtype unless said; the gradient of a weight, and c
// of a matrix multiply, may be f32 beside 16 bits: what is added to it is then rounded to f32 alone.
//
// Storage may be f64, f32, bf16 or f16; arithmetic is f64 for f64 storage and f32 for the others, each
// stored result rounded once. In 16-bit attention a back end may also round probs, and the gradients of
// scores, where they become operands of a multiply: tensor cores take no others. Sums have a fixed order:
// same inputs, same threads (or GPU), same bits; and but for matrix multiplies the same bits on any number
// of threads. Tokens and positions are checked where they are read: on a GPU the sentence comes when the
// host next waits for it.
//
// FLOPs counted are those of matrix multiplies, 2 per multiply-add, as the field counts them; causal
// attention counts only the s (s + 1) / 2 pairs that the mask leaves. Bytes are each tensor argument once
// when it is read and once when it is written; of an embedding table, the rows of the tokens; of a part of
// one, as many of them as would be its share.
#ifndef OPS_H
#define OPS_H

#include "attention_mask.h"
#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { IGNORED_LABEL = -1 };  // a target that takes no part in the loss

// ---- elementwise ----
void op_fill(Tensor y, double value);       // y = value
void op_copy(Tensor y, Tensor x);           // y = x, converted to y's dtype (any dtype to any)
void op_add(Tensor y, Tensor a, Tensor b);  // y = a + b; y may alias either
void op_accumulate(Tensor y, Tensor x);     // y += x; the dtypes may differ (f32 accumulators of bf16)
void op_scale(Tensor y, double factor);     // y = factor y

// ---- reductions to the host (they wait for the device) ----
double op_sum(Tensor x);          // in f64
double op_sum_squares(Tensor x);  // in f64; NaN and infinity come through

// ---- the same to a number on the device, for which nobody waits: y (1) f64 ----
void op_add_sum(Tensor y, Tensor x, double factor);  // y += factor * sum of x, the sum in f64
// y (ranges) f64 = the sum of x^2 over each range of x, all in one pass; a range's bits depend on its own
// elements alone.
typedef struct FlatRange {
    int64_t first, count;
} FlatRange;
void op_squares_of_ranges(Tensor y, Tensor x, const FlatRange *ranges);

// ---- matrix multiply:  C (m, n) = A B + beta C,  A is (m, k), or (k, m) if transpose_a; B likewise ----
void op_matmul(Tensor c, Tensor a, Tensor b, bool transpose_a, bool transpose_b,
               double beta);  // beta is 0 or 1
// Several products of one form, of one a with several b, or of several a with one b: to the last bit what
// op_matmul makes of each, and what they share is read once. No c lies over any operand.
void op_matmuls(const Tensor *c, const Tensor *a, int as, const Tensor *b, int bs, bool transpose_a,
                bool transpose_b, double beta);

// ---- embedding: weight (v, h), tokens (n) i32 in [0, v) ----
void op_embedding_forward(Tensor y, Tensor tokens, Tensor weight);  // y (n, h) = weight[tokens]
void op_embedding_backward(Tensor dweight, Tensor dy,
                           Tensor tokens);  // dweight[tokens[i]] += dy[i], in order of i

// ---- RMSNorm: y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps);  x, y (n, h), weight (h) ----
// rstd (n) is f32, or f64 for f64 storage.
void op_rmsnorm_forward(Tensor y, Tensor rstd, Tensor x, Tensor weight, double eps);
// dx = dresidual + d(norm)/dx dy;  dweight += . dresidual may be {0} (zero), dx may alias dresidual or dy.
void op_rmsnorm_backward(Tensor dx, Tensor dweight, Tensor dresidual, Tensor dy, Tensor x, Tensor weight,
                         Tensor rstd);

// ---- RoPE, half-split as in Hugging Face: dims i and i + d/2 of each head turn by position *
// theta^(-2i/d)
// ---- x (n, heads * d) in place; positions (n) i32. direction +1 forward, -1 backward (the inverse
// rotation).
// Llama 3.1 stretches it to contexts `factor` times as long as the original ones: dims that turn less than
// `low` times over the original positions turn that much slower, those that turn more than `high` times as
// before, and between them what lies between. factor 0 or 1: no dim is slower.
typedef struct Rope {
    double theta;
    double factor, low, high, original;
} Rope;
void op_rope(Tensor x, Tensor positions, int64_t head_size, Rope rope, int direction);
// What dims i and i + d/2 turn by from one position to the next.
double rope_frequency(Rope rope, int64_t i, int64_t head_size);

// ---- causal attention of b sequences of s tokens: q, o (b s, a d); k, v (b s, kv d); a divisible by kv
// ---- query head j reads key/value head j / (a / kv); scores are scaled by 1 / sqrt(d).
typedef struct AttentionShape {
    int64_t b, s, heads, kv_heads, head_size;
} AttentionShape;
// probs (b, a, s, s) = softmax of the masked scores, kept for backward; what lies above the diagonal is
// the back end's own, and no part of the contract. o = probs v
void op_attention_forward(Tensor o, Tensor probs, Tensor q, Tensor k, Tensor v, AttentionShape shape);
// probs alone, bit for bit as op_attention_forward makes them: what selective recomputation repeats
void op_attention_probs(Tensor probs, Tensor q, Tensor k, AttentionShape shape);
// dq, dk, dv (=) from d_o (b s, a d). dq may alias q, dk alias k, dv alias v.
void op_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor q, Tensor k, Tensor v,
                           Tensor probs, AttentionShape shape);

// ---- causal attention over a part of the keys: flash attention on one device, and what a rank of context
// ---- parallelism does with each chunk that reaches it (Milakov, Gimelshein 2018; Dao et al. 2022). No
// ---- scores are stored. Shapes: q, d_o, o (b s_q, a d); k, v (b s_k, kv d); lse, dots (b s_q, a).
// ---- o, lse, dots, dq, dk, dv are f32 whatever the storage (f64 for f64); op_copy rounds them once.
typedef struct AttentionHeads {
    int64_t heads, kv_heads, head_size;  // as in AttentionShape
} AttentionHeads;
// Merges a chunk into o and lse (both updated): after all chunks, in any order, o is the attention over
// all keys and lse the log-sum-exp of each query's scaled scores. They start as o = 0, lse = -infinity,
// and stay so in rows that have seen no key yet. 4 d FLOPs for each pair that the mask leaves; tiles that
// it empties are not read.
void op_attention_chunk_forward(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                                const AttentionMask *mask, AttentionHeads heads);
// dots (=) sum(o * d_o) over each query's head: what backward needs of o, the same for all chunks. o may
// be the accumulator or in storage.
void op_attention_chunk_dots(Tensor dots, Tensor o, Tensor d_o, AttentionHeads heads);
// dq (b s_q, a d), dk, dv (b s_k, kv d), accumulators, += those of one chunk; lse of all chunks together.
// Scores are computed again: 10 d FLOPs for each pair.
void op_attention_chunk_backward(Tensor dq, Tensor dk, Tensor dv, Tensor d_o, Tensor q, Tensor k, Tensor v,
                                 Tensor lse, Tensor dots, const AttentionMask *mask, AttentionHeads heads);

// ---- SwiGLU: act = silu(gate) * up, all (n, f) ----
void op_swiglu_forward(Tensor act, Tensor gate, Tensor up);
// dgate may alias gate, dup may alias up, dact may alias neither.
void op_swiglu_backward(Tensor dgate, Tensor dup, Tensor dact, Tensor gate, Tensor up);

// ---- softmax cross-entropy: logits (n, v), targets (n) i32 in [0, v) or IGNORED_LABEL ----
// losses (n) = lse - logits[target], 0 where ignored; lse (n) = log sum exp of the row. Both f32, or f64
// for f64.
void op_cross_entropy_forward(Tensor losses, Tensor lse, Tensor logits, Tensor targets);
// dlogits = scale * (softmax - onehot), 0 in ignored rows; may alias logits.
void op_cross_entropy_backward(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, double scale);
// What f16 loses there: of the elements of dlogits that were not zero before they were rounded, *all since
// the program began, returns how many were zero behind. Waits for the device.
double op_underflows(double *all);

// ---- the same over a part of the vocabulary: the rows of the table and columns of the logits that one of
// ---- several ranks stores. Tokens and targets are those of the whole vocabulary. What is stored beyond
// ---- `count` is padding: it is never read, and its gradient is 0.
typedef struct VocabularyPart {
    int64_t whole;         // tokens of the whole vocabulary
    int64_t first, count;  // those of this part
} VocabularyPart;
// y (n, h) = weight[token - first], 0 where another part has the token
void op_embedding_part_forward(Tensor y, Tensor tokens, Tensor weight, VocabularyPart part);
// dweight[token - first] += dy, in order of the tokens; others' are passed over
void op_embedding_part_backward(Tensor dweight, Tensor dy, Tensor tokens, VocabularyPart part);
// The loss in three steps, logits (n, columns); between them the maxima of all parts meet, then their
// sums. maxima (n) of each row, -inf if the part is empty. A NaN may be passed over: it is in the sums
// then.
void op_cross_entropy_part_maxima(Tensor maxima, Tensor logits, VocabularyPart part);
// sums (2, n): of exp(logit - maximum) over a row; and the target's logit, 0 if ignored or in another part
void op_cross_entropy_part_sums(Tensor sums, Tensor logits, Tensor maxima, Tensor targets,
                                VocabularyPart part);
// Of all parts together: lse (n) = maximum + log(sum), losses (n) = lse - target's logit, 0 where ignored
void op_cross_entropy_part_losses(Tensor losses, Tensor lse, Tensor maxima, Tensor sums, Tensor targets);
// As op_cross_entropy_backward, for the part's columns; 0 in padding.
void op_cross_entropy_part_backward(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, double scale,
                                    VocabularyPart part);

// ---- what several ranks have sent: y (…) = x[0] + x[1] + …, x (parts, …), in order, rounded once ----
void op_sum_parts(Tensor y, Tensor x, int64_t parts);

// ---- columns, as heads, split over ranks ----

// Groups of w columns of (n, c), each to parts / (c / w) parts in a row:
// y (parts, n, w): part i = columns [g w, g w + w) of x (n, c),  g = i (c / w) / parts
void op_split_columns(Tensor y, Tensor x);
// Its inverse; where a group went to several parts, their sum, in order, rounded once. y (n, c), x (parts,
// n, w)
void op_join_columns(Tensor y, Tensor x);

// ---- mixture of experts: each of n tokens takes k of e experts (Shazeer et al. 2017) ----
// Logits and weights are f32, or f64 beside f64 storage. "Rows": the n k pairs of a token and an expert
// that it takes, in order of experts and, for each, of tokens.
typedef struct RouteRule {
    bool by_sigmoid;  // false: weights are the softmax over the logits of the chosen (Mixtral); true: their
                      // sigmoids, divided by the sum (DeepSeek-V3)
    int64_t groups, kept;  // the chosen are in the `kept` groups whose two best experts are best together
    double scale;          // multiplies the weights
} RouteRule;
// chosen (n, k) i32, best first, of equal ones that of the lower number; weights (n, k). bias (e), which
// counts in the choice alone, may be {0}.
void op_route_forward(Tensor chosen, Tensor weights, Tensor logits, Tensor bias, RouteRule rule);
// dlogits (n, e), 0 where an expert was not chosen
void op_route_backward(Tensor dlogits, Tensor dweights, Tensor weights, Tensor chosen, Tensor logits,
                       RouteRule rule);
// What asks for balance within each sequence of s tokens. Of a sequence, with f_e the share of its choices
// that expert e has got, times e, and P_e the mean of its scores (softmax; sigmoids over their sum):
//   auxiliary (sum over e of f_e P_e)  +  z mean over tokens of lse^2    (Fedus 2021; Zoph 2022)
typedef struct BalanceRule {
    double auxiliary, z;  // z: of a softmax alone
    double scale;         // of the gradient
} BalanceRule;
// losses (n) of the tokens, whose sum over a sequence is its loss; dlogits (n, e) += scale d(loss), in
// which f is a constant
void op_route_balance(Tensor losses, Tensor dlogits, Tensor logits, Tensor chosen, int64_t s,
                      BalanceRule balance, RouteRule rule);
// What is left of chosen (n, k) where each of e experts has room for so many pairs of each sequence of s
// tokens, the first ones in order: the pairs beyond are of number e.
void op_route_capacity(Tensor left, Tensor chosen, int64_t s, int64_t e, int64_t room);
// tokens (n k) i32: of each row; place (n, k) i32: the row of each pair; counts (e) i32: rows of each one
void op_route_order(Tensor tokens, Tensor place, Tensor counts, Tensor chosen);
// Of e experts the first `each` are in node 0, the next ones in node 1, …; nodes (n, m) i32: those of
// chosen (n, k), each once, in the order of first use; behind them `count`, of which there are.
void op_route_nodes(Tensor nodes, Tensor chosen, int64_t each, int64_t count);
// Of chosen (n, k) those of the experts first … first + count - 1, counted from 0; `count` for the others.
void op_route_within(Tensor left, Tensor chosen, int64_t first, int64_t count);
void op_gather_rows(Tensor y, Tensor x, Tensor index);  // y[i] = x[index[i]]; x may be i32
// y[i] = sum over j, in order, of weights[i, j] z[place[i, j]]; weights {0}: of z alone, the inverse of
// gathering rows by `tokens`. z may have fewer rows than place has numbers: those beyond count as zeros.
void op_combine_forward(Tensor y, Tensor z, Tensor place, Tensor weights);
// dz[place[i, j]] = weights[i, j] dy[i];  dweights[i, j] = <dy[i], z[place[i, j]]>, 0 beyond the rows of z
void op_combine_backward(Tensor dz, Tensor dweights, Tensor dy, Tensor z, Tensor place, Tensor weights);

// ---- fewer bits: random rounding, and 8-bit codes with scales (Micikevicius et al. 2022) ----
// Which random number each element gets: that of its place in the whole weight and of the step, whoever
// stores it. Element i of the tensor is element first + i of what a rank stores, rows of `columns`; there
// element (0, 0) is number `origin` of the whole, whose rows have whole_columns.
typedef struct RandomPlace {
    uint64_t seed, stream;
    int64_t step, first, columns, origin, whole_columns;
} RandomPlace;
// y (bf16) = one of the two neighbours of x (f32): the upper one with the probability (x - lower) / step
void op_round_stochastic(Tensor y, Tensor x, RandomPlace place);

// Elements of a matrix that share a scale: so many rows and columns; 0: all of them. The last tiles may be
// smaller. "x^T": where `transpose`, the codes are those of x's transpose, and tiles are of that.
typedef struct Tile {
    int64_t rows, columns;
} Tile;
// scale = amax / (largest number of the codes' dtype); of an amax of 0, or that is not finite: 1.
typedef enum ScaleRule { SCALE_REAL, SCALE_POWER_OF_TWO } ScaleRule;  // rounded up: nothing saturates
int64_t tiles_of(int64_t size, int64_t of_tile);
// amax (tiles of rows, tiles of columns) f32 = max(amax, the largest |x| of the tile); NaN if it holds one
void op_tile_amax(Tensor amax, Tensor x, bool transpose, Tile tile);
void op_tile_scale(Tensor scale, Tensor amax, DType codes, ScaleRule rule);
// codes (e4m3 or e5m2) = x / scale, to nearest; what is too large becomes the largest
void op_encode(Tensor codes, Tensor x, Tensor scale, bool transpose, Tile tile);
void op_decode(Tensor y, Tensor codes, Tensor scale, Tile tile);  // y = codes * scale
// c (m, n) = beta c + sum over k of a (m, k) b (n, k), both as codes, scaled: what an 8-bit tensor core
// does, which wants both operands with k in rows. Products of codes are exact; a partial sum ends with
// each tile, is scaled, and is added in f32 (f64 for f64 c).
typedef struct CodesSum {
    int bits;         // of a partial sum, cut off after every 32 products as on a Hopper; 0: f32
    int64_t promote;  // products after which a partial sum goes to f32 at the latest; 0: k, in f32
} CodesSum;
// A `promote`: k, and tensor cores may keep the sum in what they have, the "fast accumulation" that
// Transformer Engine uses forward; f32 on a CPU.
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
// m, v and master are f32 (f64 for f64 values). Without master ({0}) the value itself is stepped; with it,
// the master is, and value = master rounded. grad may have another dtype than value. Decoupled weight
// decay (Loshchilov, Hutter 2019), as torch.optim.AdamW.
void op_adamw(Tensor value, Tensor master, Tensor m, Tensor v, Tensor grad, AdamW hyper);
// value -= lr * grad_scale * grad, on the master if there is one
void op_sgd(Tensor value, Tensor master, Tensor grad, double lr, double grad_scale);

#ifdef __cplusplus
}
#endif
#endif
