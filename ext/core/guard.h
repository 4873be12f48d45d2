/* A way out of a call that would never return.

   libfabric's shm shares spin locks between processes. A peer that is killed or stopped while it holds one would keep
   our polling thread in a spin for ever. So each call that may spin is made under a guard: a timer on the CPU time of
   the thread interrupts it, and when it has found the same call going round in the same place often enough, leaves it
   by a long jump. What the call was about is not to be touched any more. */
#ifndef KV_GUARD_H
#define KV_GUARD_H
#include "error.h"
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>
#include <ucontext.h>

#define KV_STUCK EDEADLK   /* a guarded call was left; as -KV_STUCK among the errors of libfabric */

struct kv_guard {   /* of one thread */
    sigjmp_buf out;
    volatile sig_atomic_t inside;   /* a guarded call is being made */
    volatile uint64_t call;         /* its number */
    uint64_t seen_call;             /* at the last tick, and how often in a row it was in the same place */
    unsigned ticks;
    mcontext_t seen;
    timer_t timer;
    _Atomic uint64_t *num_left;     /* calls that were left; for people who look on */
};

/* Takes a signal for the ticks, for good. Refused when none is free. */
bool kv_guard_prepare(struct kv_error *e);
/* On the thread, after kv_guard_prepare: from here on its calls are watched. Returns 0 or an errno. */
int kv_guard_start(struct kv_guard *g, _Atomic uint64_t *num_left);
void kv_guard_stop(struct kv_guard *g);
/* Returns what the call returns, or -KV_STUCK when it was left. */
ssize_t kv_guard_call(struct kv_guard *g, ssize_t (*call)(void *), void *with);
#endif
