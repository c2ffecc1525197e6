// report_inside.h: what the files of the report share: report.c (checks, --json and the verdict) and
// report_compare.c (a run beside its baseline).
#ifndef REPORT_INSIDE_H
#define REPORT_INSIDE_H

#include <cjson/cJSON.h>

#include "report.h"

enum { SENTENCE = 600 };

extern struct Report {
    int failures, checks, equalities, equal;
    char first_failure[SENTENCE];
    bool quiet;                 // rows that hold are not shown
    char coarse[400];           // why nothing was proven; "": it was
    bool compared[3];           // by ProofClass
    bool differs;               // a comparison that should be exact is not
    double worst[3], bound[3];  // relative, of the comparison nearest to its bound
    char note[100];             // of report_note
    char alone[80];             // what a PASS claims of one rank (report_split); "": of several
    int64_t choices, ties;      // Routing's, of all comparisons
    const char *file_name;      // --json
    bool stepped;               // report_step
    cJSON *json;
} report;

// Counts a check, and remembers the sentence of the first that failed. Returns whether it holds.
bool judge(bool holds, const char *format, ...) PRINTF_LIKE(2, 3);
const char *class_name(ProofClass proof);
// What --json gets: the whole, and an object or array in a parent, made at first use.
cJSON *json_root(void);
cJSON *json_child(cJSON *parent, const char *name, bool array);
void json_keep(const char *list, cJSON *row);
void put_number(cJSON *object, const char *name, double value);

#endif
