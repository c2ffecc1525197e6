// formats.c: the number formats of training, from float32 to FP8, bit by bit. Playbook: "Mixed Precision
// Training".
//
// A number is a sign, E bits of exponent e and M bits of mantissa f:
//
//     float32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
//     bfloat16  s eeeeeeee mmmmmmm                     float32's range
//     float16   s eeeee mmmmmmmmmm                     more digits, less range
//     e4m3      s eeee mmm                             for weights and activations
//     e5m2      s eeeee mm                             for gradients: float16's range
//
//     e > 0   (-1)^s  2^(e - bias)  (1 + f / 2^M)      normal: 2^M numbers from each power of two on
//     e = 0   (-1)^s  2^(1 - bias)  (f / 2^M)          subnormal: in equal steps down to 0
//
// So the exponent's bits buy range, the mantissa's bits resolution. Epsilon is the step from 1 to the next
// number, 2^-M. To store x is to round it:
//
//     to nearest   the number closest to x, ties to an even mantissa: off by at most half a step
//     stochastic   the one above with probability (x - below) / step: right on average, E[round(x)] = x
//
// Rounded to nearest, a weight in bf16 loses every update below half a step, however many there are;
// rounded stochastically it does not. Beyond the largest number bfloat16 and float16 become infinity; what
// training stores in 8 bits saturates, and e4m3 has no infinity: of those codes only the last is NaN.
// Bytes sent: none.
// Run: build/08_mixed_precision/formats                (--value 0.1, --svg points.svg)
// Last line: PASS formats: five formats are what their bits say …
#include <math.h>
#include <stdlib.h>

#include "report/report.h"
#include "report/svg.h"
#include "tensor/rng.h"
#include "tensor/tensor.h"

#ifndef NO_MAIN

typedef struct Format {
    const char *name;
    DType dtype;
    int exponent, mantissa, bias;  // bits of the two fields; 2^(e - bias) is their power of two
    bool infinity;   // the highest exponent is infinity and NaN; else its last code alone is NaN
    bool saturates;  // what is beyond the largest number becomes the largest
} Format;

static const Format formats[] = {
    {"float32", F32, 8, 23, 127, true, false},  {"float16", F16, 5, 10, 15, true, false},
    {"bfloat16", BF16, 8, 7, 127, true, false}, {"e4m3", E4M3, 4, 3, 7, false, true},
    {"e5m2", E5M2, 5, 2, 15, true, true},
};
enum { FORMATS = sizeof formats / sizeof *formats, POINTS = 10000 };

// ---- what a code means ----

static double value_of(const Format *f, uint32_t code) {
    int fraction = (int)(code & ((1u << f->mantissa) - 1));
    int exponent = (int)(code >> f->mantissa & ((1u << f->exponent) - 1));
    double sign = code >> (f->mantissa + f->exponent) & 1 ? -1 : 1;
    bool highest = exponent == (1 << f->exponent) - 1;
    if (highest && f->infinity) return fraction ? NAN : sign * INFINITY;
    if (highest && fraction == (1 << f->mantissa) - 1) return NAN;
    if (exponent == 0) return sign * ldexp(fraction, 1 - f->bias - f->mantissa);
    return sign * ldexp((1 << f->mantissa) + fraction, exponent - f->bias - f->mantissa);
}

// The codes of positive numbers count upwards from 0, so the largest number comes just before the first code
// that is not a number.
static uint32_t largest_code(const Format *f) {
    uint32_t code = ((1u << f->exponent) - 1) << f->mantissa;  // the first with the highest exponent
    while (code < 1u << (f->exponent + f->mantissa) && isfinite(value_of(f, code))) code++;
    return code - 1;
}
static double largest(const Format *f) { return value_of(f, largest_code(f)); }
static double smallest_normal(const Format *f) { return value_of(f, 1u << f->mantissa); }
static double smallest(const Format *f) { return value_of(f, 1); }

// Positive numbers have their codes in order.
static int64_t numbers_between_1_and_2(const Format *f) {
    uint32_t one = (uint32_t)f->bias << f->mantissa, code = one + 1;
    while (value_of(f, code) < 2) code++;
    return code - one - 1;
}

// ---- rounding ----

