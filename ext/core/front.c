/* The callers' side of a poller: everything here may be called from any thread. begin_step waits for nothing but a
   look-up; the rest may also wait for room in the command ring. */
#include "poller.h"
#include "census.h"
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define SOURCE_KEY 0x50c0000000000000ull
#define SUBMIT_WAIT_NS KV_S

/* ---- opening and closing ---- */
struct kv_poller *kv_poller_open(const struct kv_config *config, struct kv_state *state, struct kv_error *e)
{
    struct kv_poller *p = aligned_alloc(64, (sizeof *p + 63) & ~(size_t)63);
    if (!p) {
        kv_error_memory(e);
        return NULL;
    }
    memset(p, 0, sizeof *p);
    p->config = *config;
    p->config.provider = p->config.node = NULL;   /* the caller's; not needed later */
    p->state = state;
    p->now_ns = p->timeouts_checked_ns = kv_now_ns();
    p->commands.bell.fd = p->records.bell.fd = -1;
    kv_list_init(&p->active);
    pthread_mutex_init(&p->front.lock, NULL);
    if (!kv_commands_init(&p->commands) || !kv_bell_init(&p->records.bell, false)) {
        kv_error_call(e, KV_SYSTEM, "eventfd", errno, "cannot make a bell");
        goto undo;
    }
    if (!kv_domain_open(&p->domain, config->provider, config->node, config->cq_entries, e))
        goto undo;
    if (!kv_state_attach(state, &p->commands.bell)) {
        kv_error_set(e, KV_FULL, "a state file serves at most %d pollers", KV_MAX_BELLS);
        kv_domain_close(&p->domain);
        goto undo;
    }
    kv_live(KV_LIVE_POLLERS, 1);
    return p;
undo:
    kv_bell_close(&p->commands.bell);
    kv_bell_close(&p->records.bell);
    pthread_mutex_destroy(&p->front.lock);
    free(p);
    return NULL;
}

void kv_poller_close(struct kv_poller *p)
{
    if (atomic_exchange(&p->front.closed, true))
        return;
    while (atomic_load(&p->front.callers))
        sched_yield();   /* calls under way finish first; no new one begins */
    if (p->front.started) {
        atomic_store(&p->stop, true);
        kv_bell_ring(&p->commands.bell);
        pthread_join(p->front.thread, NULL);
    } else {
        kv_poller_wind_down(p);
    }
    kv_state_detach(p->state, &p->commands.bell);
    for (uint32_t i = 0; i < p->front.num_regions; i++)
        kv_region_close(&p->front.regions[i]);
    kv_domain_close(&p->domain);
    for (uint32_t i = 0; i < p->front.num_templates; i++)
        if (p->front.templates[i])
            kv_template_drop(p->front.templates[i]);
    for (uint32_t i = 0; i < p->front.num_streams; i++)
        kv_stream_free(p->front.streams[i]);
    free(p->front.templates);
    kv_bell_close(&p->commands.bell);
    kv_live(KV_LIVE_POLLERS, -1);
    atomic_store_explicit(&p->front.joined, true, memory_order_release);
    if (p->backlog_head < p->backlog_tail)
        kv_bell_ring(&p->records.bell);
}

void kv_poller_free(struct kv_poller *p)
{
    kv_poller_close(p);
    kv_bell_close(&p->records.bell);
    pthread_mutex_destroy(&p->front.lock);
    free(atomic_load(&p->trace));
    free(p->backlog);
    free(p);
}

/* ---- the gate: a call is either finished before the poller closes, or refused ---- */
static void leave(struct kv_poller *p) { atomic_fetch_sub(&p->front.callers, 1); }

static bool enter(struct kv_poller *p, struct kv_error *e)
{
    atomic_fetch_add(&p->front.callers, 1);
    if (!atomic_load(&p->front.closed))
        return true;
    leave(p);
    return kv_error_set(e, KV_CLOSED, "the poller is closed");
}

static void lock(struct kv_poller *p) { pthread_mutex_lock(&p->front.lock); }
static void unlock(struct kv_poller *p) { pthread_mutex_unlock(&p->front.lock); }

/* Signals stay with the threads that know what to do with them. */
static bool start_locked(struct kv_poller *p, struct kv_error *e)
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
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (!rc)
        rc = pthread_create(&p->front.thread, &attributes, kv_poller_main, p);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (rc)
        return kv_error_call(e, KV_SYSTEM, "pthread_create", rc, "cannot start the poller on core %d", p->config.core);
    pthread_setname_np(p->front.thread, "kvmsgr-poller");
    p->front.started = true;
    return true;
}

