/* The callers' side: steps, and what looks on. */
#include "front.h"
#include <sched.h>
#include <stdlib.h>

static struct kv_template *hold_template(struct kv_poller *p, const struct kv_order *o, struct kv_error *e)
{
    kv_front_lock(p);
    struct kv_template *t = o->template < p->front.num_templates ? p->front.templates[o->template] : NULL;
    if (t && t->link == o->link)
        kv_template_hold(t);
    else
        t = NULL;
    kv_front_unlock(p);
    if (!t)
        kv_error_set(e, KV_INVALID, "link %u has no template %u", o->link, o->template);
    return t;
}

/* `num_bumps`: of its step; one that joins a step waits for as many as that turns out to have. */
static struct kv_transfer *make_transfer(struct kv_poller *p, const struct kv_order *o, size_t index,
                                         uint32_t num_bumps, struct kv_error *e)
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

/* A step as it is made, on all of its pollers; or what joins one. */
struct making {
    struct kv_poller *const *pollers;
    const struct kv_part *parts;
    uint32_t num_pollers, num_parts;
    uint64_t deadline_ns;
    bool joins;
    struct kv_step *steps[];   /* of a poller num_parts; NULL: it has nothing to do with that part */
};

static struct kv_step **steps_of(struct making *m, uint32_t poller) { return m->steps + poller * m->num_parts; }

/* The streams of a poller's parts. Under its lock. */
static bool find_streams(struct making *m, uint32_t poller, struct kv_stream **streams, struct kv_error *e)
{
    struct kv_poller *p = m->pollers[poller];
    uint64_t taken = 0;
    for (uint32_t i = 0; i < m->num_parts; i++) {
        uint32_t index = m->parts[i].stream, num_bumps = m->parts[i].num_bumps;
        streams[i] = NULL;
        if (!(m->parts[i].pollers >> poller & 1))
            continue;
        if (index >= p->front.num_streams || num_bumps > KV_MAX_BUMPS)
            return kv_error_set(e, KV_INVALID, "layer counter %u of %u, %u bumps", index, p->front.num_streams,
                                num_bumps);
        if (taken >> index & 1)
            return kv_error_set(e, KV_INVALID, "layer counter %u has two parts of one step", index);
        taken |= 1ull << index;
        streams[i] = p->front.streams[index];
    }
    return !taken || kv_front_start(p, e);
}

static bool make_steps(struct making *m, uint32_t poller, struct kv_error *e)
{
    struct kv_poller *p = m->pollers[poller];
    struct kv_stream *streams[KV_MAX_STREAMS];
    kv_front_lock(p);
    bool ok = find_streams(m, poller, streams, e);
    kv_front_unlock(p);
    for (uint32_t i = 0; i < m->num_parts && ok; i++)
        if (streams[i] && !(steps_of(m, poller)[i] = kv_step_new(streams[i], m->parts[i].num_bumps, m->deadline_ns)))
            ok = kv_error_memory(e);
    return ok;
}

static bool add_order(struct making *m, const struct kv_order *o, size_t index, struct kv_error *e)
{
    uint32_t poller = kv_link_poller(o->link, m->num_pollers);
    if (o->part >= m->num_parts)
        return kv_error_set(e, KV_INVALID, "transfer %zu: part %u of a step of %u", index, o->part, m->num_parts);
    struct kv_step *s = steps_of(m, poller)[o->part];
    if (!s)
        return kv_error_set(e, KV_INVALID, "transfer %zu: layer counter %u is not watched for link %u", index,
                            m->parts[o->part].stream, o->link);
    if (m->joins && o->ready)
        return kv_error_set(e, KV_INVALID, "transfer %zu: it joins a step, and cannot be ready before it", index);
    uint32_t num_bumps = m->joins ? KV_MAX_BUMPS : m->parts[o->part].num_bumps;
    struct kv_transfer *x = make_transfer(m->pollers[poller], o, index, num_bumps, e);
    if (x)
        kv_list_append(&s->transfers, &x->in_step);
    return x;
}

/* What the pollers of a part share; NULL with the error. */
static struct kv_turns *find_turns(struct making *m, uint32_t part, uint32_t *num_steps, struct kv_error *e)
{
    struct kv_turns *turns = NULL;
    *num_steps = 0;
    for (uint32_t i = 0; i < m->num_pollers; i++) {
        struct kv_step *s = steps_of(m, i)[part];
        if (!s)
            continue;
        if (turns && s->stream->turns != turns) {
            kv_error_set(e, KV_INVALID, "layer counter %u is another one in each poller", m->parts[part].stream);
            return NULL;
        }
        turns = s->stream->turns;
        ++*num_steps;
    }
    if (!turns)
        kv_error_set(e, KV_INVALID, "no poller watches layer counter %u", m->parts[part].stream);
    return turns;
}

