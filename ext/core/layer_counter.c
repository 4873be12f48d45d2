#include "layer_counter.h"
#include "census.h"
#include <stdlib.h>
#include <string.h>

_Static_assert(offsetof(struct kv_layer_counter, slots) == 64, "the layout is part of the interface");

struct kv_layer_counter *kv_layer_counter_new(uint32_t num_slots)
{
    size_t bytes = (sizeof(struct kv_layer_counter) + num_slots * sizeof(uint64_t) + 63) & ~(size_t)63;
    struct kv_layer_counter *c = aligned_alloc(64, bytes);
    if (!c)
        return NULL;
    memset(c, 0, bytes);
    c->num_slots = num_slots;
    kv_live(KV_LIVE_RINGS, 1);
    return c;
}

void kv_layer_counter_free(struct kv_layer_counter *c)
{
    free(c);
    kv_live(KV_LIVE_RINGS, -1);
}
