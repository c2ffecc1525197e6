// split_picture.c: which rank holds which part of a block's matrices, as an SVG.
//
// Nothing is drawn from a plan: every rank sends the others where its part of each weight begins and how
// large it is, by its table of weights after tensor_parallel_shard. A matrix is drawn as (in, out), so that x
// flows through it from left to right: shards of outputs are vertical stripes, shards of inputs horizontal.
// This file has no main: tensor_parallel.c calls it.
#include <math.h>

#include "report/svg.h"
#include "tensor/clock.h"
#include "tensor_parallel.h"

enum { MATRICES = 7, MOST_RANKS = 8 };
static const struct {
    int role;
    const char *name, *in, *out;
} matrix[MATRICES] = {{ROLE_Q, "Wq", "h", "a d"},     {ROLE_K, "Wk", "h", "kv d"},
                      {ROLE_V, "Wv", "h", "kv d"},    {ROLE_O, "Wo", "a d", "h"},
                      {ROLE_GATE, "Wgate", "h", "f"}, {ROLE_UP, "Wup", "h", "f"},
                      {ROLE_DOWN, "Wdown", "f", "h"}};

typedef struct Part {
    double first[2], shape[2], full[2];  // (out, in), as it is stored
} Part;

// The part of each rank in each matrix of the first block; every rank gets all of them.
static void gather_parts(const Model *m, Part part[MOST_RANKS][MATRICES]) {
    Part own[MATRICES];
    for (int i = 0; i < MATRICES; i++) {
        const Param *found = NULL;
        for (int j = m->params.count - 1; j >= 0; j--)
            if (m->params.param[j].role == matrix[i].role) found = &m->params.param[j];
        for (int dim = 0; dim < 2; dim++) {
            own[i].first[dim] = (double)found->first[dim];
            own[i].shape[dim] = (double)found->shape[dim];
            own[i].full[dim] = (double)found->full[dim];
        }
    }
    const int numbers = MATRICES * (int)(sizeof(Part) / sizeof(double));
    comm_values_of_all((const double *)own, numbers, (double *)part, m->mesh.tp);
}

// ---- drawing ----

static const char *const color[MOST_RANKS] = {"#4269d0", "#efb118", "#ff725c", "#6cc5b0",
                                              "#a463f2", "#97bbf5", "#9c6b4e", "#3ca951"};
enum { WIDTH = 960, HEIGHT = 452, SIDE = 96 };  // SIDE: pixels of h

// Sides grow with the square root of sizes, or the MLP would leave no room for attention.
static double pixels(double size, double h) { return SIDE * sqrt(size / h); }

static void draw_matrix(FILE *svg, const Part part[MOST_RANKS][MATRICES], int ranks, int i, double h,
                        double x, double middle) {
    const Part *first = &part[0][i];
    double wide = pixels(first->full[0], h), high = pixels(first->full[1], h), y = middle - high / 2;
    for (int rank = 0; rank < ranks; rank++) {
        const Part *p = &part[rank][i];
        fprintf(svg, "<rect class='part' fill='%s' x='%.1f' y='%.1f' width='%.1f' height='%.1f'/>\n",
                color[rank], x + wide * p->first[0] / p->full[0], y + high * p->first[1] / p->full[1],
                wide * p->shape[0] / p->full[0], high * p->shape[1] / p->full[1]);
    }
    fprintf(svg, "<text class='name' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n", x + wide / 2,
            y - 20, matrix[i].name);
    fprintf(svg, "<text class='small' x='%.1f' y='%.1f' text-anchor='middle'>(%s, %s)</text>\n",
            x + wide / 2, y - 6, matrix[i].in, matrix[i].out);
}

// A circle with an operator's name, f or f*, and below it what the operator does.
static void draw_operator(FILE *svg, double x, double y, const char *name, const char *below) {
    fprintf(svg, "<circle class='op' cx='%.1f' cy='%.1f' r='14'/>\n", x, y);
    fprintf(svg, "<text class='name' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n", x, y + 4, name);
    fprintf(svg, "<text class='small' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n", x, y + 30,
            below);
}

