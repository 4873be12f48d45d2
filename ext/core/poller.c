/* The poller's thread: rounds, rest, and how everything ends. */
#include "poller.h"
#include "census.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#define COMMAND_BATCH 16
#define CLOCK_ROUNDS 16            /* rounds between two looks at the clock */
#define TIMEOUT_CHECK_NS (10 * KV_MS)
#define BEAT_CHECK_NS (5 * KV_MS)
#define LEAST_NAP_NS (20 * KV_US)
#define MOST_NAP_NS (50 * KV_US)
#define LEAST_SLEEP_NS KV_MS

/* ---- records ---- */
/* Moves what waits to the ring, in order. */
static void flush_backlog(struct kv_poller *p)
{
    while (p->backlog_head < p->backlog_tail && kv_records_put(&p->records, &p->backlog[p->backlog_head]))
        p->backlog_head++;
    if (p->backlog_head == p->backlog_tail)
        p->backlog_head = p->backlog_tail = 0;
}

static bool make_backlog_room(struct kv_poller *p)
{
    if (p->backlog_tail < p->backlog_capacity)
        return true;
    size_t num = p->backlog_tail - p->backlog_head;
    if (p->backlog_head > p->backlog_capacity / 2) {
        memmove(p->backlog, p->backlog + p->backlog_head, num * sizeof *p->backlog);
        p->backlog_head = 0;
        p->backlog_tail = num;
        return true;
    }
    size_t capacity = p->backlog_capacity ? 2 * p->backlog_capacity : KV_RECORDS;
    struct kv_record *larger = realloc(p->backlog, capacity * sizeof *larger);
    if (!larger)
        return false;
    p->backlog = larger;
    p->backlog_capacity = capacity;
    return true;
}

void kv_report(struct kv_poller *p, enum kv_record_kind kind, uint64_t id, uint64_t value, uint64_t extra)
{
    struct kv_record record = {kind, id, value, kv_now_ns(), extra};
    if (p->backlog_head == p->backlog_tail && kv_records_put(&p->records, &record))
        return;
    if (make_backlog_room(p))
        p->backlog[p->backlog_tail++] = record;
    else
        kv_count(&p->stats.lost_records, 1);   /* without memory; whoever reads the stats must not trust us any more */
}

unsigned kv_take(struct kv_poller *p, struct kv_record *out, unsigned max)
{
    kv_bell_disarm(&p->records.bell);
    if (atomic_load_explicit(&p->front.joined, memory_order_acquire))
        flush_backlog(p);   /* the thread is gone: the backlog is ours */
    unsigned num = kv_records_take(&p->records, out, max);
    if (num == max)
        kv_bell_ring(&p->records.bell);   /* there may be more, and nobody else would say so */
    return num;
}

/* ---- commands ---- */
static void close_port(struct kv_poller *p, uint32_t number)
{
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (!o->owner && o->number == number)
            kv_port_begin_closing(p, o);
    }
}

static void each_part(struct kv_poller *p, struct kv_step *s, void (*do_part)(struct kv_poller *, struct kv_step *))
{
    while (s) {
        struct kv_step *next = s->next_part;   /* s may be over at once */
        do_part(p, s);
        s = next;
    }
}

static void obey(struct kv_poller *p, const struct kv_command *c)
{
    struct kv_link *l = kv_link_find(p, c->link);
    switch ((enum kv_command_kind)c->kind) {
    case KV_ADD_STREAM:
        p->streams[p->num_streams++] = c->object;
        break;
    case KV_OPEN_LINK:
        kv_link_open(p, c->object);
        break;
    case KV_CONNECT_LINK:
        if (l)
            kv_link_connect(p, l);
        break;
    case KV_CLOSE_LINK:
        if (l)
            kv_link_close(p, l, c->value);
        break;
    case KV_RETARGET_LINK:
        if (l && !l->failed && !l->closing)
            kv_link_retarget(p, l, c->object);
        else
            free(c->object);
        break;
    case KV_RESUME_LINK:
        if (l)
            kv_link_resume(l);
        break;
    case KV_ROTATE:
        kv_rotate(p, c->object);
        break;
    case KV_CLOSE_PORT:
        close_port(p, (uint32_t)c->value);
        break;
    case KV_ARM_STEP:
        each_part(p, c->object, kv_step_arm);
        break;
    case KV_JOIN_STEP:
        each_part(p, c->object, kv_step_join);
        break;
    case KV_ABANDON_STEP:
        kv_step_abandon(p, c->object, c->value);
        break;
    case KV_RESUME_STREAM:
        kv_stream_resume(p, c->object, c->value);
        break;
    case KV_STOP_TAG:
        if (l)
            kv_link_stop_tag(p, l, (uint32_t)c->value);
        break;
    case KV_DISTURB:
        kv_fault_disturb(&p->faults, c->object);
        free(c->object);
        break;
    }
}

/* Opening and closing an endpoint can take milliseconds: at most one a round. */
static unsigned obey_batch(struct kv_poller *p)
{
    struct kv_command c;
    unsigned num = 0;
    while (num < COMMAND_BATCH && kv_commands_take(&p->commands, &c)) {
        obey(p, &c);
        num++;
        if (c.kind == KV_OPEN_LINK || c.kind == KV_CLOSE_LINK || c.kind == KV_ROTATE || c.kind == KV_CLOSE_PORT)
            break;
    }
    return num;
}

/* ---- one round ---- */
static void obey_hold(struct kv_poller *p)
{
    bool hold = atomic_load_explicit(&p->hold, memory_order_acquire);
    if (p->held && !hold)
        kv_leases_renew(p);
    p->held = hold;
}

