// checkpoint_weights.c: the files in which a folder stores its weights: model.safetensors, or the parts
// model-00001-of-0000N.safetensors that model.safetensors.index.json lists ({"weight_map": {"name": "file",
// …}}).
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_inside.h"
#include "files.h"

enum { INDEX_MAX = 100000000 };  // bytes

static void add_file(WeightFiles *w, const char *dir, const char *name) {
    char *path = format_text("%s/%s", dir, name);
    w->file = realloc(w->file, sizeof *w->file * (size_t)(w->count + 1));
    w->path = realloc(w->path, sizeof *w->path * (size_t)(w->count + 1));
    CHECK(w->file && w->path, "out of host memory for the files of %s", dir);
    w->file[w->count] = safetensors_open(path);
    w->path[w->count++] = path;
}

// Index of the part with this file name, opened at its first mention.
static int part_of_index(WeightFiles *w, const char *dir, const char *name) {
    for (int i = 0; i < w->count; i++)
        if (!strcmp(strrchr(w->path[i], '/') + 1, name)) return i;
    CHECK(!strchr(name, '/') && *name != '.', "%s names %s, which is no file beside it", w->name,
          printable(name));
    add_file(w, dir, name);
    return w->count - 1;
}

static void open_parts(WeightFiles *w, const char *dir) {
    char *text;
    size_t size;
    const char *wrong = input_text(w->name, INDEX_MAX, &text, &size);
    CHECK(!wrong, "%s", wrong);
    cJSON *json = cJSON_ParseWithLengthOpts(text, size + 1, NULL, true);
    CHECK(cJSON_IsObject(json), "%s is no JSON object", w->name);
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(json, "weight_map");
    CHECK(cJSON_IsObject(map) && map->child, "%s has no \"weight_map\" of names and files", w->name);
    for (const cJSON *item = map->child; item; item = item->next) {
        CHECK(cJSON_IsString(item), "%s: the file of %s is no text", w->name, printable(item->string));
        int part = part_of_index(w, dir, item->valuestring);
        CHECK(safetensors_find(&w->file[part], item->string), "%s says that %s holds %s, and it does not",
              w->name, w->path[part], printable(item->string));
    }
    cJSON_Delete(json);
    free(text);
    for (int i = 0; i < w->count; i++)
        for (int t = 0; t < w->file[i].count; t++)
            for (int other = 0; other < i; other++)
                CHECK(!safetensors_find(&w->file[other], w->file[i].tensor[t].name),
                      "%s and %s both hold %s", w->path[other], w->path[i],
                      printable(w->file[i].tensor[t].name));
}

WeightFiles weights_open(const char *dir) {
    WeightFiles w = {0};
    bool parts = !folder_has(dir, MODEL_FILE) && folder_has(dir, MODEL_FILE ".index.json");
    w.name = format_text("%s/" MODEL_FILE "%s", dir, parts ? ".index.json" : "");
    CHECK(parts || folder_has(dir, MODEL_FILE) ||
              !(folder_has(dir, "pytorch_model.bin") || folder_has(dir, "pytorch_model.bin.index.json")),
          "%s has its weights only as pytorch_model.bin, which is Python's own format; write them as "
          "safetensors: python3 -c 'from transformers import AutoModelForCausalLM as M; "
          "M.from_pretrained(\"%s\").save_pretrained(\"%s\")'",
          dir, dir, dir);
    if (parts) open_parts(&w, dir);
    else add_file(&w, dir, MODEL_FILE);
    return w;
}

int weights_find(const WeightFiles *w, const char *name) {
    for (int i = 0; i < w->count; i++)
        if (safetensors_find(&w->file[i], name)) return i;
    return -1;
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && !strcmp(text + length - tail, end);
}

// A tensor that is not a weight of the model is a sign of another model; two redundant ones are allowed.
static void check_surplus(const char *path, const WeightFiles *files, const SafeTensor *surplus) {
    // older files keep RoPE's frequencies, which rope_theta determines
    if (ends_with(surplus->name, ".rotary_emb.inv_freq")) return;
    CHECK(!strcmp(surplus->name, "lm_head.weight"), "%s holds %s, which this model has not", path,
          printable(surplus->name));
    // tied: the head is the embedding
    const char *name = "model.embed_tokens.weight";
    const SafeTensor *embedding = safetensors_find(&files->file[weights_find(files, name)], name);
    CHECK(surplus->dtype == embedding->dtype && surplus->bytes == embedding->bytes &&
              !memcmp(surplus->data, embedding->data, embedding->bytes),
          "%s: lm_head.weight differs from model.embed_tokens.weight, though config.json ties them", path);
}

void weights_check_surplus(const WeightFiles *w, const Params *params) {
    for (int f = 0; f < w->count; f++)
        for (int i = 0; i < w->file[f].count; i++) {
            const SafeTensor *tensor = &w->file[f].tensor[i];
            if (!params_find(params, tensor->name)) check_surplus(w->path[f], w, tensor);
        }
}

void weights_close(WeightFiles *w) {
    for (int i = 0; i < w->count; i++) {
        safetensors_close(&w->file[i]);
        free(w->path[i]);
    }
    free(w->file);
    free(w->path);
    free(w->name);
    *w = (WeightFiles){0};
}