// From one number to the next around x.
static double step_at(const Format *f, double x) {
    int power;
    frexp(x, &power);  // |x| is at least 2^(power - 1), and below 2^power
    return ldexp(1, (int)fmax(power - 1, 1 - f->bias) - f->mantissa);
}

static double bounded(const Format *f, double x) {
    if (!(fabs(x) > largest(f))) return x;
    return copysign(f->saturates ? largest(f) : INFINITY, x);
}

static double round_to_nearest(const Format *f, double x) {
    if (!isfinite(x)) return bounded(f, x);
    double step = step_at(f, x);
    return bounded(f, step * nearbyint(x / step));  // a tie goes to the even multiple
}

// uniform: a random number in [0, 1).
static double round_stochastic(const Format *f, double x, double uniform) {
    double step = step_at(f, x);
    return bounded(f, step * floor(x / step + uniform));
}

// As training stores it.
static double stored(const Format *f, double x) {
    char code[8];
    dtype_convert(code, f->dtype, &x, F64, 1);
    dtype_convert(&x, F64, code, f->dtype, 1);
    return x;
}

// ---- the proof ----

// Of the conversions that training uses (tensor/dtype.c): each code of the 8- and 16-bit formats has the
// value of its fields, and each boundary between two codes is where this file's rounding puts it. (A float64
// number reaches them by way of float32: rounded twice, it may be one step off.)

static bool same(double x, double y) { return isnan(x) ? isnan(y) : x == y && signbit(x) == signbit(y); }

// All codes of a format; of float32, with four billion, every exponent with some mantissas.
static uint32_t stride(const Format *f) { return f->dtype == F32 ? 99991 : 1; }

static bool check_codes(const Format *f) {
    uint64_t codes = 1ull << (1 + f->exponent + f->mantissa), wrong = 0, first = 0;
    for (uint64_t code = 0; code < codes; code += stride(f)) {
        uint32_t c = (uint32_t)code;  // its low bytes are the code: the machine is little-endian
        double x;
        dtype_convert(&x, F64, &c, f->dtype, 1);
        if (!same(x, value_of(f, c)) && wrong++ == 0) first = code;
    }
    return report_that(wrong == 0,
                       "%s: %ld codes have another value than their fields say; the first is %#lx, %g",
                       f->name, (long)wrong, (long)first, value_of(f, (uint32_t)first));
}

// Rounding is monotonic, so it is enough to check it at each boundary: at the numbers themselves, halfway
// between two, and next to halfway on both sides.
static void check_rounding(const Format *f) {
    uint64_t wrong = 0;
    double first = 0;
    for (uint32_t code = 0; code < largest_code(f); code += stride(f)) {
        double low = value_of(f, code), high = value_of(f, code + 1), half = (low + high) / 2;
        bool wide = f->dtype == F32;  // others are converted by way of f32
        double below = wide ? nextafter(half, 0) : nextafterf((float)half, 0),
               above = wide ? nextafter(half, INFINITY) : nextafterf((float)half, INFINITY),
               near[] = {low, half, below, above, high};
        for (int i = 0; i < 5; i++)
            for (int sign = -1; sign <= 1; sign += 2)
                if (!same(stored(f, sign * near[i]), round_to_nearest(f, sign * near[i])) && wrong++ == 0)
                    first = sign * near[i];
    }
    double top = largest(f), end[] = {top + 0.49 * step_at(f, top),
                                      top + 0.5 * step_at(f, top),
                                      4 * top,
                                      INFINITY,
                                      NAN,
                                      0.0,
                                      -0.0};
    for (size_t i = 0; i < sizeof end / sizeof *end; i++)
        if (!same(stored(f, end[i]), round_to_nearest(f, end[i])) && wrong++ == 0) first = end[i];
    report_that(wrong == 0,
                "%s: %ld numbers are rounded to others than the nearest; the first is %.17g, to %.17g and "
                "not %.17g",
                f->name, (long)wrong, first, round_to_nearest(f, first), stored(f, first));
}