static bool round_once(struct kv_poller *p)
{
    obey_hold(p);
    unsigned work = obey_batch(p) + kv_watch(p) + kv_post(p) + kv_complete(p);
    kv_count(&p->stats.rounds, 1);
    if (p->num_closing || p->ends_due)
        kv_go_on_closing(p);
    if (p->backlog_head < p->backlog_tail)
        flush_backlog(p);
    return work;
}

static void look_at_clock(struct kv_poller *p)
{
    kv_state_seen(p->state, kv_look(p));
    kv_watch_deadlines(p);
    if (p->now_ns - p->timeouts_checked_ns >= TIMEOUT_CHECK_NS) {
        p->timeouts_checked_ns = p->now_ns;
        kv_link_check_timeouts(p);
    }
    if (p->now_ns - p->beats_checked_ns >= BEAT_CHECK_NS) {
        p->beats_checked_ns = p->now_ns;
        kv_beat(p);
    }
}

/* ---- rest ---- */
static bool busy(struct kv_poller *p)
{
    return p->num_armed || p->num_flying || p->num_active || p->num_closing || p->backlog_head < p->backlog_tail ||
           p->now_ns < p->young_until_ns || kv_state_expecting(p->state) > 0;
}

static struct timespec time_of(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / KV_S), .tv_nsec = (long)(ns % KV_S)};
}

static void nap(uint64_t ns)
{
    struct timespec time = time_of(ns);
    nanosleep(&time, NULL);
}

/* Sleeps until the bell rings or the time is over. Whatever would make us busy rings the bell. */
static void rest(struct kv_poller *p, uint64_t ns, bool was_busy)
{
    struct kv_bell *bell = &p->commands.bell;
    atomic_exchange_explicit(&bell->rung, 0, memory_order_acq_rel);
    bool stop = atomic_load_explicit(&p->stop, memory_order_acquire);
    if (!stop && !kv_commands_waiting(&p->commands) && busy(p) == was_busy) {
        struct pollfd fd = {.fd = bell->fd, .events = POLLIN};
        struct timespec time = time_of(ns);
        ppoll(&fd, 1, &time, NULL);
        kv_count(was_busy ? &p->stats.naps : &p->stats.sleeps, 1);
    }
    if (atomic_exchange_explicit(&bell->rung, 1, memory_order_acq_rel)) {   /* only then was the eventfd written */
        uint64_t rings;
        while (read(bell->fd, &rings, 8) != 8)
            ;   /* whoever rings sets `rung` first: the write may still be on its way */
    }
}

static uint64_t longer(uint64_t ns, uint64_t least, uint64_t most)
{
    ns = 2 * ns < least ? least : 2 * ns;
    return ns < most ? ns : most;
}

static void run(struct kv_poller *p)
{
    uint64_t rest_ns = 0, quiet_since_ns = kv_look(p);
    unsigned rounds = 0;
    bool worked = false;
    while (!atomic_load_explicit(&p->stop, memory_order_relaxed)) {
        worked |= round_once(p);
        if (__builtin_expect(p->faults.disturbance.slow_ns != 0, 0))
            nap(p->faults.disturbance.slow_ns);
        if (++rounds < CLOCK_ROUNDS)
            continue;
        rounds = 0;
        look_at_clock(p);
        if (worked) {
            worked = false;
            quiet_since_ns = p->now_ns;
            rest_ns = 0;
        } else if (p->now_ns - quiet_since_ns > p->config.spin_ns) {
            bool is_busy = busy(p);
            if (is_busy && p->config.spin)
                continue;
            rest_ns = is_busy ? longer(rest_ns, LEAST_NAP_NS, MOST_NAP_NS)
                              : longer(rest_ns, LEAST_SLEEP_NS, p->config.sleep_max_ns);
            rest(p, rest_ns, is_busy);
            rounds = CLOCK_ROUNDS - 1;   /* one round, then look again */
        }
    }
}

void *kv_poller_main(void *poller)
{
    struct kv_poller *p = poller;
    bool guarded = p->nics->fabric.shares_locks;
    int error = guarded ? kv_guard_start(&p->guard, &p->stats.abandoned) : 0;
    p->front.start_error = error;
    sem_post(&p->front.running);
    if (error)
        return NULL;
    prctl(PR_SET_TIMERSLACK, 1);   /* a nap of 20 us must not become 70 */
    run(p);
    kv_poller_wind_down(p);
    if (guarded)
        kv_guard_stop(&p->guard);
    return NULL;
}

/* ---- the end ---- */
static struct kv_port *open_port(struct kv_poller *p)
{
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (!o->closing)
            return o;
    }
    return NULL;
}

void kv_poller_wind_down(struct kv_poller *p)
{
    struct kv_command c;
    while (kv_commands_take(&p->commands, &c))
        obey(p, &c);
    kv_watch_close(p);
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++)
        if (p->links[slot])
            kv_link_close(p, p->links[slot], true);
    for (struct kv_port *o; (o = open_port(p)) != NULL;)
        kv_port_begin_closing(p, o);
    while (p->num_closing) {
        bool worked = kv_complete(p);
        kv_go_on_closing(p);
        if (!worked && !p->config.spin)
            nap(LEAST_NAP_NS);   /* peers of this machine may be needed to get on */
    }
    if (p->num_unclosable)
        return;   /* reported; what comes in may still be written to memory of ours, so all of it stays */
    KV_EACH(node, &p->ports)
        kv_port_free(KV_OF(node, struct kv_port, in_poller));
}
