// flash.h: attention on one device that stores no scores.
#ifndef FLASH_H
#define FLASH_H

#include "playbook.h"

// What the plug holds between calls: the mask of the last micro-batch's shape, which all layers share.
typedef struct Flash {
    AttentionPositions positions;
    AttentionMask mask;
} Flash;

// Fills model->sockets.attention, with *flash as its context, which outlives the model's use; flash_free
// ends it.
void flash_attention_plug(Model *model, Flash *flash);
void flash_free(Flash *flash);

#endif