// The mean over evenly spread random numbers is x itself, at every eighth of a step, on both sides of 0.
static void check_unbiased(const Format *f) {
    enum { EVEN = 8 };
    uint64_t wrong = 0;
    for (uint32_t code = 0; code < largest_code(f); code += stride(f))
        for (int eighth = -EVEN + 1; eighth < EVEN; eighth++) {
            double low = value_of(f, code), step = value_of(f, code + 1) - low, sum = 0;
            double x = copysign(low + step * abs(eighth) / EVEN, eighth);
            for (int i = 0; i < EVEN; i++) sum += round_stochastic(f, x, (i + 0.5) / EVEN);
            wrong += sum / EVEN != x;
        }
    double beyond = round_stochastic(f, 4 * largest(f), 0), end = bounded(f, 4 * largest(f));
    report_that(beyond == end, "%s: what is beyond the largest number is rounded to %g, and not to %g",
                f->name, beyond, end);
    report_that(wrong == 0, "%s: %ld numbers are rounded stochastically to another mean", f->name,
                (long)wrong);
}

// ---- the tables ----

static void show_ranges(void) {
    say("             bits  sign exponent mantissa      largest   smallest normal, subnormal   powers of "
        "ten");
    for (const Format *f = formats; f < formats + FORMATS; f++)
        say("%-12s %4d %5d %8d %8d %12.5g %17.3g %10.3g %15.1f", f->name, 1 + f->exponent + f->mantissa, 1,
            f->exponent, f->mantissa, largest(f), smallest_normal(f), smallest(f),
            log10(largest(f) / smallest(f)));
}

static void show_resolution(void) {
    say("\n             epsilon    numbers between 1 and 2   beyond the largest   NaN codes");
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        int64_t between = numbers_between_1_and_2(f);
        double epsilon = value_of(f, ((uint32_t)f->bias << f->mantissa) + 1) - 1;
        uint32_t codes = 1u << (f->exponent + f->mantissa), numbers = largest_code(f) + 1;
        say("%-12s %-10.3g %22ld   %18s %11ld", f->name, epsilon, (long)between,
            f->saturates ? "the largest" : "infinity", 2 * (long)(codes - numbers - f->infinity));
        report_number(f->name, "epsilon", epsilon, "");
        report_number(f->name, "largest", largest(f), "");
    }
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        char *what = format_text("%s, numbers between 1 and 2", f->name);
        report_equal(what, ldexp(1, f->mantissa) - 1, (double)numbers_between_1_and_2(f), "");
        free(what);
    }
}

// sign, exponent and mantissa of a number of the format, as "0 0111 001"
static const char *bits_text(const Format *f, double x) {
    static char text[40];
    uint32_t code = 0;
    dtype_convert(&code, f->dtype, &x, F64, 1);
    char *at = text;
    for (int bit = f->exponent + f->mantissa; bit >= 0; bit--) {
        *at++ = code >> bit & 1 ? '1' : '0';
        if (bit == f->exponent + f->mantissa || bit == f->mantissa) *at++ = ' ';
    }
    *at = '\0';
    return text;
}

static void show_value(double x) {
    say("\n%g, stored\n             %-36s nearest             off by", x, "sign, exponent, mantissa");
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        double y = round_to_nearest(f, x);
        say("%-12s %-36s %-17.9g %8.3g%%", f->name, bits_text(f, y), y, x == 0 ? 0 : 100 * (y / x - 1));
    }
}

// Many updates of a quarter of a step each, to a weight of 1: all of them vanish, or none does on average.
static void show_updates(uint64_t seed) {
    enum { UPDATES = 256, RUNS = 1024 };
    say("\nA weight of 1, and %d updates of a quarter of epsilon each", UPDATES);
    say("             exact    to nearest    stochastic, mean of %d", RUNS);
    for (const Format *f = formats + 1; f < formats + FORMATS; f++) {
        double update = ldexp(0.25, -f->mantissa), exact = 1 + UPDATES * update, nearest = 1, mean = 0;
        for (int i = 0; i < UPDATES; i++) nearest = round_to_nearest(f, nearest + update);
        for (int run = 0; run < RUNS; run++) {
            double weight = 1;
            for (int i = 0; i < UPDATES; i++)
                weight = round_stochastic(f, weight + update,
                                          rng_uniform(seed, RNG_TEST, (uint64_t)(run * UPDATES + i)));
            mean += weight / RUNS;
        }
        say("%-12s %-8.5g %-13.5g %.5g", f->name, exact, nearest, mean);
        report_that(nearest == 1,
                    "%s: updates of a quarter of a step, to nearest, make %.9g of a weight of 1", f->name,
                    nearest);
        // A step is taken or not, with variance p (1 - p) step^2, and no step here is larger than the last.
        double deviation = step_at(f, exact) * sqrt(UPDATES * 0.25 / RUNS);
        report_that(fabs(mean - exact) < 5 * deviation,
                    "%s: stochastic rounding is off by %g, more than 5 x %g", f->name, mean - exact,
                    deviation);
    }
}