/* For calls that are not on an engine's path: waits a while for the poller to make room. */
static bool submit(struct kv_poller *p, struct kv_command c, struct kv_error *e)
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
    if (!enter(p, e))
        return false;
    lock(p);
    bool ok = !p->front.started ? kv_domain_self_test(&p->domain, e)
                                : kv_error_set(e, KV_CLOSED, "the self-test comes before the first link or step");
    unlock(p);
    leave(p);
    return ok;
}

int64_t kv_register(struct kv_poller *p, uint64_t address, uint64_t bytes, struct kv_error *e)
{
    if (!enter(p, e))
        return -1;
    lock(p);
    uint32_t index = p->front.num_regions;
    int64_t result = -1;
    if (p->front.started) {
        kv_error_set(e, KV_CLOSED, "regions are registered before the first link or step");
    } else if (index == KV_MAX_REGIONS || !bytes || address + bytes < address) {
        kv_error_set(e, KV_INVALID, "region %u of at most %d: %llu bytes at 0x%llx", index, KV_MAX_REGIONS,
                     (unsigned long long)bytes, (unsigned long long)address);
    } else {
        p->front.regions[index] = (struct kv_region){.address = (char *)(uintptr_t)address, .bytes = bytes};
        int rc = kv_region_open(&p->domain, &p->front.regions[index], FI_WRITE, SOURCE_KEY + index);
        if (rc)
            kv_error_call(e, KV_NATIVE, "fi_mr_reg", -rc, "cannot register %llu bytes with provider %s: %s",
                          (unsigned long long)bytes, kv_domain_provider(&p->domain), fi_strerror(-rc));
        else
            result = p->front.num_regions++;
    }
    unlock(p);
    leave(p);
    return result;
}

int64_t kv_add_stream(struct kv_poller *p, struct kv_layer_counter *c, struct kv_error *e)
{
    if (!enter(p, e))
        return -1;
    lock(p);
    uint32_t index = p->front.num_streams;
    struct kv_stream *s = NULL;
    if (index == KV_MAX_STREAMS)
        kv_error_set(e, KV_FULL, "a poller watches at most %d layer counters", KV_MAX_STREAMS);
    else if (!(s = kv_stream_new(c, index)))
        kv_error_memory(e);
    bool ok = s && submit(p, (struct kv_command){.kind = KV_ADD_STREAM, .object = s}, e);
    if (ok)
        p->front.streams[p->front.num_streams++] = s;
    else if (s)
        kv_stream_free(s);
    unlock(p);
    leave(p);
    return ok ? (int64_t)index : -1;
}

/* ---- links ---- */
static struct kv_link *find_locked(struct kv_poller *p, uint32_t id, struct kv_error *e)
{
    struct kv_link *l = p->front.links[kv_link_slot(id)];
    if (l && l->id == id)
        return l;
    kv_error_set(e, KV_MISSING, "link %u is not open", id);
    return NULL;
}

static struct kv_link *find_opened_locked(struct kv_poller *p, uint32_t id, struct kv_error *e)
{
    struct kv_link *l = find_locked(p, id, e);
    if (!l || atomic_load_explicit(&l->opened, memory_order_acquire))
        return l;
    kv_error_set(e, KV_CLOSED, "link %u has not been opened yet: wait for its LINK_OPENED record", id);
    return NULL;
}

static int64_t open_link_locked(struct kv_poller *p, const uint64_t *keys, uint32_t num_keys, struct kv_error *e)
{
    if (num_keys != p->front.num_regions) {
        kv_error_set(e, KV_INVALID, "%u keys for %u regions", num_keys, p->front.num_regions);
        return -1;
    }
    uint32_t slot = 0;
    while (slot < KV_MAX_LINKS && atomic_load_explicit(&p->link_slot_busy[slot], memory_order_acquire))
        slot++;
    if (slot == KV_MAX_LINKS) {
        kv_error_set(e, KV_FULL, "%u links are open", KV_MAX_LINKS);
        return -1;
    }
    uint32_t id = (++p->front.links_made << KV_LINK_SLOT_BITS) | slot;
    struct kv_link *l = kv_link_new(id, p->front.regions, keys, num_keys);
    if (!l) {
        kv_error_memory(e);
        return -1;
    }
    if (!start_locked(p, e) || !submit(p, (struct kv_command){.kind = KV_OPEN_LINK, .object = l}, e)) {
        kv_link_free(l);
        return -1;
    }
    atomic_store_explicit(&p->link_slot_busy[slot], true, memory_order_relaxed);
    p->front.links[slot] = l;
    return id;
}

