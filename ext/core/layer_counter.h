/* The layer counter of one engine stream: one current word, published to ring slot `ticket mod num_slots`.

   It lies in memory of this process, or in memory that several processes have mapped: one watches, the other bumps.

   An engine whose forward runs in native code may do by itself what kv_counter_start and kv_counter_bump do here: the
   layout is part of the interface (current at byte 0, num_slots at byte 8, the slots from byte 64). Only the stream's
   own thread may write; it takes no lock and never waits. */
#ifndef KV_LAYER_COUNTER_H
#define KV_LAYER_COUNTER_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define KV_BUMP_BITS 24
#define KV_MAX_BUMPS ((1u << KV_BUMP_BITS) - 1)
#define KV_MAX_TICKET ((1ull << 40) - 1)
#define KV_MAX_SLOTS 4096

struct kv_layer_counter {
    _Atomic uint64_t current;   /* ticket << 24 | bumps */
    uint32_t num_slots;
    uint8_t unused[52];
    _Atomic uint64_t slots[];   /* 0: nothing published yet, for no ticket is 0 here */
};

static inline size_t kv_layer_counter_bytes(uint32_t num_slots)
{
    return (sizeof(struct kv_layer_counter) + num_slots * sizeof(uint64_t) + 63) & ~(size_t)63;
}
/* Makes one at `memory`, which has room and is aligned to 64 bytes. */
struct kv_layer_counter *kv_layer_counter_init(void *memory, uint32_t num_slots);
struct kv_layer_counter *kv_layer_counter_new(uint32_t num_slots);
void kv_layer_counter_free(struct kv_layer_counter *c);   /* of one that was new */

static inline uint64_t kv_word_ticket(uint64_t word) { return word >> KV_BUMP_BITS; }
static inline uint32_t kv_word_bumps(uint64_t word) { return (uint32_t)(word & KV_MAX_BUMPS); }

/* Here and below `num_slots` is the caller's own record: other processes may write to what is in the counter, and a
   process must not fault because another one has.

   Release: whoever sees the word also sees the cache rows written before it. Ticket 0 publishes nothing. */
static inline void kv_counter_publish(struct kv_layer_counter *c, uint32_t num_slots, uint64_t word)
{
    atomic_store_explicit(&c->current, word, memory_order_relaxed);
    if (kv_word_ticket(word))
        atomic_store_explicit(&c->slots[kv_word_ticket(word) % num_slots], word, memory_order_release);
}

static inline uint64_t kv_counter_current(struct kv_layer_counter *c)
{
    return atomic_load_explicit(&c->current, memory_order_relaxed);
}

/* Right before the forward of `ticket`. */
static inline void kv_counter_start(struct kv_layer_counter *c, uint32_t num_slots, uint64_t ticket)
{
    kv_counter_publish(c, num_slots, ticket << KV_BUMP_BITS);
}

/* After each layer. Stays at the highest count rather than carry into the ticket. */
static inline void kv_counter_bump(struct kv_layer_counter *c, uint32_t num_slots)
{
    uint64_t word = atomic_load_explicit(&c->current, memory_order_relaxed);
    if (kv_word_bumps(word) < KV_MAX_BUMPS)
        kv_counter_publish(c, num_slots, word + 1);
}

/* What the ring says of `ticket`: its word, or 0 when it has not started or another ticket is in its slot. */
static inline uint64_t kv_counter_read(struct kv_layer_counter *c, uint32_t num_slots, uint64_t ticket)
{
    uint64_t word = atomic_load_explicit(&c->slots[ticket % num_slots], memory_order_acquire);
    return kv_word_ticket(word) == ticket ? word : 0;
}
#endif
