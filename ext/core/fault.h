/* Injected faults, so that tests can prove that a lost or a wrong write is noticed. */
#ifndef KV_FAULT_H
#define KV_FAULT_H
#include "link.h"

enum kv_fault { KV_FAULT_NONE, KV_FAULT_DROP, KV_FAULT_CORRUPT, KV_NUM_FAULTS };

struct kv_faults {
    _Atomic int64_t left[KV_NUM_FAULTS];   /* writes until it happens, counting that one; 0: not armed */
};

static inline bool kv_faults_armed(struct kv_faults *f)
{
    return atomic_load_explicit(&f->left[KV_FAULT_DROP], memory_order_relaxed) |
           atomic_load_explicit(&f->left[KV_FAULT_CORRUPT], memory_order_relaxed);
}

/* What is to happen to the next write. */
enum kv_fault kv_fault_next(struct kv_faults *f);
/* The next write has been posted. */
void kv_fault_count(struct kv_faults *f);

/* A registered copy with the highest byte of its first element flipped. NULL without memory. */
struct kv_region *kv_fault_copy(struct kv_domain *d, const char *src, uint32_t bytes, uint64_t item_bytes);
void kv_fault_drop_copy(struct kv_region *copy);
#endif