/* Takes a ticket for every part, or none. */
static bool claim(struct making *m, uint64_t *tickets, struct kv_error *e)
{
    struct kv_turns *turns[KV_MAX_STREAMS];
    for (uint32_t part = 0; part < m->num_parts; part++) {
        uint32_t num_steps;
        turns[part] = find_turns(m, part, &num_steps, e);
        if (turns[part] && (tickets[part] = kv_turns_claim(turns[part], num_steps)))
            continue;
        if (turns[part])
            kv_error_set(e, KV_FULL, "%u steps of layer counter %u are outstanding, one a ring slot: run one, or abandon what will not run",
                         turns[part]->num_slots, m->parts[part].stream);
        while (part--)
            kv_turns_unclaim(turns[part], tickets[part]);
        return false;
    }
    return true;
}

/* The first step of a poller, with the others behind it, each with its ticket. NULL: it has nothing to do. */
static struct kv_step *chain(struct making *m, uint32_t poller, const uint64_t *tickets)
{
    struct kv_step *first = NULL;
    for (uint32_t part = m->num_parts; part--;) {
        struct kv_step *s = steps_of(m, poller)[part];
        if (!s)
            continue;
        s->ticket = tickets[part];
        s->next_part = first;
        first = s;
    }
    return first;
}

static bool reserve_and_claim(struct making *m, uint64_t *tickets, struct kv_error *e)
{
    uint32_t num = 0;
    while (num < m->num_pollers && kv_commands_reserve(&m->pollers[num]->commands))
        num++;
    bool ok = num == m->num_pollers ? m->joins || claim(m, tickets, e)
                                    : kv_error_set(e, KV_FULL, "%u commands wait for the poller", KV_COMMANDS);
    while (!ok && num--)
        kv_commands_unreserve(&m->pollers[num]->commands);
    return ok;
}

/* Where nothing joins, nobody needs to know of it. */
static void drop_empty_steps(struct making *m)
{
    for (uint32_t i = 0; i < m->num_pollers * m->num_parts; i++)
        if (m->steps[i] && kv_list_empty(&m->steps[i]->transfers)) {
            kv_step_free(m->steps[i]);
            m->steps[i] = NULL;
        }
}

static bool make_and_push(struct making *m, const struct kv_order *orders, size_t num_orders, uint64_t *tickets,
                          struct kv_error *e)
{
    bool ok = true;
    for (uint32_t i = 0; i < m->num_pollers && ok; i++)
        ok = make_steps(m, i, e);
    for (size_t i = 0; i < num_orders && ok; i++)
        ok = add_order(m, &orders[i], i, e);
    if (m->joins && ok)
        drop_empty_steps(m);
    ok = ok && reserve_and_claim(m, tickets, e);
    for (uint32_t i = 0; i < m->num_pollers * m->num_parts && !ok; i++)
        if (m->steps[i])
            kv_step_free(m->steps[i]);
    for (uint32_t i = 0; i < m->num_pollers && ok; i++) {
        struct kv_step *first = chain(m, i, tickets);
        if (first)   /* once it is pushed it is the poller's, and may be gone already */
            kv_commands_push(&m->pollers[i]->commands,
                             (struct kv_command){.kind = m->joins ? KV_JOIN_STEP : KV_ARM_STEP, .object = first});
        else
            kv_commands_unreserve(&m->pollers[i]->commands);
    }
    return ok;
}

static bool make(const struct making *wanted, const struct kv_order *orders, size_t num_orders, uint64_t *tickets,
                 struct kv_error *e)
{
    if (!wanted->num_parts || wanted->num_parts > KV_MAX_STREAMS)
        return kv_error_set(e, KV_INVALID, "a step on %u layer counters; want 1 to %d", wanted->num_parts,
                            KV_MAX_STREAMS);
    struct making *m = calloc(1, sizeof *m + wanted->num_pollers * wanted->num_parts * sizeof *m->steps);
    if (!m)
        return kv_error_memory(e);
    *m = *wanted;
    uint32_t num_entered = 0;   /* none of them closes before all have it */
    while (num_entered < m->num_pollers && kv_front_enter(m->pollers[num_entered], e))
        num_entered++;
    bool ok = num_entered == m->num_pollers && make_and_push(m, orders, num_orders, tickets, e);
    while (num_entered--)
        kv_front_leave(m->pollers[num_entered]);
    free(m);
    return ok;
}

