#include "find_config.h"
void heat_map(const char *file, const char *machine, double memory) { (void)file, (void)machine, (void)memory; }
void curves(const char *file) { (void)file; }
