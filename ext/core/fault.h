/* Injected faults, so that tests can prove that a lost, wrong, late or refused write is noticed. */
#ifndef KV_FAULT_H
#define KV_FAULT_H
#include "link.h"

enum kv_fault {
    KV_FAULT_NONE,
    KV_FAULT_DROP,      /* pretends that it was sent */
    KV_FAULT_FLIP,      /* one byte of it differs */
    KV_FAULT_FAIL,      /* the provider refuses it, and the link fails */
    KV_FAULT_REORDER,   /* set aside, and posted after some later ones of its link */
    KV_NUM_FAULTS
};
#define KV_MOST_DELAY 4u   /* later writes that one set aside waits for */

/* What each write may meet, by chance. The same seed decides the same about the nth write from now. */
struct kv_disturbance {
    uint64_t seed, slow_ns;          /* pause between two rounds */
    double chance[KV_NUM_FAULTS];    /* of the named ones; their sum is at most 1 */
};

struct kv_faults {
    _Atomic bool armed;                    /* for good by the first order; until then it costs a write one branch */
    _Atomic int64_t left[KV_NUM_FAULTS];   /* writes until it happens once, counting that one; 0: not armed */
    struct kv_disturbance disturbance;     /* the poller's, like the number of the next write under it */
    uint64_t next;
};

/* A write that waits until `delay` later ones of its link are posted, or nothing else is left. */
struct kv_aside {
    struct kv_node node;   /* of its link's */
    struct kv_transfer *transfer;
    uint32_t entry_index, write_index;
    unsigned delay;
};

static inline bool kv_faults_armed(struct kv_faults *f)
{
    return atomic_load_explicit(&f->armed, memory_order_relaxed);
}
/* Any thread: the nth write from now. */
void kv_fault_inject(struct kv_faults *f, enum kv_fault fault, int64_t nth);

/* The rest is the poller's thread's. */
void kv_fault_disturb(struct kv_faults *f, const struct kv_disturbance *d);
/* What is to happen to the next write; by `delay` later ones it is reordered. */
enum kv_fault kv_fault_next(struct kv_faults *f, unsigned *delay);
/* The next write has been posted, or met its fault. */
void kv_fault_count(struct kv_faults *f);

/* A registered copy with the highest byte of its first element flipped. NULL without memory. */
struct kv_region *kv_fault_copy(struct kv_domain *d, const char *src, uint32_t bytes, uint64_t item_bytes);
void kv_fault_drop_copy(struct kv_domain *d, struct kv_region *copy);

bool kv_aside_put(struct kv_transfer *x, unsigned delay);   /* its next write; false without memory */
void kv_aside_free(struct kv_aside *a);
void kv_aside_drop(struct kv_transfer *x);                  /* all of x */
void kv_asides_wait_less(struct kv_link *l);                /* another write of the link was posted */
struct kv_aside *kv_aside_due(struct kv_link *l);           /* NULL: none yet */
#endif
