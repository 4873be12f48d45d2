#include "fault.h"
#include <stdlib.h>
#include <string.h>

#define SCRATCH_KEY 0x5c2a7c4000000000ull

/* ---- which write meets what ---- */
void kv_fault_inject(struct kv_faults *f, enum kv_fault fault, int64_t nth)
{
    atomic_store_explicit(&f->left[fault], nth, memory_order_relaxed);
    atomic_store_explicit(&f->armed, true, memory_order_release);
}

void kv_fault_disturb(struct kv_faults *f, const struct kv_disturbance *d)
{
    f->disturbance = *d;
    f->next = 0;
    atomic_store_explicit(&f->armed, true, memory_order_relaxed);
}

static uint64_t mix(uint64_t x)   /* splitmix64: neighbours in, strangers out */
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

enum kv_fault kv_fault_next(struct kv_faults *f, unsigned *delay)
{
    for (enum kv_fault fault = KV_FAULT_DROP; fault < KV_NUM_FAULTS; fault++)
        if (atomic_load_explicit(&f->left[fault], memory_order_relaxed) == 1) {
            *delay = 1;
            return fault;
        }
    uint64_t bits = mix(mix(f->disturbance.seed) ^ f->next);
    double at = (double)(bits >> 11) / (double)(1ull << 53);
    *delay = 1 + (unsigned)bits % KV_MOST_DELAY;
    for (enum kv_fault fault = KV_FAULT_DROP; fault < KV_NUM_FAULTS; fault++) {
        if (at < f->disturbance.chance[fault])
            return fault;
        at -= f->disturbance.chance[fault];
    }
    return KV_FAULT_NONE;
}

void kv_fault_count(struct kv_faults *f)
{
    f->next++;
    for (enum kv_fault fault = KV_FAULT_DROP; fault < KV_NUM_FAULTS; fault++)
        if (atomic_load_explicit(&f->left[fault], memory_order_relaxed) > 0)
            atomic_fetch_sub_explicit(&f->left[fault], 1, memory_order_relaxed);
}

/* ---- copies with a byte flipped ---- */
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

void kv_fault_drop_copy(struct kv_domain *d, struct kv_region *copy)
{
    kv_region_close(d, copy);
    free(copy);
}

/* ---- writes set aside ---- */
bool kv_aside_put(struct kv_transfer *x, unsigned delay)
{
    struct kv_aside *a = malloc(sizeof *a);
    if (!a)
        return false;
    *a = (struct kv_aside){.transfer = x, .entry_index = x->entry_index, .write_index = x->write_index, .delay = delay};
    kv_list_append(&x->link->asides, &a->node);
    x->num_aside++;
    return true;
}

void kv_aside_free(struct kv_aside *a)
{
    a->transfer->num_aside--;
    kv_list_remove(&a->node);
    free(a);
}

void kv_aside_drop(struct kv_transfer *x)
{
    KV_EACH(node, &x->link->asides) {
        struct kv_aside *a = KV_OF(node, struct kv_aside, node);
        if (a->transfer == x)
            kv_aside_free(a);
    }
}

void kv_asides_wait_less(struct kv_link *l)
{
    KV_EACH(node, &l->asides) {
        struct kv_aside *a = KV_OF(node, struct kv_aside, node);
        a->delay -= a->delay > 0;
    }
}

struct kv_aside *kv_aside_due(struct kv_link *l)
{
    bool others = !kv_list_empty(&l->queue);
    KV_EACH(node, &l->asides) {
        struct kv_aside *a = KV_OF(node, struct kv_aside, node);
        if (!a->delay || !others)
            return a;
    }
    return NULL;
}