bool kv_begin_step(struct kv_poller *const *pollers, uint32_t num_pollers, const struct kv_part *parts,
                   uint32_t num_parts, const struct kv_order *orders, size_t num_orders, uint64_t deadline_ns,
                   uint64_t *tickets, struct kv_error *e)
{
    return make(&(struct making){.pollers = pollers, .parts = parts, .num_pollers = num_pollers,
                                 .num_parts = num_parts, .deadline_ns = kv_now_ns() + deadline_ns},
                orders, num_orders, tickets, e);
}

bool kv_join_step(struct kv_poller *const *pollers, uint32_t num_pollers, const struct kv_part *parts,
                  uint32_t num_parts, uint64_t *tickets, const struct kv_order *orders, size_t num_orders,
                  struct kv_error *e)
{
    for (uint32_t part = 0; part < num_parts; part++)
        if (!tickets[part])
            return kv_error_set(e, KV_INVALID, "part %u: ticket 0 is no step's", part);
    return make(&(struct making){.pollers = pollers, .parts = parts, .num_pollers = num_pollers,
                                 .num_parts = num_parts, .joins = true},
                orders, num_orders, tickets, e);
}

/* Tells the poller something of a step. */
static bool submit_of_step(struct kv_poller *p, enum kv_command_kind kind, uint32_t index, uint64_t ticket,
                           struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    struct kv_stream *s = index < p->front.num_streams ? p->front.streams[index] : NULL;
    kv_front_unlock(p);
    bool ok = s || kv_error_set(e, KV_INVALID, "there is no layer counter %u", index);
    ok = ok && kv_front_submit(p, (struct kv_command){.kind = kind, .object = s, .value = ticket}, e);
    kv_front_leave(p);
    return ok;
}

bool kv_abandon(struct kv_poller *p, uint32_t stream, uint64_t ticket, struct kv_error *e)
{
    return submit_of_step(p, KV_ABANDON_STEP, stream, ticket, e);
}

bool kv_resume_stream(struct kv_poller *p, uint32_t stream, uint64_t ticket, struct kv_error *e)
{
    return submit_of_step(p, KV_RESUME_STREAM, stream, ticket, e);
}

bool kv_stop_tag(struct kv_poller *p, uint32_t link, uint32_t tag, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    bool ok = kv_front_submit(p, (struct kv_command){.kind = KV_STOP_TAG, .link = link, .value = tag}, e);
    kv_front_leave(p);
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

/* ---- faults on purpose ---- */
bool kv_inject(struct kv_poller *p, enum kv_fault fault, uint64_t nth, struct kv_error *e)
{
    if (!nth || nth > INT64_MAX)
        return kv_error_set(e, KV_INVALID, "writes are counted from 1");
    kv_fault_inject(&p->faults, fault, (int64_t)nth);
    return true;
}

bool kv_disturb(struct kv_poller *p, const struct kv_disturbance *d, struct kv_error *e)
{
    double sum = 0;
    for (enum kv_fault fault = KV_FAULT_DROP; fault < KV_NUM_FAULTS; fault++)
        sum += d->chance[fault] >= 0 ? d->chance[fault] : 2;
    if (!(sum <= 1))
        return kv_error_set(e, KV_INVALID, "chances are 0 to 1, and 1 at most in all");
    if (!kv_front_enter(p, e))
        return false;
    struct kv_disturbance *copy = malloc(sizeof *copy);
    bool ok = copy || kv_error_memory(e);
    if (ok)
        *copy = *d;
    if (ok && !kv_front_submit(p, (struct kv_command){.kind = KV_DISTURB, .object = copy}, e)) {
        free(copy);
        ok = false;
    }
    kv_front_leave(p);
    return ok;
}

bool kv_hold(struct kv_poller *p, bool hold, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    atomic_store_explicit(&p->hold, hold, memory_order_release);
    kv_front_lock(p);
    bool started = p->front.started;
    kv_front_unlock(p);
    uint64_t rounds = atomic_load_explicit(&p->stats.rounds, memory_order_acquire), limit_ns = kv_now_ns() + KV_S;
    bool ok = true;   /* the round under way may not have seen it; the one after it has */
    while (ok && started && atomic_load_explicit(&p->stats.rounds, memory_order_acquire) - rounds < 2) {
        kv_bell_ring(&p->commands.bell);
        sched_yield();
        ok = kv_now_ns() < limit_ns || kv_error_set(e, KV_FULL, "the poller made no two rounds within a second");
    }
    kv_front_leave(p);
    return ok;
}

/* ---- the trace ---- */
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
