/* The legs of the state file: what a messenger does for each request, for whoever looks from outside.

   The callers' side writes what a leg is and how it stands, under a sequence; pollers count beside it. A transfer
   belongs to the leg its tag names; to none when no such leg is open. The rows counted as posted are part of a proof as
   well: a writer that is moved to another port says them to its reader. */
#ifndef KV_LEG_H
#define KV_LEG_H
#include "state.h"

enum kv_leg_role { KV_FETCH = 1, KV_SERVE };

struct kv_leg_info {
    uint64_t attempt, rows_expected;   /* a serving leg's attempt, slot and rows are its peer's */
    uint64_t started_ns, since_ns;     /* since: in this state */
    uint32_t slot_index, num_layers, pages_held;
    uint32_t role;
    char request_id[64], peer[40], state[16], reason[20], why[164];   /* UTF-8, zero padded, not always terminated */
};

struct kv_leg_view {
    uint32_t number;
    struct kv_leg_info info;
    uint64_t rows_posted;
    uint32_t writes_posted, signals_seen, entries_posted, num_entries;
    bool torn;   /* whoever was changing it did not finish: parts may be older than others */
};

/* Opens it under `number`, below 2^32 - 1, with its times set to now. */
bool kv_state_open_leg(struct kv_state *s, uint32_t number, const struct kv_leg_info *info, struct kv_error *e);
/* Takes over state, reason, why and pages_held of `info`. */
bool kv_state_update_leg(struct kv_state *s, uint32_t number, const struct kv_leg_info *info, struct kv_error *e);
void kv_state_close_leg(struct kv_state *s, uint32_t number);
/* The next open leg at or after `*entry`, which moves behind it. False: there are no more. */
bool kv_state_next_leg(const struct kv_state *s, uint32_t *entry, struct kv_leg_view *out);

/* ---- pollers ---- */
static inline struct kv_leg *kv_leg_of(const struct kv_state *s, uint32_t tag)   /* NULL: no such leg is open */
{
    struct kv_leg *leg = &s->legs[tag % KV_NUM_LEGS];
    uint32_t key = atomic_load_explicit(&leg->key, memory_order_acquire);
    return key && key == tag + 1 ? leg : NULL;
}

/* A write of the leg is posted, and with it `entries` of the `num_entries` of its transfer. The longest table of a leg
   shows how far it is. */
static inline void kv_leg_posted(const struct kv_state *s, uint32_t tag, uint32_t rows, uint32_t entries,
                                 uint32_t num_entries)
{
    struct kv_leg *leg = kv_leg_of(s, tag);
    if (!leg)
        return;
    atomic_fetch_add_explicit(&leg->rows_posted, rows, memory_order_relaxed);
    atomic_fetch_add_explicit(&leg->writes_posted, 1, memory_order_relaxed);
    if (num_entries < atomic_load_explicit(&leg->num_entries, memory_order_relaxed))
        return;
    atomic_store_explicit(&leg->entries_posted, entries, memory_order_relaxed);
    atomic_store_explicit(&leg->num_entries, num_entries, memory_order_relaxed);
}

/* Rows of it that were posted; 0 when no such leg is open. */
static inline uint64_t kv_leg_rows_posted(const struct kv_state *s, uint32_t tag)
{
    struct kv_leg *leg = kv_leg_of(s, tag);
    return leg ? atomic_load_explicit(&leg->rows_posted, memory_order_acquire) : 0;
}

/* A step of the leg has shown `bumps` signals. */
static inline void kv_leg_signalled(const struct kv_state *s, uint32_t tag, uint32_t bumps)
{
    struct kv_leg *leg = kv_leg_of(s, tag);
    if (leg)
        atomic_store_explicit(&leg->signals_seen, bumps, memory_order_relaxed);
}
#endif
