/* The callers' side: how a poller begins and ends, and what it is told before it runs. */
#include "front.h"
#include "census.h"
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define SUBMIT_WAIT_NS KV_S
#define JOIN_WAIT_S 5

/* ---- opening and closing ---- */
static bool open_nic(struct kv_nic *n, const struct kv_config *config, const char *address, struct kv_error *e)
{
    const char *call;
    if (!kv_fabric_open(&n->fabric, config->provider, address, config->cq_entries, e))
        return false;
    if (n->fabric.shares_locks && !kv_guard_prepare(e))
        return false;
    int rc = kv_domain_open(&n->domain, &n->fabric, &call);
    return !rc || kv_error_call(e, KV_NATIVE, call, -rc, "%s failed for provider %s on %s: %s", call, config->provider,
                                address ? address : "this machine", fi_strerror(-rc));
}

static void close_nics(struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->num_nics; i++) {
        if (p->nics[i].domain.domain)
            kv_domain_close(&p->nics[i].domain);
        kv_fabric_close(&p->nics[i].fabric);
    }
    free(p->nics);
    p->nics = NULL;
}

static bool same_address(const char *one, const char *other)
{
    return one && other ? !strcmp(one, other) : one == other;
}

static bool open_nics(struct kv_poller *p, const struct kv_config *config, struct kv_error *e)
{
    if (!config->num_nics || config->num_nics > KV_MAX_NICS)
        return kv_error_set(e, KV_INVALID, "%u network interfaces; want 1 to %d", config->num_nics, KV_MAX_NICS);
    p->nics = calloc(config->num_nics, sizeof *p->nics);
    if (!p->nics)
        return kv_error_memory(e);
    p->num_nics = config->num_nics;
    for (uint32_t i = 0; i < p->num_nics; i++) {
        for (uint32_t k = 0; k < i; k++)
            p->nics[i].again |= same_address(config->nics[i], config->nics[k]);
        if (open_nic(&p->nics[i], config, config->nics[i], e))
            continue;
        close_nics(p);
        return false;
    }
    return true;
}

struct kv_poller *kv_poller_open(const struct kv_config *config, struct kv_state *state, struct kv_error *e)
{
    struct kv_poller *p = aligned_alloc(64, (sizeof *p + 63) & ~(size_t)63);
    if (!p) {
        kv_error_memory(e);
        return NULL;
    }
    memset(p, 0, sizeof *p);
    p->config = *config;
    p->config.provider = NULL, p->config.nics = NULL;   /* the caller's; not needed later */
    p->config.num_pollers += !config->num_pollers;
    p->state = state;
    p->clock = kv_now_ns;
    p->timeouts_checked_ns = kv_look(p);
    p->commands.bell.fd = p->records.bell.fd = -1;
    kv_list_init(&p->active);
    kv_list_init(&p->domains);
    kv_list_init(&p->ports);
    sem_init(&p->front.running, 0, 0);
    pthread_mutex_init(&p->front.lock, NULL);
    if (!kv_commands_init(&p->commands) || !kv_bell_init(&p->records.bell, false)) {
        kv_error_call(e, KV_SYSTEM, "eventfd", errno, "cannot make a bell");
        goto undo;
    }
    if (!open_nics(p, config, e))
        goto undo;
    if (!kv_state_attach(state, &p->commands.bell)) {
        kv_error_set(e, KV_FULL, "a state file serves at most %d pollers", KV_MAX_BELLS);
        close_nics(p);
        goto undo;
    }
    kv_live(KV_LIVE_POLLERS, 1);
    return p;
undo:
    sem_destroy(&p->front.running);
    kv_bell_close(&p->commands.bell);
    kv_bell_close(&p->records.bell);
    pthread_mutex_destroy(&p->front.lock);
    free(p);
    return NULL;
}

/* The thread might be stuck inside libfabric in a way that its guard does not know. As long as the guard leaves calls,
   it is not. */
static bool join(struct kv_poller *p)
{
    uint64_t left = 0, left_before;
    do {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += JOIN_WAIT_S;
        left_before = left;
        if (!pthread_timedjoin_np(p->front.thread, NULL, &until))
            return true;
        left = atomic_load_explicit(&p->stats.abandoned, memory_order_relaxed);
    } while (left != left_before);
    return false;
}

bool kv_poller_close(struct kv_poller *p)
{
    if (atomic_exchange(&p->front.closed, true))
        return !p->front.stuck;
    while (atomic_load(&p->front.callers))
        sched_yield();   /* calls under way finish first; no new one begins */
    if (p->front.started) {
        atomic_store(&p->stop, true);
        kv_bell_ring(&p->commands.bell);
        if (!join(p)) {
            p->front.stuck = true;
            return false;
        }
    } else {
        kv_poller_wind_down(p);
    }
    if (p->num_unclosable) {
        p->front.stuck = true;
        return false;
    }
    kv_state_detach(p->state, &p->commands.bell);
    for (uint32_t i = 0; i < p->front.num_templates; i++)
        if (p->front.templates[i])
            kv_template_drop(p->front.templates[i]);
    for (uint32_t i = 0; i < p->front.num_streams; i++)
        kv_stream_free(p->front.streams[i]);
    free(p->front.templates);
    close_nics(p);
    kv_bell_close(&p->commands.bell);
    kv_live(KV_LIVE_POLLERS, -1);
    atomic_store_explicit(&p->front.joined, true, memory_order_release);
    if (p->backlog_head < p->backlog_tail)
        kv_bell_ring(&p->records.bell);
    return true;
}

