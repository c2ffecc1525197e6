// fitted.h: the factors of cost_table.c, and how far off the search's steps are with them on
// published runs that they have not seen (find_config_own.c), as find_config has written it:
//     find_config --runs 08_mixed_precision/published.csv --fit --fitted FILE
#ifndef FITTED_H
#define FITTED_H

#define FITTED_FACTORS {0.7351, 0.6699, 1, 0.005143, 0.4512, 1, 0.6371, 0.808}
#define FITTED_RUNS 26
#define FITTED_MEDIAN 0.124  // errors of a step's seconds
#define FITTED_WORST 0.778

#endif