int64_t kv_open_link(struct kv_poller *p, const uint64_t *keys, uint32_t num_keys, struct kv_error *e)
{
    if (!enter(p, e))
        return -1;
    lock(p);
    int64_t id = open_link_locked(p, keys, num_keys, e);
    unlock(p);
    leave(p);
    return id;
}

int64_t kv_link_name(struct kv_poller *p, uint32_t id, uint8_t name[KV_NAME_BYTES], struct kv_error *e)
{
    if (!enter(p, e))
        return -1;
    lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    int64_t bytes = l ? (int64_t)l->endpoint.name_bytes : -1;
    if (l)
        memcpy(name, l->endpoint.name, l->endpoint.name_bytes);
    unlock(p);
    leave(p);
    return bytes;
}

int64_t kv_link_regions(struct kv_poller *p, uint32_t id, struct kv_remote_region *out, struct kv_error *e)
{
    if (!enter(p, e))
        return -1;
    lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    int64_t num = l ? (int64_t)l->num_regions : -1;
    for (int64_t i = 0; i < num; i++) {
        const struct kv_region *r = &l->regions[i];
        out[i] = (struct kv_remote_region){
            p->domain.virtual_addresses ? (uint64_t)(uintptr_t)r->address : 0, r->bytes, l->keys[i]};
    }
    unlock(p);
    leave(p);
    return num;
}

bool kv_connect_link(struct kv_poller *p, uint32_t id, const void *name, size_t name_bytes,
                     const struct kv_remote_region *regions, uint32_t num_regions, uint32_t window, struct kv_error *e)
{
    if (!enter(p, e))
        return false;
    lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    bool ok = l;
    if (l && l->connected)
        ok = kv_error_set(e, KV_CLOSED, "link %u is connected already", id);
    ok = ok && kv_link_set_remote(l, name, name_bytes, regions, num_regions, window, e) &&
         submit(p, (struct kv_command){.kind = KV_CONNECT_LINK, .link = id}, e);
    unlock(p);
    leave(p);
    return ok;
}

bool kv_close_link(struct kv_poller *p, uint32_t id, struct kv_error *e)
{
    if (!enter(p, e))
        return false;
    lock(p);
    struct kv_link *l = find_locked(p, id, e);
    bool ok = l && submit(p, (struct kv_command){.kind = KV_CLOSE_LINK, .link = id}, e);
    if (ok) {
        p->front.links[kv_link_slot(id)] = NULL;   /* the poller's alone from here */
        for (uint32_t i = 0; i < p->front.num_templates; i++) {
            struct kv_template *t = p->front.templates[i];
            if (t && t->link == id) {
                p->front.templates[i] = NULL;
                kv_template_drop(t);
            }
        }
    }
    unlock(p);
    leave(p);
    return ok;
}

/* ---- templates ---- */
/* The bytes of a region from `base` on. False when there is no such place. */
static bool room_from(int64_t region, int64_t base, uint32_t num_regions, uint64_t region_bytes, uint64_t *room)
{
    if (region < 0 || region >= num_regions || base < 0 || (uint64_t)base > region_bytes)
        return false;
    *room = region_bytes - (uint64_t)base;
    return true;
}

static bool fill_entry(struct kv_poller *p, struct kv_link *l, const struct kv_entry_spec *spec, uint32_t index,
                       struct kv_entry *n, struct kv_error *e)
{
    bool src_known = spec->src_region >= 0 && spec->src_region < p->front.num_regions;
    bool dst_known = spec->dst_region >= 0 && spec->dst_region < l->num_remote_regions;
    const struct kv_region *src = src_known ? &p->front.regions[spec->src_region] : NULL;
    const struct kv_remote_region *dst = dst_known ? &l->remote_regions[spec->dst_region] : NULL;
    if (spec->signal < 0 || spec->signal > KV_MAX_BUMPS || !src || !dst ||
        !room_from(spec->src_region, spec->src_base, p->front.num_regions, src->bytes, &n->src_room) ||
        !room_from(spec->dst_region, spec->dst_base, l->num_remote_regions, dst->bytes, &n->dst_room))
        return kv_error_set(e, KV_INVALID, "entry %u: source region %lld at %lld of %u regions, destination region %lld at "
                            "%lld of %u regions, signal %lld: no such place", index, (long long)spec->src_region,
                            (long long)spec->src_base, p->front.num_regions, (long long)spec->dst_region,
                            (long long)spec->dst_base, l->num_remote_regions, (long long)spec->signal);
    n->src = src->address + spec->src_base;
    n->desc = src->desc;
    n->dst = dst->base + (uint64_t)spec->dst_base;
    n->key = dst->key;
    n->signal = (uint64_t)spec->signal;
    return true;
}