void kv_poller_free(struct kv_poller *p)
{
    if (!kv_poller_close(p))
        return;   /* the thread may go on one day: nothing it uses is freed */
    kv_bell_close(&p->records.bell);
    pthread_mutex_destroy(&p->front.lock);
    sem_destroy(&p->front.running);
    free(atomic_load(&p->trace));
    free(p->backlog);
    free(p);
}

/* ---- what the other front files use ---- */
void kv_front_leave(struct kv_poller *p) { atomic_fetch_sub(&p->front.callers, 1); }

bool kv_front_enter(struct kv_poller *p, struct kv_error *e)
{
    atomic_fetch_add(&p->front.callers, 1);
    if (!atomic_load(&p->front.closed))
        return true;
    kv_front_leave(p);
    return kv_error_set(e, KV_CLOSED, "the poller is closed");
}

bool kv_front_start(struct kv_poller *p, struct kv_error *e)
{
    if (p->front.started)
        return true;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    int rc = 0;
    if (p->config.core >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(p->config.core, &set);
        rc = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    sigset_t all, before;   /* signals stay with the threads that know what to do with them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!rc)
        rc = pthread_create(&p->front.thread, &attributes, kv_poller_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (rc)
        return kv_error_call(e, KV_SYSTEM, "pthread_create", rc, "cannot start the poller on core %d", p->config.core);
    while (sem_wait(&p->front.running))
        ;   /* interrupted */
    if (p->front.start_error) {
        pthread_join(p->front.thread, NULL);
        return kv_error_call(e, KV_SYSTEM, "timer_create", p->front.start_error,
                             "cannot make the timer that watches over the poller's calls");
    }
    pthread_setname_np(p->front.thread, "kvmsgr-poller");
    p->front.started = true;
    return true;
}

bool kv_front_submit(struct kv_poller *p, struct kv_command c, struct kv_error *e)
{
    uint64_t deadline = kv_now_ns() + SUBMIT_WAIT_NS;
    while (!kv_commands_reserve(&p->commands)) {
        if (kv_now_ns() > deadline)
            return kv_error_set(e, KV_FULL, "the poller took none of %u commands for a second", KV_COMMANDS);
        sched_yield();
    }
    kv_commands_push(&p->commands, c);
    return true;
}

/* ---- what a poller is told before it starts ---- */
bool kv_poller_self_test(struct kv_poller *p, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    bool ok = !p->front.started || kv_error_set(e, KV_CLOSED, "the self-test comes before the first link or step");
    for (uint32_t i = 0; i < p->num_nics && ok; i++)
        ok = p->nics[i].again || kv_fabric_self_test(&p->nics[i].fabric, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}

static void drop_source(struct kv_poller *p, uint32_t num_nics)
{
    for (uint32_t i = 0; i < num_nics; i++)
        kv_domain_drop_source(&p->nics[i].domain);
}

static int64_t register_locked(struct kv_poller *p, uint64_t address, uint64_t bytes, uint64_t nics, struct kv_error *e)
{
    uint32_t index = p->nics->domain.num_sources;   /* every interface has all of them */
    if (p->front.started) {
        kv_error_set(e, KV_CLOSED, "regions are registered before the first link or step");
        return -1;
    }
    if (index == KV_MAX_REGIONS || !bytes || address + bytes < address) {
        kv_error_set(e, KV_INVALID, "region %u of at most %d: %llu bytes at 0x%llx, on interfaces 0x%llx", index,
                     KV_MAX_REGIONS, (unsigned long long)bytes, (unsigned long long)address, (unsigned long long)nics);
        return -1;
    }
    for (uint32_t i = 0; i < p->num_nics; i++) {
        struct kv_nic *n = &p->nics[i];
        int rc = kv_domain_add_source(&n->domain, (char *)(uintptr_t)address, bytes, nics >> i & 1);
        if (!rc)
            continue;
        drop_source(p, i);
        kv_error_call(e, KV_NATIVE, "fi_mr_reg", -rc, "cannot register %llu bytes with provider %s: %s",
                      (unsigned long long)bytes, kv_fabric_provider(&n->fabric), fi_strerror(-rc));
        return -1;
    }
    return index;
}

int64_t kv_register(struct kv_poller *p, uint64_t address, uint64_t bytes, uint64_t nics, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return -1;
    kv_front_lock(p);
    int64_t index = register_locked(p, address, bytes, nics, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return index;
}

int64_t kv_add_stream(struct kv_poller *p, struct kv_layer_counter *c, struct kv_turns *turns, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return -1;
    kv_front_lock(p);
    uint32_t index = p->front.num_streams;
    struct kv_stream *s = NULL;
    if (index == KV_MAX_STREAMS)
        kv_error_set(e, KV_FULL, "a poller watches at most %d layer counters", KV_MAX_STREAMS);
    else if (!(s = kv_stream_new(c, index, turns)))
        kv_error_memory(e);
    bool ok = s && kv_front_submit(p, (struct kv_command){.kind = KV_ADD_STREAM, .object = s}, e);
    if (ok)
        p->front.streams[p->front.num_streams++] = s;
    else if (s)
        kv_stream_free(s);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok ? (int64_t)index : -1;
}
