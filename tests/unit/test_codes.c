// test_codes.c: 8-bit codes with scales against the same arithmetic written out in f64: a tile's amax, the
// scale, each code, and the product, which is exact up to the order of its sum. And special cases: zeros,
// infinities, NaN, and numbers beyond the largest code. TAP.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "tensor/ops.h"
#include "tensor/rng.h"

enum { M = 21, N = 13, K = 70 };

static Tensor tensor_of(DType dtype, int64_t rows, int64_t columns, const double *x) {
    Tensor t = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(rows, columns));
    tensor_from_doubles(t, x);
    return t;
}

static void random_numbers(double *x, int64_t count, uint64_t key) {
    for (int64_t i = 0; i < count; i++)
        x[i] = (double)(float)rng_normal(key, RNG_TEST, (uint64_t)i) * ((uint64_t)i % 7 ? 1 : 30);
}

// Element (i, j) of the matrix as the codes are stored.
static double seen(const double *x, int64_t rows, int64_t columns, bool turned, int64_t i, int64_t j) {
    (void)rows;
    return turned ? x[j * columns + i] : x[i * columns + j];
}

static double largest_code(DType codes) { return codes == E4M3 ? 448 : 57344; }

// The scale of the tile at (i, j), as ops.h defines it.
static float scale_at(const double *x, int64_t rows, int64_t columns, bool turned, Tile tile, int64_t i,
                      int64_t j, DType codes, ScaleRule rule) {
    int64_t height = turned ? columns : rows, width = turned ? rows : columns;
    int64_t tall = tile.rows ? tile.rows : height, wide = tile.columns ? tile.columns : width;
    double most = 0;
    for (int64_t a = i / tall * tall; a < (i / tall + 1) * tall && a < height; a++)
        for (int64_t b = j / wide * wide; b < (j / wide + 1) * wide && b < width; b++)
            most = fmax(most, fabs(seen(x, rows, columns, turned, a, b)));
    float scale = most > 0 ? (float)most / (float)largest_code(codes) : 1;
    return rule == SCALE_REAL ? scale : (float)exp2(ceil(log2((double)scale)));
}

static double nearest(double x, DType codes) {
    uint8_t code;
    dtype_convert(&code, codes, &x, F64, 1);
    dtype_convert(&x, F64, &code, codes, 1);
    return x;
}

static Codes codes_of(const double *x, int64_t rows, int64_t columns, bool turned, Tile tile, DType dtype,
                      ScaleRule rule, double *value) {
    int64_t height = turned ? columns : rows, width = turned ? rows : columns;
    Tensor t = tensor_of(F32, rows, columns, x);
    Codes c = {.tile = tile};
    c.scale = tensor_new(MEMORY_ACTIVATION, F32,
                         SHAPE(tiles_of(height, tile.rows), tiles_of(width, tile.columns)));
    c.codes = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(height, width));
    op_fill(c.scale, 0);
    op_tile_amax(c.scale, t, turned, tile);
    op_tile_scale(c.scale, c.scale, dtype, rule);
    op_encode(c.codes, t, c.scale, turned, tile);
    double got[M * K];
    tensor_to_doubles(got, c.codes);
    for (int64_t i = 0; i < height; i++)
        for (int64_t j = 0; j < width; j++) {
            float scale = scale_at(x, rows, columns, turned, tile, i, j, dtype, rule);
            double code = nearest((float)seen(x, rows, columns, turned, i, j) / scale, dtype);
            assert_true(got[i * width + j] == code);
            value[i * width + j] = code * (double)scale;
        }
    Tensor back = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(height, width));
    op_decode(back, c.codes, c.scale, tile);
    tensor_to_doubles(got, back);
    for (int64_t i = 0; i < height * width; i++)
        assert_true(fabs(got[i] - value[i]) <= 1e-7 * fabs(value[i]));
    tensor_free(&back);
    tensor_free(&t);
    return c;
}

