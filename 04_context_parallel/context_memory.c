// context_memory.c: what a rank needs as sequences grow. Playbook: "Context Parallelism".
//
// A step of Llama 3 8B, one sequence on N ranks, ZeRO-3 over dp x cp, full recomputation. Activations peak
// when backward begins, at the head: the inputs of all L blocks, the logits, and the gradients of the
// head's input (n h e) and of the last norm's weight (h e). That is what one device needs for n = s / N
// tokens (the most that a rank has), by 00_single_gpu's formulas:
//
//     kept(n) + n h e + h e      and the positions of s tokens, for the masks
//
// This is the same for all four methods, and linear in s. They differ in what attention holds of other ranks'
// tokens (the formula is in each method's file): a ring two chunks of s / N keys, Ulysses s keys of some
// heads, an all-gather s keys of all heads. Dry runs count both peaks, that of activations and that of
// everything; the first must equal the formula, to the byte.
//
// Bytes sent: none. This file has no main: all_gather_attention.c shows it.
#include <stdlib.h>

#include "00_single_gpu/formulas.h"
#include "context_parallel.h"
#include "report/svg.h"

enum { FIRST = 8192, POINTS = 6, LAYERS = 32 };  // FIRST tokens, and twice as many at each further point

// A layout, and what a rank of it needs.
typedef struct Growth {
    const char *name, *color, *dashes;
    ContextMethod method;
    bool alone, stored;  // whole sequences on each rank; scores stored
    double activations[POINTS], memory[POINTS];
} Growth;

static int64_t tokens_at(int point) { return (int64_t)FIRST << point; }

static double predicted_activations(const Growth *way, int cp, int64_t s) {
    Config own = context_llama(way->method, LAYERS, 0, 1);
    const SequenceLayout *layout = context_layout(&own);
    Price masks = {.blocks = 0};
    if (way->method == CONTEXT_ULYSSES) flash_price_positions(&masks, 1, s);
    for (int rank = 0; rank < cp; rank++) {
        int64_t tokens = layout->count(s, cp, rank);
        if (way->method != CONTEXT_ULYSSES) flash_price_positions(&masks, 1, tokens);
        if (tokens > own.seq) own.seq = tokens;
    }
    own.recompute = RECOMPUTE_FULL;
    // With stored scores a recomputed block holds more than the head.
    if (way->stored) return (double)peak_activation_bytes(&own, own.dtype);
    double row = (double)own.hidden * (double)dtype_size(BF16);
    return (double)kept_activation_bytes(&own) + (double)own.seq * row + row + price_kept(&masks);
}

// On the rank that needs most.
static void count(Growth *way, Mesh mesh, int point) {
    static const Technique *const stored[] = {&zero3, &recompute, NULL};
    const int64_t s = tokens_at(point);
    Memory memory = context_step(mesh, way->method, s, way->stored ? stored : context_layouts).memory;
    way->activations[point] = comm_max((double)memory.peak[MEMORY_ACTIVATION], mesh.world);
    way->memory[point] = comm_max((double)memory.peak_total, mesh.world);
    double predicted = predicted_activations(way, mesh.cp.size, s);
    report_that(way->activations[point] == predicted,
                "%s, s = %lld: %.0f bytes of activations at their peak, by the formula %.0f", way->name,
                (long long)s, way->activations[point], predicted);
}

// ---- the picture ----

enum { WIDTH = 960, HEIGHT = 440, LEFT = 76, RIGHT = 16, TOP = 76, BOTTOM = 46, GIGABYTES = 120 };

static double x_of(int point) { return LEFT + (double)(WIDTH - LEFT - RIGHT) * point / (POINTS - 1); }
static double y_of(double bytes) { return TOP + (HEIGHT - TOP - BOTTOM) * (1 - bytes / (1e9 * GIGABYTES)); }

static void draw_axes(FILE *svg, const Machine *machine) {
    for (int gigabytes = 0; gigabytes <= GIGABYTES; gigabytes += 20) {
        double y = y_of(1e9 * gigabytes);
        fprintf(svg, "<path class='grid' d='M%d %.1fH%d'/>\n", LEFT, y, WIDTH - RIGHT);
        fprintf(svg, "<text x='%d' y='%.1f' text-anchor='end'>%d GB</text>\n", LEFT - 8, y + 4, gigabytes);
    }
    for (int point = 0; point < POINTS; point++)
        fprintf(svg, "<text x='%.1f' y='%d' text-anchor='%s'>%lld</text>\n", x_of(point),
                HEIGHT - BOTTOM + 18, point + 1 < POINTS ? "middle" : "end", (long long)tokens_at(point));
    fprintf(svg, "<text x='%d' y='%d' text-anchor='end'>tokens of a sequence</text>\n", WIDTH - RIGHT,
            HEIGHT - 8);
    fprintf(svg, "<path class='level' d='M%d %.1fH%d'/>\n<text x='%d' y='%.1f'>the device has %s</text>\n",
            LEFT, y_of(machine->memory_bytes), WIDTH - RIGHT, LEFT + 6, y_of(machine->memory_bytes) - 5,
            bytes_text(machine->memory_bytes));
}

