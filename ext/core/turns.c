#include "turns.h"
#include <stdlib.h>

static struct kv_turn *turn_of(struct kv_turns *t, uint64_t ticket) { return &t->at[ticket % t->num_slots]; }

struct kv_turns *kv_turns_new(uint32_t num_slots)
{
    struct kv_turns *t = calloc(1, sizeof *t + num_slots * sizeof *t->at);
    if (!t)
        return NULL;
    t->num_slots = num_slots;
    atomic_init(&t->num_owners, 1);
    atomic_init(&t->next_ticket, 1);
    return t;
}

struct kv_turns *kv_turns_hold(struct kv_turns *t)
{
    atomic_fetch_add_explicit(&t->num_owners, 1, memory_order_relaxed);
    return t;
}

void kv_turns_drop(struct kv_turns *t)
{
    if (atomic_fetch_sub_explicit(&t->num_owners, 1, memory_order_acq_rel) == 1)
        free(t);
}

/* Release: whatever was read or written for its ticket comes before what the next one does. */
static void give_slot(struct kv_turn *turn) { atomic_store_explicit(&turn->ticket, 0, memory_order_release); }

uint64_t kv_turns_claim(struct kv_turns *t, uint32_t num_steps)
{
    uint64_t next = atomic_load_explicit(&t->next_ticket, memory_order_relaxed);
    for (uint32_t skipped = 0; skipped < t->num_slots;) {
        uint64_t ticket = next + skipped, nobody = 0;
        struct kv_turn *turn = turn_of(t, ticket);
        if (!atomic_compare_exchange_strong_explicit(&turn->ticket, &nobody, ticket, memory_order_acquire,
                                                     memory_order_relaxed)) {
            skipped++;
            continue;
        }
        if (atomic_compare_exchange_strong_explicit(&t->next_ticket, &next, ticket + 1, memory_order_relaxed,
                                                    memory_order_relaxed)) {
            /* Ours alone until the command that arms the steps is pushed, which publishes these. */
            atomic_store_explicit(&turn->num_steps, num_steps, memory_order_relaxed);
            atomic_store_explicit(&turn->faulted, false, memory_order_relaxed);
            return ticket;
        }
        give_slot(turn);   /* another thread took this ticket or a later one meanwhile */
        skipped = 0;
    }
    return 0;
}

void kv_turns_unclaim(struct kv_turns *t, uint64_t ticket)
{
    uint64_t next = ticket + 1;   /* unless another thread has taken that meanwhile, this one comes next again */
    atomic_compare_exchange_strong_explicit(&t->next_ticket, &next, ticket, memory_order_relaxed, memory_order_relaxed);
    give_slot(turn_of(t, ticket));
}

bool kv_turns_fault(struct kv_turns *t, uint64_t ticket)
{
    return !atomic_exchange_explicit(&turn_of(t, ticket)->faulted, true, memory_order_relaxed);
}

bool kv_turns_give_back(struct kv_turns *t, uint64_t ticket)
{
    struct kv_turn *turn = turn_of(t, ticket);
    /* Release: a fault of this step was said before; acquire: the last one sees those of all. */
    if (atomic_fetch_sub_explicit(&turn->num_steps, 1, memory_order_acq_rel) != 1)
        return false;
    bool faulted = atomic_load_explicit(&turn->faulted, memory_order_relaxed);
    give_slot(turn);
    return !faulted;
}