// Every shape of tile, transposed and not, with both kinds of scale.
static void products_are_exact(void **state) {
    (void)state;
    static const struct {
        Tile a, b;
        ScaleRule rule;
        int64_t promote;
    } ways[] = {{{0, 0}, {0, 0}, SCALE_REAL, 0},
                {{0, 0}, {0, 0}, SCALE_REAL, 32},
                {{1, 16}, {16, 16}, SCALE_REAL, 16},
                {{1, 16}, {16, 16}, SCALE_REAL, 32},
                {{1, 32}, {1, 32}, SCALE_POWER_OF_TWO, 0}};
    double x[M * K], w[N * K], a[M * K], b[M * K], got[M * N];
    random_numbers(x, M * K, 1);
    random_numbers(w, N * K, 2);
    for (int64_t i = 0; i < 16; i++) x[i] = w[i] = 0;  // a tile of zeros
    for (int how = 0; how < 10; how++) {
        bool turned = how >= 5;
        const DType of_b = how % 2 ? E5M2 : E4M3;
        Codes left = codes_of(x, turned ? K : M, turned ? M : K, turned, ways[how % 5].a, E4M3,
                              ways[how % 5].rule, a);
        Codes right = codes_of(w, turned ? K : N, turned ? N : K, turned, ways[how % 5].b, of_b,
                               ways[how % 5].rule, b);
        Tensor c = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(M, N)),
               narrow = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(M, N));
        op_fill(c, 0.5), op_fill(narrow, 0);
        op_matmul_codes(c, left, right, (CodesSum){0, ways[how % 5].promote}, 1);
        op_matmul_codes(narrow, left, right, (CodesSum){0, ways[how % 5].promote}, 0);
        for (int wide = 0; wide < 2; wide++) {
            tensor_to_doubles(got, wide ? c : narrow);
            for (int64_t i = 0; i < M; i++)
                for (int64_t j = 0; j < N; j++) {
                    double sum = wide ? 0.5 : 0, size = 1;
                    for (int64_t k = 0; k < K; k++) {
                        sum += a[i * K + k] * b[j * K + k];
                        size += fabs(a[i * K + k] * b[j * K + k]);
                    }
                    assert_true(fabs(got[i * N + j] - sum) <= (wide ? 1e-14 : 1e-6) * size);
                }
        }
        tensor_free(&c), tensor_free(&narrow);
        tensor_free(&left.codes), tensor_free(&left.scale), tensor_free(&right.codes),
            tensor_free(&right.scale);
    }
}

// A tile's amax is stored as the largest code. That code times the scale, rounded to f32, gives the same
// scale again, for each amax between two powers of two in f32: so decoded numbers may be encoded once more.
static void scales_are_found_again(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    enum { EVERY = 61 };
#else
    enum { EVERY = 1 };
#endif
    enum { PART = 1 << 16 };
    static double x[PART], scale[PART], again[PART];
    Tensor amax = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(1, PART));
    for (int64_t first = 0; first < 1 << 23; first += (int64_t)PART * EVERY)
        for (DType dtype = E4M3; dtype <= E5M2; dtype++) {
            for (int i = 0; i < PART; i++) x[i] = 1 + ldexp((double)(first + i), -23);
            tensor_from_doubles(amax, x);
            op_tile_scale(amax, amax, dtype, SCALE_REAL);
            tensor_to_doubles(scale, amax);
            for (int i = 0; i < PART; i++) x[i] = (float)(largest_code(dtype) * scale[i]);
            tensor_from_doubles(amax, x);
            op_tile_scale(amax, amax, dtype, SCALE_REAL);
            tensor_to_doubles(again, amax);
            assert_memory_equal(again, scale, sizeof scale);
        }
    tensor_free(&amax);
}

// A tile without a scale of its own gets 1; a number too large for a given scale saturates.
static void zeros_infinities_and_saturation(void **state) {
    (void)state;
    const double x[] = {0, -0.0, 1e-45, -3, INFINITY, -INFINITY, NAN, 1e6};
    double got[8];
    const struct {
        DType dtype;
        double largest;
    } kinds[] = {{E4M3, 448}, {E5M2, 57344}};
    for (int kind = 0; kind < 2; kind++) {
        DType dtype = kinds[kind].dtype;
        Tensor t = tensor_of(F32, 8, 1, x), scale = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(8, 1));
        Tensor codes = tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(8, 1));
        op_fill(scale, 0);
        op_tile_amax(scale, t, false, (Tile){1, 1});
        tensor_to_doubles(got, scale);
        for (int i = 0; i < 8; i++)
            assert_true(isnan(x[i]) ? isnan(got[i]) : got[i] == fabs((double)(float)x[i]));
        op_tile_scale(scale, scale, dtype, SCALE_REAL);
        tensor_to_doubles(got, scale);
        const double want[] = {1, 1, 0x1p-126, 3 / kinds[kind].largest, 1, 1, 1, 1e6 / kinds[kind].largest};
        for (int i = 0; i < 8; i++) assert_true(got[i] == (double)(float)want[i]);
        op_fill(scale, 2);
        op_encode(codes, t, scale, false, (Tile){1, 1});
        tensor_to_doubles(got, codes);
        const double most = kinds[kind].largest, code[] = {0, 0, 0, -1.5, most, -most, NAN, most};
        for (int i = 0; i < 8; i++) assert_true(isnan(code[i]) ? isnan(got[i]) : got[i] == code[i]);
        // the amax of a tile with a NaN is NaN, and stays NaN
        Tensor one = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(1, 1));
        op_fill(one, 1e9);
        op_tile_amax(one, t, false, (Tile){0, 0});
        tensor_to_doubles(got, one);
        assert_true(isnan(got[0]));
        tensor_free(&t), tensor_free(&scale), tensor_free(&codes), tensor_free(&one);
    }
}