static void draw_arrow(FILE *svg, double from, double to, double y, const char *over) {
    fprintf(svg, "<path class='arrow' d='M%.1f %.1fH%.1f'/>\n", from, y, to);
    fprintf(svg, "<text class='small' x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n", (from + to) / 2,
            y - 8, over);
}

// x, f, the matrices sharded by columns, what each rank computes alone, the matrix sharded by rows, f*, and
// the sum.
static void draw_half(FILE *svg, const Part part[MOST_RANKS][MATRICES], int ranks, int first, int last,
                      double h, double y, const char *between) {
    double x = 150;
    draw_arrow(svg, 24, 96, y, "x (n, h)");
    draw_operator(svg, 112, y, "f", "");
    draw_arrow(svg, 128, x, y, "");
    for (int i = first; i < last; i++) {
        draw_matrix(svg, part, ranks, i, h, x, y);
        x += pixels(part[0][i].full[0], h) + 14;
    }
    draw_arrow(svg, x, x + 112, y, between);
    x += 120;
    draw_matrix(svg, part, ranks, last, h, x, y);
    x += pixels(part[0][last].full[0], h);
    draw_arrow(svg, x + 6, x + 72, y, "partial");
    draw_operator(svg, x + 88, y, "f*", "all-reduce");
    draw_arrow(svg, x + 104, x + 170, y, "(n, h)");
}

static void write_picture(const char *file, const Part part[MOST_RANKS][MATRICES], int ranks) {
    FILE *svg = svg_open("--svg", file, WIDTH, HEIGHT);
    fprintf(svg,
            "<style>\ntext{fill:#3d444d}.title{font-weight:600;font-size:15px}.name{font-weight:600}"
            ".small{font-size:11px}\n.part{stroke:#fff;stroke-width:.7}.arrow{stroke:#6e7781;stroke-width:"
            "1.5}\n"
            ".op{fill:none;stroke:#6e7781;stroke-width:1.5}\n"
            "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.part{stroke:#0d1117}}\n</style>\n");
    fprintf(svg,
            "<text class='title' x='24' y='24'>A block of Llama 3 8B on %d ranks: columns, then rows, "
            "and one sum for each half</text>\n",
            ranks);
    for (int rank = 0; rank < ranks; rank++) {
        fprintf(svg, "<rect fill='%s' x='%d' y='38' width='12' height='12' rx='2'/>\n", color[rank],
                24 + 80 * rank);
        fprintf(svg, "<text x='%d' y='48'>rank %d</text>\n", 42 + 80 * rank, rank);
    }
    double h = part[0][0].full[1];
    draw_half(svg, part, ranks, 0, 3, h, 142, "own heads");
    draw_half(svg, part, ranks, 4, 6, h, 326, "silu(gate) up");
    fprintf(svg,
            "<text class='small' x='24' y='%d'>f: nothing forward, an all-reduce backward; f*: the other "
            "way round. Norms and residuals are whole on every rank. Sides grow with the square root of "
            "the sizes.</text>\n",
            HEIGHT - 10);
    svg_close(svg, "--svg", file);
}

void tensor_parallel_check_picture(Mesh mesh, const Config *config) {
    CHECK(!config_text(config, "svg") || MOST_RANKS % mesh.tp.size == 0,
          "--svg shows a block of Llama 3 8B on 1, 2, 4 or 8 ranks, and --tp is %d", mesh.tp.size);
}

void tensor_parallel_picture(Mesh mesh, const char *file) {
    Config c = config_of_model("llama-3-8b", "layers=1 vocab=1024 dtype=bf16");
    c.tp = mesh.tp.size;
    Trainer *t = trainer_new(&c, mesh, (const Technique *[]){&tensor_parallel, NULL});
    Part part[MOST_RANKS][MATRICES];
    gather_parts(t->model, part);
    trainer_free(t);
    if (base_rank() == 0) write_picture(file, part, mesh.tp.size);
}
