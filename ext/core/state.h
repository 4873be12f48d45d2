/* The state file: slots, attempts and labels in one mapped, versioned file, so that another process can look into a
   messenger that is stuck or stopped. All pollers of a messenger count into it.

   A landed write adds its rows to its slot and to the attempt the slot is linked to. The slot index is imm >> 14 (slot
   and generation), so a late immediate falls into its own counter and never into a new request's. */
#ifndef KV_STATE_H
#define KV_STATE_H
#include "bell.h"
#include "error.h"
#include <pthread.h>
#include <stddef.h>

#define KV_STATE_MAGIC 0x31525347534d564bull   /* "KVMSGSR1" */
#define KV_STATE_VERSION 1u

#define KV_ROW_BITS 14
#define KV_MAX_ROWS (1u << KV_ROW_BITS)
#define KV_GENERATION_BITS 4
#define KV_SLOT_BITS 14
#define KV_NUM_SLOTS (1u << (KV_SLOT_BITS + KV_GENERATION_BITS))
#define KV_NUM_ATTEMPTS (1u << 14)
#define KV_LABEL_WORDS 8
#define KV_LABEL_BYTES (KV_LABEL_WORDS * 8)

#define KV_NO_ATTEMPT 0ull        /* fresh zero pages: a slot is not resident until it is linked */
#define KV_STRAYED UINT64_MAX     /* as above, and its stray has been reported */

struct kv_slot {
    _Atomic uint64_t rows;
    _Atomic uint64_t link;   /* attempt + 1 */
};

enum kv_attempt_state {
    KV_ATTEMPT_FREE, KV_ATTEMPT_COUNTING, KV_ATTEMPT_DONE, KV_ATTEMPT_OVERFLOW, KV_ATTEMPT_ENDED
};

struct kv_attempt {
    _Atomic uint64_t id;
    _Atomic uint64_t rows, expected;
    _Atomic uint64_t started_ns;
    _Atomic uint64_t label[KV_LABEL_WORDS];   /* UTF-8, zero padded; words, so that a reader never races a byte */
    _Atomic uint32_t state;
    uint8_t unused[28];
};

struct kv_state_header {
    _Atomic uint64_t magic;   /* stored last: a file without it is not ready to be read */
    uint32_t version, pid;
    uint64_t incarnation, started_ns;
    uint64_t slots_offset, num_slots, slot_bytes;
    uint64_t attempts_offset, num_attempts, attempt_bytes;
    _Atomic int64_t expecting;   /* attempts that count: while it is not 0, pollers do not sleep */
};

#define KV_MAX_BELLS 64

struct kv_state {
    struct kv_state_header *header;
    struct kv_slot *slots;
    struct kv_attempt *attempts;
    char *path;                          /* NULL: anonymous memory */
    bool created, writable;
    int64_t num_linked;
    pthread_mutex_t lock;                /* callers' side only; a poller never takes it */
    struct kv_bell *bells[KV_MAX_BELLS]; /* of the pollers that count into it */
    uint32_t num_bells;
};

struct kv_state *kv_state_create(const char *path, uint64_t incarnation, struct kv_error *e);
struct kv_state *kv_state_look(const char *path, struct kv_error *e);
bool kv_state_close(struct kv_state *s, struct kv_error *e);   /* refused while pollers are attached */

bool kv_state_attach(struct kv_state *s, struct kv_bell *bell);
void kv_state_detach(struct kv_state *s, struct kv_bell *bell);

bool kv_state_open_attempt(struct kv_state *s, uint64_t attempt, uint64_t expected, const char *label,
                           size_t label_bytes, struct kv_error *e);
bool kv_state_end_attempt(struct kv_state *s, uint64_t attempt, struct kv_error *e);
bool kv_state_link_slot(struct kv_state *s, uint32_t slot_index, uint64_t attempt, struct kv_error *e);
void kv_state_unlink_slot(struct kv_state *s, uint32_t slot_index);

struct kv_attempt_view {
    uint64_t id, rows, expected, started_ns;
    enum kv_attempt_state state;
    char label[KV_LABEL_BYTES + 1];
};
/* A consistent copy of one entry of the table. False when it is free or changed meanwhile. */
bool kv_state_view(const struct kv_state *s, uint32_t entry, struct kv_attempt_view *out);

static inline struct kv_attempt *kv_attempt_entry(const struct kv_state *s, uint64_t attempt)
{
    return &s->attempts[attempt % KV_NUM_ATTEMPTS];
}
static inline bool kv_attempt_known(const struct kv_state *s, uint64_t attempt)
{
    struct kv_attempt *a = kv_attempt_entry(s, attempt);
    return atomic_load_explicit(&a->state, memory_order_acquire) != KV_ATTEMPT_FREE &&
           atomic_load_explicit(&a->id, memory_order_relaxed) == attempt;
}

static inline uint64_t kv_state_slot_rows(const struct kv_state *s, uint32_t slot_index)
{
    return atomic_load_explicit(&s->slots[slot_index].rows, memory_order_acquire);
}
static inline uint64_t kv_state_attempt_rows(const struct kv_state *s, uint64_t attempt)
{
    return atomic_load_explicit(&kv_attempt_entry(s, attempt)->rows, memory_order_acquire);
}
static inline int64_t kv_state_expecting(const struct kv_state *s)
{
    return atomic_load_explicit(&s->header->expecting, memory_order_acquire);
}

enum kv_landed { KV_LANDED_COUNTED, KV_LANDED_REACHED, KV_LANDED_OVERFLOW, KV_LANDED_STRAY_SEEN, KV_LANDED_STRAY };

struct kv_landing {
    uint64_t attempt, rows;
};

/* Counts one immediate. Any poller, any number at a time: exactly one adder gets REACHED and exactly one OVERFLOW. */
enum kv_landed kv_state_land(struct kv_state *s, uint32_t imm, struct kv_landing *out);
#endif