static void round_in_no_place(const void *y) {
    const Tensor *t = y;
    op_round_stochastic(t[0], t[1], (RandomPlace){.step = 1});
}

// Each element gets the random number of its place: parts are rounded like the whole, and correctly on
// average.
static void random_rounding_knows_places(void **state) {
    (void)state;
    enum { ROWS = 40, COLUMNS = 50, ALL = ROWS * COLUMNS, FIRST = 20, WIDE = 30 };
    double x[ALL], whole[ALL], part[ALL], mean = 0;
    for (int i = 0; i < ALL; i++) x[i] = 1 + 0x1p-9;  // a quarter of the way to the next
    Tensor t = tensor_of(F32, ROWS, COLUMNS, x),
           y = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(ROWS, COLUMNS));
    RandomPlace place = {7, RNG_TEST, 3, 0, COLUMNS, 0, COLUMNS};
    op_round_stochastic(y, t, place);
    tensor_to_doubles(whole, y);
    for (int i = 0; i < ALL; i++) {
        assert_true(whole[i] == 1 || whole[i] == 1 + 0x1p-7);
        mean += whole[i] / ALL;
    }
    assert_true(fabs((mean - 1) / 0x1p-7 - 0.25) < 5 * sqrt(0.25 * 0.75 / ALL));
    // the columns FIRST … FIRST + WIDE - 1 of rows 3 on, from the second of them
    Tensor few = tensor_view(t, 0, SHAPE(5 * WIDE - 1)), to = tensor_view(y, 0, SHAPE(5 * WIDE - 1));
    op_round_stochastic(to, few, (RandomPlace){7, RNG_TEST, 3, 1, WIDE, 3 * COLUMNS + FIRST, COLUMNS});
    tensor_to_doubles(part, y);
    for (int i = 0; i < 5 * WIDE - 1; i++)
        assert_true(part[i] == whole[(3 + (i + 1) / WIDE) * COLUMNS + FIRST + (i + 1) % WIDE]);
    place.step = 4;
    op_round_stochastic(y, t, place);
    tensor_to_doubles(part, y);
    assert_true(memcmp(part, whole, sizeof whole) != 0);
    const char *why = refusal(round_in_no_place, (Tensor[]){y, t});
    assert_true(why && strstr(why, "round_stochastic: rows of 0 elements"));
    tensor_free(&t), tensor_free(&y);
}

// Places 2^32 elements apart have other numbers, and so have the steps: no weight is too large for that.
static void random_rounding_knows_places_beyond_2_32(void **state) {
    (void)state;
    enum { COUNT = 500, WAYS = 4 };
    const int64_t far = (int64_t)1 << 32;
    // of one column: an element's place is `first` + `origin` + its index
    const RandomPlace place[WAYS] = {{7, RNG_TEST, 3, 0, 1, 0, 1},
                                     {7, RNG_TEST, 3, 0, 1, far, 1},
                                     {7, RNG_TEST, 3, far, 1, 0, 1},
                                     {7, RNG_TEST, 4, 0, 1, 0, 1}};
    double x[COUNT], got[WAYS][COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = 1 + 0x1p-8;  // half of the way to the next
    Tensor t = tensor_of(F32, COUNT, 1, x), y = tensor_new(MEMORY_ACTIVATION, BF16, SHAPE(COUNT, 1));
    for (int i = 0; i < WAYS; i++) {
        op_round_stochastic(y, t, place[i]);
        tensor_to_doubles(got[i], y);
    }
    assert_memory_equal(got[1], got[2], sizeof *got);
    assert_memory_not_equal(got[0], got[1], sizeof *got);
    assert_memory_not_equal(got[0], got[3], sizeof *got);
    assert_memory_not_equal(got[1], got[3], sizeof *got);
    tensor_free(&t), tensor_free(&y);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_exact),
        cmocka_unit_test(scales_are_found_again),
        cmocka_unit_test(zeros_infinities_and_saturation),
        cmocka_unit_test(random_rounding_knows_places),
        cmocka_unit_test(random_rounding_knows_places_beyond_2_32),
    };
    return cmocka_run_group_tests_name("codes", tests, NULL, NULL);
}
