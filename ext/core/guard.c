#include "guard.h"
#include "clock.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TICK_NS (50 * KV_MS)   /* of CPU time of the thread: one that sleeps is never interrupted */
#define STUCK_TICKS 5
#define SPIN_BYTES 64          /* of code: as much as a spin lock's loop takes */

/* ---- the signal of the ticks ---- */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int tick_signal;

/* The two contexts are of one spin: nothing but the program counter has moved, and that not far. A copy or a walk
   through a list, however long, changes some register. */
static bool going_round(const mcontext_t *a, const mcontext_t *b)
{
#if defined(__x86_64__)
    intptr_t distance = (intptr_t)(a->gregs[REG_RIP] - b->gregs[REG_RIP]);
    bool same = !memcmp(a->gregs, b->gregs, REG_RIP * sizeof *a->gregs);   /* the general registers come before it */
#elif defined(__aarch64__)
    intptr_t distance = (intptr_t)(a->pc - b->pc);
    bool same = a->sp == b->sp && !memcmp(a->regs, b->regs, sizeof a->regs);
#else
    intptr_t distance = 0;
    bool same = false;   /* not known how to tell: no call is ever left */
    (void)a, (void)b;
#endif
    return same && labs(distance) < SPIN_BYTES;
}

static void tick(int number, siginfo_t *info, void *context)
{
    (void)number;
    struct kv_guard *g = info->si_value.sival_ptr;
    if (info->si_code != SI_TIMER || !g->inside)
        return;
    const mcontext_t *now = &((const ucontext_t *)context)->uc_mcontext;
    if (g->seen_call != g->call || !going_round(now, &g->seen)) {
        g->seen_call = g->call;
        g->seen = *now;
        g->ticks = 1;
    } else if (++g->ticks == STUCK_TICKS) {
        g->inside = false;
        siglongjmp(g->out, 1);
    }
}

bool kv_guard_prepare(struct kv_error *e)
{
    pthread_mutex_lock(&lock);
    for (int number = SIGRTMAX; !tick_signal && number >= SIGRTMIN; number--) {
        struct sigaction before, ours = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER};
        if (!sigaction(number, NULL, &before) && before.sa_handler == SIG_DFL && !sigaction(number, &ours, NULL))
            tick_signal = number;
    }
    bool ok = tick_signal;
    pthread_mutex_unlock(&lock);
    return ok || kv_error_call(e, KV_SYSTEM, "sigaction", EBUSY, "shm needs a real-time signal to leave a call that a "
                               "lost peer blocks, and every one from SIGRTMIN to SIGRTMAX has a handler");
}

/* ---- the thread ---- */
int kv_guard_start(struct kv_guard *g, _Atomic uint64_t *num_left)
{
    *g = (struct kv_guard){.num_left = num_left};
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = tick_signal};
    event.sigev_value.sival_ptr = g;
    event._sigev_un._tid = gettid();   /* glibc before 2.38 has no sigev_notify_thread_id */
    struct itimerspec every = {.it_interval = {.tv_nsec = TICK_NS}, .it_value = {.tv_nsec = TICK_NS}};
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &g->timer))
        return errno;
    sigset_t ticks;
    sigemptyset(&ticks);
    sigaddset(&ticks, tick_signal);
    pthread_sigmask(SIG_UNBLOCK, &ticks, NULL);
    timer_settime(g->timer, 0, &every, NULL);
    return 0;
}

void kv_guard_stop(struct kv_guard *g)
{
    timer_delete(g->timer);
}

ssize_t kv_guard_call(struct kv_guard *g, ssize_t (*call)(void *), void *with)
{
    if (sigsetjmp(g->out, 0)) {   /* the mask needs no restoring: the handler blocks nothing (SA_NODEFER) */
        atomic_fetch_add_explicit(g->num_left, 1, memory_order_relaxed);
        return -KV_STUCK;
    }
    g->call++;
    g->inside = true;
    ssize_t rc = call(with);
    g->inside = false;
    return rc;
}
