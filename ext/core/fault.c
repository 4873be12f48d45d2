#include "fault.h"
#include <stdlib.h>
#include <string.h>

#define SCRATCH_KEY 0x5c2a7c4000000000ull

enum kv_fault kv_fault_next(struct kv_faults *f)
{
    for (enum kv_fault fault = KV_FAULT_DROP; fault < KV_NUM_FAULTS; fault++)
        if (atomic_load_explicit(&f->left[fault], memory_order_relaxed) == 1)
            return fault;
    return KV_FAULT_NONE;
}

void kv_fault_count(struct kv_faults *f)
{
    for (enum kv_fault fault = KV_FAULT_DROP; fault < KV_NUM_FAULTS; fault++)
        if (atomic_load_explicit(&f->left[fault], memory_order_relaxed) > 0)
            atomic_fetch_sub_explicit(&f->left[fault], 1, memory_order_relaxed);
}

struct kv_region *kv_fault_copy(struct kv_domain *d, const char *src, uint32_t bytes, uint64_t item_bytes)
{
    static _Atomic uint64_t copies;
    struct kv_region *copy = calloc(1, sizeof *copy + bytes);
    if (!copy)
        return NULL;
    copy->address = (char *)(copy + 1);
    copy->bytes = bytes;
    memcpy(copy->address, src, bytes);
    copy->address[item_bytes - 1] ^= (char)0xff;
    if (kv_region_open(d, copy, FI_WRITE, SCRATCH_KEY + atomic_fetch_add(&copies, 1))) {
        free(copy);
        return NULL;
    }
    return copy;
}

void kv_fault_drop_copy(struct kv_region *copy)
{
    kv_region_close(copy);
    free(copy);
}
