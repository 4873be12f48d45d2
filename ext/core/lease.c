/* Heartbeats and leases. Every connected link writes 8 bytes with an immediate to some cells of its peer, now and then,
   and fails when nothing of the kind has landed here for the time of a lease.

   A lease is judged by a fresh clock before every write and every read of a completion queue. So a process that was
   stopped believes no heartbeat that was queued meanwhile, and posts at most the one write it was about to make.

   Two links of one process that meet over shm share memory without libfabric's knowing: a heartbeat to an endpoint that
   was just closed would crash the process. They are given theirs by a plain store, under a lock. */
#include "poller.h"
#include <errno.h>
#include <stdio.h>

/* ---- the cells of this process ---- */
static pthread_mutex_t cells_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kv_node cells = {&cells, &cells};

void kv_cell_publish(struct kv_cell *c)
{
    pthread_mutex_lock(&cells_lock);
    kv_list_append(&cells, &c->in_process);
    pthread_mutex_unlock(&cells_lock);
}

void kv_cell_withdraw(struct kv_cell *c)
{
    pthread_mutex_lock(&cells_lock);
    kv_list_remove(&c->in_process);
    pthread_mutex_unlock(&cells_lock);
}

/* A heartbeat; into nothing when the peer has closed meanwhile. */
static void touch(const struct kv_remote_cell *cell)
{
    pthread_mutex_lock(&cells_lock);
    KV_EACH(node, &cells) {
        struct kv_cell *c = KV_OF(node, struct kv_cell, in_process);
        if ((uintptr_t)c->region.address == cell->base && c->key == cell->key)
            atomic_fetch_add_explicit(&c->beats, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&cells_lock);
}

static bool in_this_process(const struct kv_fabric *f, const uint8_t *name)
{
    int pid;
    return f->shares_locks && sscanf((const char *)name, "fi_shm://%d:", &pid) == 1 && pid == getpid();
}

/* ---- leases ---- */
void kv_lease_begin(struct kv_poller *p, struct kv_link *l)
{
    struct kv_domain *d = kv_link_landing(l);
    l->connected_ns = kv_look(p);
    uint64_t first_ns = l->heard_early ? 0 : p->config.first_lease_ns;
    l->lease_until_ns = l->connected_ns + (first_ns > p->config.lease_ns ? first_ns : p->config.lease_ns);
    if (l->lease_until_ns < d->lease_until_ns)
        d->lease_until_ns = l->lease_until_ns;
    kv_beat_to(p, l, NULL);
}

static void renew(struct kv_poller *p, struct kv_link *l)
{
    if (p->now_ns <= l->lease_until_ns)
        l->lease_until_ns = p->now_ns + p->config.lease_ns;
    l->heard_ns = l->heard_ns ? l->heard_ns : p->now_ns;
    kv_count(&p->stats.beats_heard, 1);
}

void kv_link_heard(struct kv_poller *p, uint32_t link)
{
    struct kv_link *l = kv_link_find(p, link);
    if (l && kv_link_connected(l))
        renew(p, l);
    else if (l)
        l->heard_early = true;
}

void kv_leases_judge(struct kv_poller *p, struct kv_domain *d)
{
    d->lease_until_ns = UINT64_MAX;
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (!l || l->failed || l->closing || kv_link_landing(l) != d)
            continue;
        if (p->now_ns > l->lease_until_ns)
            kv_link_fail(p, l, ETIMEDOUT, KV_FAILED_LEASE);
        else if (l->lease_until_ns < d->lease_until_ns)
            d->lease_until_ns = l->lease_until_ns;
    }
}

void kv_leases_renew(struct kv_poller *p)
{
    uint64_t until_ns = kv_look(p) + p->config.lease_ns;
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++)
        if (p->links[slot] && kv_link_connected(p->links[slot]))
            p->links[slot]->lease_until_ns = until_ns;
}

/* ---- heartbeats ---- */
void kv_beat_to(struct kv_poller *p, struct kv_link *l, const struct kv_remote_cell *cells)
{
    for (uint32_t i = 0; i < l->num_beats; i++) {
        struct kv_beat *b = &l->beats[i];
        if (cells)   /* not its target: that stays, and callers look at it */
            b->cell.base = cells[i].base, b->cell.key = cells[i].key, b->cell.imm = cells[i].imm;
        b->in_process = in_this_process(&l->nic->fabric, l->targets[b->cell.target].name);
        b->due_ns = p->now_ns;
    }
    p->beats_checked_ns = 0;
}

static ssize_t post_beat(struct kv_poller *p, struct kv_link *l, struct kv_beat *b)
{
    struct kv_port *port = l->port;
    struct kv_domain *d = port->domain;
    struct kv_target *t = &l->targets[b->cell.target];
    if (b->in_process) {
        touch(&b->cell);
        return 0;
    }
    ssize_t rc = kv_domain_put(d, &(struct kv_put){
        .ep = port->endpoint.ep, .src = d->beat.address, .bytes = d->beat.bytes, .desc = d->beat.desc,
        .imm = b->cell.imm, .to = t->next_address, .dst = b->cell.base, .key = b->cell.key,
        .context = &b->op.context});
    kv_target_answers(t, rc, p->now_ns);
    if (!rc) {
        b->flying = true;
        b->op.transfer = NULL;
        kv_link_fly(p, &b->op, port, 0);
    }
    return rc;
}

static void listen_in_process(struct kv_poller *p, struct kv_link *l)
{
    uint64_t beats = atomic_load_explicit(&l->cell.beats, memory_order_relaxed);
    if (beats != l->beats_seen && !p->held)
        renew(p, l);
    l->beats_seen = beats;
}

static void beat_link(struct kv_poller *p, struct kv_link *l, uint64_t now_ns)
{
    for (uint32_t i = 0; i < l->num_beats && !l->failed; i++) {
        struct kv_beat *b = &l->beats[i];
        if (now_ns < b->due_ns || b->flying)
            continue;
        ssize_t rc = post_beat(p, l, b);
        if (!rc) {
            kv_count(&p->stats.beats_sent, 1);
            b->due_ns = now_ns + p->config.heartbeat_ns;
        } else if (rc != -FI_EAGAIN) {   /* the provider is asked again soon; if it never agrees the lease ends it */
            kv_link_fail(p, l, (int)-rc, KV_FAILED_POST);
        }
    }
}

void kv_beat(struct kv_poller *p)
{
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (!l || l->failed || l->closing || !kv_link_connected(l))
            continue;
        uint64_t now_ns = kv_look(p);
        if (kv_lease_over(p, l)) {
            kv_link_fail(p, l, ETIMEDOUT, KV_FAILED_LEASE);
            continue;
        }
        if (l->nic->fabric.shares_locks)
            listen_in_process(p, l);
        beat_link(p, l, now_ns);
    }
}
