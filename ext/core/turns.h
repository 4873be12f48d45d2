/* Turns: which ticket has a ring slot of a layer counter, and who has yet to be done with it there. A ticket whose slot
   has not come back is never given: one step that is not over yet costs the later ones one slot, not all.

   A counter is watched by one poller, or by several of a messenger, each for what goes through its own interfaces. Then
   a ticket has a step in each of them: the first fault of these is the ticket's, it is over when the last of them is, and
   only then its ring slot comes back. Any thread; no locks. */
#ifndef KV_TURNS_H
#define KV_TURNS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct kv_turn {
    _Atomic uint64_t ticket;      /* that has the slot; 0: it is free */
    _Atomic uint32_t num_steps;   /* of the one that has it, in different pollers */
    _Atomic bool faulted;         /* so; one of them has reported a fault */
};

struct kv_turns {
    _Atomic uint32_t num_owners;
    uint32_t num_slots;
    _Atomic uint64_t next_ticket;
    struct kv_turn at[];
};

struct kv_turns *kv_turns_new(uint32_t num_slots);   /* one owner; NULL without memory */
struct kv_turns *kv_turns_hold(struct kv_turns *t);
void kv_turns_drop(struct kv_turns *t);

/* The next ticket whose ring slot is free, for so many steps, or 0 when there is none. */
uint64_t kv_turns_claim(struct kv_turns *t, uint32_t num_steps);
/* A claimed ticket is not used after all. */
void kv_turns_unclaim(struct kv_turns *t, uint64_t ticket);
/* A step of the ticket shows a fault. True for the first: it is reported. */
bool kv_turns_fault(struct kv_turns *t, uint64_t ticket);
/* A step of the ticket is over; the slot comes back with the last. True for that one, if no fault was reported. */
bool kv_turns_give_back(struct kv_turns *t, uint64_t ticket);
#endif