// ---- 10,000 points between 1 and 2, each rounded to nearest ----

// Which of `cells` between 1 and 2 have a point after rounding.
static void occupied(const Format *f, char *cell, int cells) {
    for (int i = 0; i < cells; i++) cell[i] = ' ';
    for (int i = 0; i < POINTS; i++) {
        double x = round_to_nearest(f, 1 + (double)i / (POINTS - 1));
        cell[(int)round((x - 1) * (cells - 1))] = '|';
    }
}

static void show_points(void) {
    enum { CELLS = 65 };
    char cell[CELLS + 1];
    cell[CELLS] = '\0';
    say("\n%d points between 1 and 2 after rounding", POINTS);
    for (const Format *f = formats; f < formats + FORMATS; f++) {
        occupied(f, cell, CELLS);
        say("%-12s %s", f->name, cell);
    }
    say("             1%*s2", CELLS - 2, "");
}

static void draw_points(const char *file) {
    enum { LEFT = 90, WIDTH = 1024, ROW = 34, TOP = 44, HEIGHT = TOP + ROW * FORMATS + 30 };
    char cell[WIDTH + 1];
    FILE *svg = svg_open("--svg", file, LEFT + WIDTH + 20, HEIGHT);
    fprintf(svg,
            "<style>\ntext{fill:#3d444d}.t{font-size:15px;font-weight:600}path{fill:#0969da}\n"
            "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}path{fill:#54aeff}}\n</style>\n"
            "<text class='t' x='%d' y='25'>10,000 points between 1 and 2, rounded to nearest</text>\n",
            LEFT);
    for (int row = 0; row < FORMATS; row++) {
        int y = TOP + ROW * row;
        occupied(&formats[row], cell, WIDTH + 1);
        fprintf(svg, "<text x='%d' y='%d' text-anchor='end'>%s</text>\n<path d='", LEFT - 10, y + 16,
                formats[row].name);
        for (int x = 0; x <= WIDTH; x++)
            if (cell[x] == '|') fprintf(svg, "M%d %dh1v24h-1z", LEFT + x, y);
        fprintf(svg, "'/>\n");
    }
    fprintf(svg, "<text x='%d' y='%d'>1</text><text x='%d' y='%d'>1.5</text><text x='%d' y='%d'>2</text>\n",
            LEFT - 3, HEIGHT - 12, LEFT + WIDTH / 2 - 8, HEIGHT - 12, LEFT + WIDTH - 3, HEIGHT - 12);
    svg_close(svg, "--svg", file);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    int64_t seed;
    double value;
    const char *svg = NULL, *json = NULL;
    Option table[] = {
        {"seed", OPTION_INT, &seed, "42", 0, 1e15, "", "seed of stochastic rounding", false},
        {"value", OPTION_REAL, &value, "0.1", -1e38, 1e38, "", "number to show as each format stores it",
         false},
        {"svg", OPTION_OUTPUT, &svg, NULL, 0, 0, "FILE", "draw the points between 1 and 2", false},
        {"json", OPTION_OUTPUT, &json, NULL, 0, 0, "FILE", "write every figure at full precision", false},
    };
    options_parse(argc, argv,
                  "Number formats from float32 to FP8: bits, range, resolution, rounding.\n"
                  "  formats --value 70000\n"
                  "  formats --svg points.svg",
                  table, sizeof table / sizeof *table);
    report_json(json);
    bool sound = true;
    for (const Format *f = formats; f < formats + FORMATS; f++) sound &= check_codes(f);
    if (sound) {  // all else asks for values, and counts codes up to the first that is not a number
        show_ranges();
        show_resolution();
        show_points();
        show_value(value);
        show_updates((uint64_t)seed);
        for (const Format *f = formats; f < formats + FORMATS; f++) check_rounding(f), check_unbiased(f);
        if (svg && base_rank() == 0) draw_points(svg);
    }
    return report_verdict(
        "five formats are what their bits say, and every float32 number is stored as the nearest");
}

#endif
