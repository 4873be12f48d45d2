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
    for (uint32_t slot = 0; slot < num_slots; slot++)
        atomic_init(&t->at[slot].ticket, slot ? slot : num_slots);   /* ticket 0 is nobody's */
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

uint64_t kv_turns_claim(struct kv_turns *t, uint32_t num_steps)
{
    uint64_t ticket = atomic_load_explicit(&t->next_ticket, memory_order_relaxed);
    for (;;) {
        if (atomic_load_explicit(&turn_of(t, ticket)->ticket, memory_order_acquire) == ticket) {
            if (atomic_compare_exchange_weak_explicit(&t->next_ticket, &ticket, ticket + 1, memory_order_relaxed,
                                                      memory_order_relaxed))
                break;
        } else {
            uint64_t next = atomic_load_explicit(&t->next_ticket, memory_order_relaxed);
            if (next == ticket)
                return 0;
            ticket = next;   /* another thread took it meanwhile */
        }
    }
    /* The slot is ours alone until the command that arms the steps is pushed, which publishes these. */
    atomic_store_explicit(&turn_of(t, ticket)->num_steps, num_steps, memory_order_relaxed);
    atomic_store_explicit(&turn_of(t, ticket)->faulted, false, memory_order_relaxed);
    return ticket;
}

/* The slot may be claimed for its next ticket. */
static void pass_on(struct kv_turns *t, uint64_t ticket)
{
    atomic_store_explicit(&turn_of(t, ticket)->ticket, ticket + t->num_slots, memory_order_release);
}

void kv_turns_unclaim(struct kv_turns *t, uint64_t ticket)
{
    uint64_t next = ticket + 1;   /* unless another thread has taken that meanwhile, this one comes next again */
    if (!atomic_compare_exchange_strong_explicit(&t->next_ticket, &next, ticket, memory_order_relaxed,
                                                 memory_order_relaxed))
        pass_on(t, ticket);
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
    pass_on(t, ticket);
    return !faulted;
}
