// find_config.c: finds the layouts that train a model fastest on a cluster, and says how far to trust the
// figure. Playbook: "Finding the Best Training Configuration", "Benchmarking thousands of configurations".
//
// Bytes sent and memory per rank: the records' closed forms, summed up as a run would (cost_unit.c).
// Run: build/08_mixed_precision/find_config --runs 08_mixed_precision/published.csv
// Last line: PASS find_config: …
#include <stdlib.h>

#include "find_config.h"
#include "report/report.h"

#ifndef NO_MAIN
int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *runs_path = NULL, *json = NULL;
    bool refit = false;
    const Option options[] = {
        {"runs", OPTION_TEXT, &runs_path, "08_mixed_precision/published.csv", 0, 0, "FILE.csv",
         "published runs, in the columns of published.csv: predicted beside published", false},
        {"fit", OPTION_FLAG, &refit, NULL, 0, 0, "", "with --runs: fit the factors on these runs anew", false},
        {"json", OPTION_OUTPUT, &json, NULL, 0, 0, "FILE", "write every figure at full precision", false},
    };
    options_parse(argc, argv, "Finds the fastest layout.", (Option *)options, 3);
    if (json) report_json(json);
    Runs runs = runs_read(runs_path);
    runs_report(&runs, refit);
    free(runs.run);
    return report_verdict("published runs are predicted");
}
#endif