/* The place of a new template in the table; -1 without memory. */
static int64_t template_place_locked(struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->front.num_templates; i++)
        if (!p->front.templates[i])
            return i;
    if (p->front.num_templates == p->front.template_capacity) {
        uint32_t capacity = p->front.template_capacity ? 2 * p->front.template_capacity : 64;
        struct kv_template **larger = realloc(p->front.templates, capacity * sizeof *larger);
        if (!larger)
            return -1;
        p->front.templates = larger;
        p->front.template_capacity = capacity;
    }
    p->front.templates[p->front.num_templates] = NULL;
    return p->front.num_templates++;
}

static int64_t add_template_locked(struct kv_poller *p, uint32_t link, const struct kv_template_spec *spec,
                                   struct kv_error *e)
{
    struct kv_link *l = find_locked(p, link, e);
    if (!l)
        return -1;
    if (!l->connected) {
        kv_error_set(e, KV_CLOSED, "link %u is not connected: a template needs the peer's regions", link);
        return -1;
    }
    struct kv_template *t = kv_template_new(spec->num_runs, spec->num_entries);
    int64_t place = t ? template_place_locked(p) : -1;
    bool ok = place >= 0 || kv_error_memory(e);
    if (ok) {
        t->link = link;
        t->src_page_bytes = spec->src_page_bytes, t->dst_page_bytes = spec->dst_page_bytes;
        t->row_bytes = spec->row_bytes, t->item_bytes = spec->item_bytes;
        if (spec->num_runs)
            memcpy(t->runs, spec->runs, spec->num_runs * sizeof *t->runs);
        for (uint32_t i = 0; i < spec->num_entries && ok; i++)
            ok = fill_entry(p, l, &spec->entries[i], i, &t->entries[i], e);
        ok = ok && kv_template_check(t, e);
    }
    if (ok)
        p->front.templates[place] = t;
    else if (t)
        kv_template_drop(t);
    return ok ? place : -1;
}

int64_t kv_add_template(struct kv_poller *p, uint32_t link, const struct kv_template_spec *spec, struct kv_error *e)
{
    if (!enter(p, e))
        return -1;
    lock(p);
    int64_t place = add_template_locked(p, link, spec, e);
    unlock(p);
    leave(p);
    return place;
}

static struct kv_template *hold_template(struct kv_poller *p, const struct kv_order *o, struct kv_error *e)
{
    lock(p);
    struct kv_template *t = o->template < p->front.num_templates ? p->front.templates[o->template] : NULL;
    if (t && t->link == o->link)
        kv_template_hold(t);
    else
        t = NULL;
    unlock(p);
    if (!t)
        kv_error_set(e, KV_INVALID, "link %u has no template %u", o->link, o->template);
    return t;
}

/* ---- steps ---- */
static struct kv_transfer *make_transfer(struct kv_poller *p, const struct kv_order *o, size_t index, uint32_t num_bumps,
                                         struct kv_error *e)
{
    struct kv_error why = {0};
    struct kv_template *t = hold_template(p, o, &why);
    struct kv_transfer *x = NULL;
    if (t) {
        uint64_t last = t->entries[t->num_entries - 1].signal;
        if (o->imm & (KV_MAX_ROWS - 1))
            kv_error_set(&why, KV_INVALID, "immediate 0x%x already carries rows", o->imm);
        else if (!o->ready && last > num_bumps)
            kv_error_set(&why, KV_INVALID, "it waits for signal %llu of a step with %u bumps", (unsigned long long)last,
                         num_bumps);
        else
            x = kv_transfer_new(t, o, p->config.max_write_bytes, &why);
        kv_template_drop(t);
    }
    if (!x)
        kv_error_set(e, why.kind, "transfer %zu: %.200s", index, why.text);
    return x;
}

