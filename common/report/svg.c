// svg.c: see svg.h.
#include "svg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "files.h"

FILE *svg_open(const char *flag, const char *file, int width, int height) {
    FILE *svg = output_open(flag, file);
    fprintf(svg,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' "
            "font-family='system-ui,Helvetica,Arial,sans-serif' font-size='12'>\n",
            width, height, width, height);
    return svg;
}

void svg_close(FILE *svg, const char *flag, const char *file) {
    fprintf(svg, "</svg>\n");
    output_close(svg, flag, file);
}

// A bold letter is 0.7 of its height wide or less. The name of a model may be a path, with any characters.
void svg_title(FILE *svg, int x, double width, const char *title) {
    char *text = format_text("%s", title);
    make_utf8(text);
    fprintf(svg, "<text class='title' x='%d' y='22' style='font-size:%.1fpx'>", x,
            fmin(15, width / (0.7 * (double)strlen(title))));
    for (const char *c = text; *c; c++)
        if (*c == '&') fputs("&amp;", svg);
        else if (*c == '<') fputs("&lt;", svg);
        else if (!strncmp(c, "]]>", 3)) fputs("]]&gt;", svg), c += 2;
        else if (!strncmp(c, "\xef\xbf\xbe", 3) || !strncmp(c, "\xef\xbf\xbf", 3)) putc('?', svg), c += 2;
        else if ((unsigned char)*c >= ' ') putc(*c, svg);
    fprintf(svg, "</text>\n");
    free(text);
}
