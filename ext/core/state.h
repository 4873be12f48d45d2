/* The state file: slots, attempts and legs in one mapped, versioned file, so that another process can look into a
   messenger that is stuck or stopped. All pollers of a messenger count into it.

   A landed write adds its rows to its slot and to the attempt the slot is linked to. The slot index is imm >> 14 (slot
   and generation), so a late immediate falls into its own counter and never into a new request's. */
#ifndef KV_STATE_H
#define KV_STATE_H
#include "bell.h"
#include "error.h"
#include "sequence.h"
#include <pthread.h>
#include <stddef.h>

#define KV_STATE_MAGIC 0x31525347534d564bull   /* "KVMSGSR1" */
#define KV_STATE_VERSION 2u

#define KV_ROW_BITS 14
#define KV_MAX_ROWS (1u << KV_ROW_BITS)
#define KV_GENERATION_BITS 4
#define KV_SLOT_BITS 14
#define KV_NUM_SLOTS (1u << (KV_SLOT_BITS + KV_GENERATION_BITS))
#define KV_NUM_ATTEMPTS (1u << 14)
#define KV_NUM_LEGS (1u << 14)
#define KV_MAX_GROUPS 16
#define KV_LABEL_WORDS 8
#define KV_LABEL_BYTES (KV_LABEL_WORDS * 8)

#define KV_NO_ATTEMPT 0ull        /* fresh zero pages: a slot is not resident until it is linked */
#define KV_STRAYED UINT64_MAX     /* as above, and its stray has been reported */
#define KV_BEATS (1ull << 63)     /* | link: rows are its heartbeats */

struct kv_slot {
    _Atomic uint64_t rows;
    _Atomic uint64_t link;      /* attempt + 1, or one of the three above */
    _Atomic uint64_t awaited;   /* rows that someone waits for; 0: none */
    uint64_t unused;
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

struct kv_leg {   /* leg.h; the first 32 bytes are all that a poller touches */
    _Atomic uint32_t sequence;
    _Atomic uint32_t key;   /* number + 1; 0: free */
    _Atomic uint64_t rows_posted;
    _Atomic uint32_t writes_posted, signals_seen, entries_posted, num_entries;
    _Atomic uint64_t info[44];
};

struct kv_state_info {   /* who the messenger is; UTF-8, zero padded */
    char name[64], address[128], provider[32], software[32];
};

struct kv_group_pages {   /* of one cache group */
    _Atomic uint64_t name[3];
    _Atomic uint64_t held, total;
};

struct kv_state_header {
    _Atomic uint64_t magic;   /* stored last: a file without it is not ready to be read */
    uint32_t version, pid;
    uint64_t pid_started;     /* in clock ticks since boot, so that another process with this pid is not taken for us */
    uint64_t started_ns;
    uint64_t slots_offset, num_slots, slot_bytes;
    uint64_t attempts_offset, num_attempts, attempt_bytes;
    uint64_t legs_offset, num_legs, leg_bytes;
    char incarnation[40];        /* 32 hex digits */
    uint32_t libfabric_version;
    _Atomic uint32_t info_sequence;
    _Atomic uint64_t info[sizeof(struct kv_state_info) / 8];
    struct kv_group_pages groups[KV_MAX_GROUPS];
    _Atomic uint64_t quarantined;              /* pages that a lost peer may still write into */
    _Atomic uint64_t open_legs[KV_NUM_LEGS / 64];   /* a bit an entry: a reader touches no page that is not in use */
    _Atomic uint64_t poller_seen_ns;           /* when a poller last looked at the clock */
    _Atomic int64_t expecting;   /* attempts that count: while it is not 0, pollers do not sleep */
};

#define KV_MAX_BELLS 64

struct kv_state {
    struct kv_state_header *header;
    struct kv_slot *slots;
    struct kv_attempt *attempts;
    struct kv_leg *legs;
    char *path;                          /* NULL: anonymous memory */
    bool created, writable;
    int64_t num_linked;
    pthread_mutex_t lock;                /* callers' side only; a poller never takes it */
    struct kv_bell *bells[KV_MAX_BELLS]; /* of the pollers that count into it */
    uint32_t num_bells;
};

struct kv_state *kv_state_create(const char *path, const char *incarnation, struct kv_error *e);
struct kv_state *kv_state_look(const char *path, struct kv_error *e);
bool kv_state_close(struct kv_state *s, struct kv_error *e);   /* refused while pollers are attached */

bool kv_state_attach(struct kv_state *s, struct kv_bell *bell);
void kv_state_detach(struct kv_state *s, struct kv_bell *bell);

bool kv_state_open_attempt(struct kv_state *s, uint64_t attempt, uint64_t expected, const char *label,
                           size_t label_bytes, struct kv_error *e);
bool kv_state_end_attempt(struct kv_state *s, uint64_t attempt, struct kv_error *e);
bool kv_state_link_slot(struct kv_state *s, uint32_t slot_index, uint64_t attempt, struct kv_error *e);
/* From now on its rows are heartbeats of `link`. */
void kv_state_link_beat(struct kv_state *s, uint32_t slot_index, uint32_t link);
void kv_state_unlink_slot(struct kv_state *s, uint32_t slot_index);
/* Watches for `rows` in a linked slot; returns the rows as they are after that. If these are fewer, exactly one landing
   gets `slot_reached` when the count becomes `rows`. Linking and unlinking end the watch. */
uint64_t kv_state_await_slot(struct kv_state *s, uint32_t slot_index, uint64_t rows);

void kv_state_set_info(struct kv_state *s, const struct kv_state_info *info);
void kv_state_read_info(const struct kv_state *s, struct kv_state_info *out);
void kv_state_set_pages(struct kv_state *s, uint32_t group, const char name[24], uint64_t held, uint64_t total);

struct kv_pages_view {
    char name[24];
    uint64_t held, total;   /* total 0: there is no such group */
};
struct kv_pages_view kv_state_pages(const struct kv_state *s, uint32_t group);

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

static inline uint64_t kv_state_quarantined(const struct kv_state *s)
{
    return atomic_load_explicit(&s->header->quarantined, memory_order_relaxed);
}
static inline void kv_state_quarantine(struct kv_state *s, uint64_t num_pages)
{
    atomic_store_explicit(&s->header->quarantined, num_pages, memory_order_relaxed);
}
static inline uint64_t kv_state_poller_seen_ns(const struct kv_state *s)
{
    return atomic_load_explicit(&s->header->poller_seen_ns, memory_order_relaxed);
}
static inline void kv_state_seen(const struct kv_state *s, uint64_t now_ns)
{
    atomic_store_explicit(&s->header->poller_seen_ns, now_ns, memory_order_relaxed);
}

enum kv_landed {
    KV_LANDED_COUNTED, KV_LANDED_REACHED, KV_LANDED_OVERFLOW, KV_LANDED_STRAY_SEEN, KV_LANDED_STRAY, KV_LANDED_BEAT
};

struct kv_landing {
    uint64_t attempt, rows;   /* of KV_LANDED_BEAT: the link */
    bool slot_reached;        /* whatever else it did, this one made the rows of its slot those awaited */
    uint32_t slot_index;
    uint64_t slot_rows;
};

/* Counts one immediate. Any poller, any number at a time: exactly one adder gets REACHED and exactly one OVERFLOW. */
enum kv_landed kv_state_land(struct kv_state *s, uint32_t imm, struct kv_landing *out);
#endif
