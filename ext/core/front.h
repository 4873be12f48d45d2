/* What the callers' side shares (front.c, front_links.c, front_steps.c): all of it may be called from any thread.
   begin_step and join_step wait for nothing but a look-up; the rest may also wait for room in the command ring. */
#ifndef KV_FRONT_H
#define KV_FRONT_H
#include "poller.h"

/* The gate: a call is either finished before the poller closes, or refused. */
bool kv_front_enter(struct kv_poller *p, struct kv_error *e);
void kv_front_leave(struct kv_poller *p);

static inline void kv_front_lock(struct kv_poller *p) { pthread_mutex_lock(&p->front.lock); }
static inline void kv_front_unlock(struct kv_poller *p) { pthread_mutex_unlock(&p->front.lock); }

/* The link of this number, if it is open. Under the lock. */
struct kv_link *kv_front_find(struct kv_poller *p, uint32_t id, struct kv_error *e);
/* Starts the thread if it does not run yet. Under the lock. */
bool kv_front_start(struct kv_poller *p, struct kv_error *e);
/* For calls that are not on an engine's path: waits a while for the poller to make room. */
bool kv_front_submit(struct kv_poller *p, struct kv_command c, struct kv_error *e);
#endif
