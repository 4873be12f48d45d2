#include "leg.h"
#include "clock.h"

#define INFO_WORDS (sizeof(struct kv_leg_info) / 8)

_Static_assert(sizeof(struct kv_leg_info) == sizeof((struct kv_leg *)0)->info, "a leg's words are its info");
_Static_assert(sizeof((struct kv_leg_info *)0)->why >= 160, "room for a sentence");

static void mark(struct kv_state *s, uint32_t number, bool open)
{
    _Atomic uint64_t *word = &s->header->open_legs[number % KV_NUM_LEGS / 64];
    uint64_t bit = 1ull << number % 64;
    if (open)
        atomic_fetch_or_explicit(word, bit, memory_order_release);
    else
        atomic_fetch_and_explicit(word, ~bit, memory_order_release);
}

bool kv_state_open_leg(struct kv_state *s, uint32_t number, const struct kv_leg_info *info, struct kv_error *e)
{
    struct kv_leg *leg = &s->legs[number % KV_NUM_LEGS];
    pthread_mutex_lock(&s->lock);
    uint32_t key = atomic_load_explicit(&leg->key, memory_order_relaxed);
    if (key) {
        pthread_mutex_unlock(&s->lock);
        return kv_error_set(e, KV_INVALID, "leg %u cannot be opened: leg %u is still open in its entry", number,
                            key - 1);
    }
    struct kv_leg_info started = *info;
    started.started_ns = started.since_ns = kv_now_ns();
    kv_sequence_step(&leg->sequence);
    atomic_store_explicit(&leg->rows_posted, 0, memory_order_release);
    atomic_store_explicit(&leg->writes_posted, 0, memory_order_release);
    atomic_store_explicit(&leg->signals_seen, 0, memory_order_release);
    atomic_store_explicit(&leg->entries_posted, 0, memory_order_release);
    atomic_store_explicit(&leg->num_entries, 0, memory_order_release);
    kv_words_store(leg->info, &started, INFO_WORDS);
    atomic_store_explicit(&leg->key, number + 1, memory_order_release);
    kv_sequence_step(&leg->sequence);
    mark(s, number, true);
    pthread_mutex_unlock(&s->lock);
    return true;
}

bool kv_state_update_leg(struct kv_state *s, uint32_t number, const struct kv_leg_info *info, struct kv_error *e)
{
    pthread_mutex_lock(&s->lock);
    struct kv_leg *leg = kv_leg_of(s, number);
    if (!leg) {
        pthread_mutex_unlock(&s->lock);
        return kv_error_set(e, KV_MISSING, "leg %u is not open", number);
    }
    struct kv_leg_info now;
    kv_words_load(&now, leg->info, INFO_WORDS);
    if (memcmp(now.state, info->state, sizeof now.state))
        now.since_ns = kv_now_ns();
    memcpy(now.state, info->state, sizeof now.state);
    memcpy(now.reason, info->reason, sizeof now.reason);
    memcpy(now.why, info->why, sizeof now.why);
    now.pages_held = info->pages_held;
    kv_sequence_step(&leg->sequence);
    kv_words_store(leg->info, &now, INFO_WORDS);
    kv_sequence_step(&leg->sequence);
    pthread_mutex_unlock(&s->lock);
    return true;
}

void kv_state_close_leg(struct kv_state *s, uint32_t number)
{
    pthread_mutex_lock(&s->lock);
    struct kv_leg *leg = kv_leg_of(s, number);
    if (leg) {
        mark(s, number, false);
        kv_sequence_step(&leg->sequence);
        atomic_store_explicit(&leg->key, 0, memory_order_release);
        kv_sequence_step(&leg->sequence);
    }
    pthread_mutex_unlock(&s->lock);
}

/* A copy of one entry; false when no leg is open in it. */
static bool view(const struct kv_leg *leg, struct kv_leg_view *out)
{
    for (unsigned i = 0; i < KV_SEQUENCE_TRIES; i++) {
        uint32_t before = kv_sequence_wait(&leg->sequence);
        uint32_t key = atomic_load_explicit(&leg->key, memory_order_acquire);
        *out = (struct kv_leg_view){
            .number = key - 1,
            .rows_posted = atomic_load_explicit(&leg->rows_posted, memory_order_acquire),
            .writes_posted = atomic_load_explicit(&leg->writes_posted, memory_order_acquire),
            .signals_seen = atomic_load_explicit(&leg->signals_seen, memory_order_acquire),
            .entries_posted = atomic_load_explicit(&leg->entries_posted, memory_order_acquire),
            .num_entries = atomic_load_explicit(&leg->num_entries, memory_order_acquire),
        };
        kv_words_load(&out->info, leg->info, INFO_WORDS);
        if (kv_sequence_same(&leg->sequence, before))
            return key;
        out->torn = true;
        if (before % 2)   /* it did not finish while we waited */
            break;
    }
    return out->number + 1;
}

bool kv_state_next_leg(const struct kv_state *s, uint32_t *entry, struct kv_leg_view *out)
{
    while (*entry < KV_NUM_LEGS) {
        uint64_t open = atomic_load_explicit(&s->header->open_legs[*entry / 64], memory_order_acquire);
        open &= ~0ull << *entry % 64;
        if (!open) {
            *entry = (*entry / 64 + 1) * 64;
            continue;
        }
        uint32_t at = *entry / 64 * 64 + (uint32_t)__builtin_ctzll(open);
        *entry = at + 1;
        if (view(&s->legs[at], out))
            return true;
    }
    return false;
}