static uint64_t begin_step(struct kv_poller *p, uint32_t index, uint32_t num_bumps, const struct kv_order *orders,
                           size_t num_orders, uint64_t deadline_ns, struct kv_error *e)
{
    lock(p);
    struct kv_stream *stream = index < p->front.num_streams ? p->front.streams[index] : NULL;
    bool started = start_locked(p, e);
    unlock(p);
    if (!started)
        return 0;
    if (!stream || num_bumps > KV_MAX_BUMPS) {
        kv_error_set(e, KV_INVALID, "layer counter %u of %u, %u bumps", index, p->front.num_streams, num_bumps);
        return 0;
    }
    struct kv_step *s = kv_step_new(stream, num_bumps, kv_now_ns() + deadline_ns);
    if (!s) {
        kv_error_memory(e);
        return 0;
    }
    for (size_t i = 0; i < num_orders; i++) {
        struct kv_transfer *x = make_transfer(p, &orders[i], i, num_bumps, e);
        if (!x)
            goto undo;
        kv_list_append(&s->transfers, &x->in_step);
    }
    if (!kv_commands_reserve(&p->commands)) {
        kv_error_set(e, KV_FULL, "%u commands wait for the poller", KV_COMMANDS);
        goto undo;
    }
    uint64_t ticket = kv_stream_claim(stream);
    if (!ticket) {
        kv_commands_unreserve(&p->commands);
        kv_error_set(e, KV_FULL, "%u steps of layer counter %u are outstanding, one a ring slot",
                     stream->counter->num_slots, index);
        goto undo;
    }
    s->ticket = ticket;
    kv_commands_push(&p->commands, (struct kv_command){.kind = KV_ARM_STEP, .object = s});
    return ticket;   /* the step is the poller's, and may be gone already */
undo:
    kv_step_free(s);
    return 0;
}

uint64_t kv_begin_step(struct kv_poller *p, uint32_t stream, uint32_t num_bumps, const struct kv_order *orders,
                       size_t num_orders, uint64_t deadline_ns, struct kv_error *e)
{
    if (!enter(p, e))
        return 0;
    uint64_t ticket = begin_step(p, stream, num_bumps, orders, num_orders, deadline_ns, e);
    leave(p);
    return ticket;
}

bool kv_abandon(struct kv_poller *p, uint32_t index, uint64_t ticket, struct kv_error *e)
{
    if (!enter(p, e))
        return false;
    lock(p);
    struct kv_stream *s = index < p->front.num_streams ? p->front.streams[index] : NULL;
    unlock(p);
    bool ok = s || kv_error_set(e, KV_INVALID, "there is no layer counter %u", index);
    ok = ok && submit(p, (struct kv_command){.kind = KV_ABANDON_STEP, .object = s, .value = ticket}, e);
    leave(p);
    return ok;
}

bool kv_stop_tag(struct kv_poller *p, uint32_t link, uint32_t tag, struct kv_error *e)
{
    if (!enter(p, e))
        return false;
    bool ok = submit(p, (struct kv_command){.kind = KV_STOP_TAG, .link = link, .value = tag}, e);
    leave(p);
    return ok;
}

/* ---- for tests, benchmarks and people who look on ---- */
#define X(name) #name,
const char *const kv_stats_names[KV_NUM_STATS] = {KV_STATS(X)};
#undef X

void kv_stats_read(struct kv_poller *p, uint64_t values[KV_NUM_STATS])
{
    const _Atomic uint64_t *stats = (const void *)&p->stats;
    for (int i = 0; i < KV_NUM_STATS; i++)
        values[i] = atomic_load_explicit(&stats[i], memory_order_relaxed);
}

bool kv_inject(struct kv_poller *p, enum kv_fault fault, uint64_t nth, struct kv_error *e)
{
    if (!nth || nth > INT64_MAX)
        return kv_error_set(e, KV_INVALID, "writes are counted from 1");
    atomic_store_explicit(&p->faults.left[fault], (int64_t)nth, memory_order_relaxed);
    return true;
}

bool kv_trace_on(struct kv_poller *p, uint32_t capacity, struct kv_error *e)
{
    struct kv_trace *t = calloc(1, sizeof *t + capacity * sizeof *t->marks), *none = NULL;
    if (!t || !capacity) {
        free(t);
        return capacity ? kv_error_memory(e) : kv_error_set(e, KV_INVALID, "a trace needs room");
    }
    t->capacity = capacity;
    if (atomic_compare_exchange_strong(&p->trace, &none, t))
        return true;
    free(t);
    return kv_error_set(e, KV_CLOSED, "the trace is on already");
}

uint32_t kv_trace_read(struct kv_poller *p, struct kv_mark *out, uint32_t max)
{
    struct kv_trace *t = atomic_load(&p->trace);
    return t ? kv_trace_take(t, out, max) : 0;
}
