#include "layer_counter.h"
#include "census.h"
#include <stdlib.h>
#include <string.h>

_Static_assert(offsetof(struct kv_layer_counter, slots) == 64, "the layout is part of the interface");

struct kv_layer_counter *kv_layer_counter_init(void *memory, uint32_t num_slots)
{
    struct kv_layer_counter *c = memory;
    memset(c, 0, kv_layer_counter_bytes(num_slots));
    c->num_slots = num_slots;
    return c;
}

struct kv_layer_counter *kv_layer_counter_new(uint32_t num_slots)
{
    void *memory = aligned_alloc(64, kv_layer_counter_bytes(num_slots));
    if (!memory)
        return NULL;
    kv_live(KV_LIVE_RINGS, 1);
    return kv_layer_counter_init(memory, num_slots);
}

void kv_layer_counter_free(struct kv_layer_counter *c)
{
    free(c);
    kv_live(KV_LIVE_RINGS, -1);
}