// A line ends where it leaves the picture.
static void draw_line(FILE *svg, const Growth *way, int x) {
    fprintf(svg, "<path class='line' clip-path='url(#plot)' stroke='%s' stroke-dasharray='%s' d='",
            way->color, way->dashes);
    for (int point = 0; point < POINTS; point++)
        fprintf(svg, "%c%.1f %.1f", point ? 'L' : 'M', x_of(point), y_of(way->memory[point]));
    fprintf(svg, "'/>\n<path class='line' stroke='%s' stroke-dasharray='%s' d='M%d 44h22'/>\n", way->color,
            way->dashes, x);
    fprintf(svg, "<text x='%d' y='48'>%s</text>\n", x + 28, way->name);
}

static void draw(const Growth *way, int ways, int ranks, const Machine *machine, const char *file) {
    FILE *svg = svg_open("--memory-svg", file, WIDTH, HEIGHT);
    fprintf(
        svg,
        "<style>\ntext{fill:#3d444d}.title{font-weight:600;font-size:15px}.line{fill:none;stroke-width:2}\n"
        ".grid{stroke:#8b949e;stroke-opacity:.35}.level{stroke:#3d444d;stroke-width:1.5}\n"
        "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.level{stroke:#d1d7e0}}\n</style>\n"
        "<clipPath id='plot'><path d='M%d %dH%dV%dH%dZ'/></clipPath>\n",
        LEFT, TOP, WIDTH, HEIGHT - BOTTOM, LEFT);
    fprintf(svg,
            "<text class='title' x='%d' y='22'>Peak memory of a rank: Llama 3 8B on %d ranks, ZeRO-3, full "
            "recomputation</text>\n",
            LEFT, ranks);
    draw_axes(svg, machine);
    for (int i = 0; i < ways; i++) draw_line(svg, &way[i], LEFT + i * (WIDTH - LEFT - RIGHT) / ways);
    svg_close(svg, "--memory-svg", file);
}

// ---- the table ----

static void print_table(const Growth *way, int ways, int ranks) {
    say("\nPeak memory of a rank, one sequence of Llama 3 8B on %d ranks, ZeRO-3, full recomputation:\n",
        ranks);
    char *head = format_text("  %9s %12s", "tokens", "activations");
    for (int point = -1; point < POINTS; point++) {
        char *line = point < 0 ? head
                               : format_text("  %9lld %12s", (long long)tokens_at(point),
                                             bytes_text(way->activations[point]));
        for (int i = 0; i < ways; i++) {
            char *longer =
                format_text("%s %14s", line, point < 0 ? way[i].name : bytes_text(way[i].memory[point]));
            free(line);
            line = longer;
        }
        say("%s", line);
        free(line);
    }
    say("  (activations: of a rank of cp %d, by the formula; cp 1: as many sequences as ranks at once;\n"
        "  stored: with the scores of all pairs)\n",
        ranks);
}

void context_memory(Mesh mesh, const Config *config) {
    const char *file = config_text(config, "memory-svg");
    Growth all[] = {
        // Where lines coincide, all of them show.
        {.name = "ring", .color = "#4269d0", .dashes = "none", .method = CONTEXT_RING},
        {.name = "zigzag", .color = "#6cc5b0", .dashes = "12 12", .method = CONTEXT_ZIGZAG},
        {.name = "all-gather", .color = "#ff725c", .dashes = "none", .method = CONTEXT_ALL_GATHER},
        {.name = "ulysses", .color = "#a463f2", .dashes = "4 20", .method = CONTEXT_ULYSSES},
        {.name = "cp 1", .color = "#efb118", .dashes = "none", .alone = true},
        {.name = "cp 1, stored", .color = "#8b949e", .dashes = "none", .alone = true, .stored = true}};
    if (!file) return;
    Mesh ring = mesh_new((MeshShape){.cp = mesh.world.size}),
         apart = mesh_new((MeshShape){.dp = mesh.world.size});
    int ways = 0;
    device_dry_run(true);
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        if (!context_fits(ring.cp.size, all[i].method)) continue;
        Growth *way = &all[ways++];
        *way = all[i];
        for (int point = 0; point < POINTS; point++) count(way, way->alone ? apart : ring, point);
        report_series(way->name, way->memory, POINTS);
    }
    device_dry_run(false);
    print_table(all, ways, ring.cp.size);
    if (mesh.world.rank == 0) draw(all, ways, ring.cp.size, machine_find(config->machine), file);
    say("wrote %s", file);
}
