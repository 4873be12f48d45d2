/* The callers' side: links and the templates on them. */
#include "front.h"
#include <stdlib.h>
#include <string.h>

/* ---- links ---- */
struct kv_link *kv_front_find(struct kv_poller *p, uint32_t id, struct kv_error *e)
{
    struct kv_link *l = p->front.links[kv_link_slot(id)];
    if (l && l->id == id)
        return l;
    kv_error_set(e, KV_MISSING, "link %u is not open", id);
    return NULL;
}

static struct kv_link *find_opened_locked(struct kv_poller *p, uint32_t id, struct kv_error *e)
{
    struct kv_link *l = kv_front_find(p, id, e);
    if (!l || atomic_load_explicit(&l->opened, memory_order_acquire))
        return l;
    kv_error_set(e, KV_CLOSED, "link %u has not been opened yet: wait for its LINK_OPENED record", id);
    return NULL;
}

static int64_t open_link_locked(struct kv_poller *p, uint32_t nic, const uint64_t *keys, uint32_t num_keys,
                                struct kv_error *e)
{
    if (nic >= p->num_nics) {
        kv_error_set(e, KV_INVALID, "interface %u of %u", nic, p->num_nics);
        return -1;
    }
    uint32_t num_regions = p->nics[nic].domain.num_registered;
    if (num_keys != num_regions + 1) {
        kv_error_set(e, KV_INVALID, "%u keys for %u regions and a cell", num_keys, num_regions);
        return -1;
    }
    uint32_t slot = 0;
    while (slot < KV_MAX_LINKS && atomic_load_explicit(&p->link_slot_busy[slot], memory_order_acquire))
        slot++;
    if (slot == KV_MAX_LINKS) {
        kv_error_set(e, KV_FULL, "%u links are open", KV_MAX_LINKS);
        return -1;
    }
    uint32_t number = ++p->front.links_made * p->config.num_pollers + p->config.index;
    uint32_t id = number << KV_LINK_SLOT_BITS | slot;
    struct kv_link *l = kv_link_new(id, &p->nics[nic], keys, (char *)&p->cells[slot]);
    if (!l) {
        kv_error_memory(e);
        return -1;
    }
    if (!kv_front_start(p, e) || !kv_front_submit(p, (struct kv_command){.kind = KV_OPEN_LINK, .object = l}, e)) {
        kv_link_free(l);
        return -1;
    }
    atomic_store_explicit(&p->link_slot_busy[slot], true, memory_order_relaxed);
    p->front.links[slot] = l;
    return id;
}

int64_t kv_open_link(struct kv_poller *p, uint32_t nic, const uint64_t *keys, uint32_t num_keys, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return -1;
    kv_front_lock(p);
    int64_t id = open_link_locked(p, nic, keys, num_keys, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return id;
}

/* Its port, which the peer may write to from now on. The poller moves a link to another port at any time, but frees
   none before a caller has closed it, under this lock. */
static struct kv_port *tell(struct kv_link *l)
{
    struct kv_port *port = l->port;
    l->told = port;
    return port;
}

int64_t kv_link_name(struct kv_poller *p, uint32_t id, uint8_t name[KV_NAME_BYTES], struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return -1;
    kv_front_lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    struct kv_port *port = l ? tell(l) : NULL;
    if (port)
        memcpy(name, port->endpoint.name, port->endpoint.name_bytes);
    int64_t bytes = port ? (int64_t)port->endpoint.name_bytes : -1;
    kv_front_unlock(p);
    kv_front_leave(p);
    return bytes;
}

/* By a peer. */
static struct kv_remote_region as_seen(const struct kv_nic *nic, const void *address, uint64_t bytes, uint64_t key)
{
    uint64_t base = nic->fabric.virtual_addresses ? (uintptr_t)address : 0;
    return (struct kv_remote_region){.base = base, .bytes = bytes, .key = key};
}

int64_t kv_link_regions(struct kv_poller *p, uint32_t id, struct kv_remote_region *out, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return -1;
    kv_front_lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    struct kv_port *port = l ? tell(l) : NULL;
    int64_t num = port ? (int64_t)port->num_regions : -1;
    for (int64_t i = 0; i < num; i++)
        out[i] = as_seen(l->nic, port->regions[i].address, port->regions[i].bytes, port->keys[i]);
    kv_front_unlock(p);
    kv_front_leave(p);
    return num;
}

bool kv_link_cell(struct kv_poller *p, uint32_t id, struct kv_remote_region *out, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    if (l)
        *out = as_seen(l->nic, &p->cells[kv_link_slot(id)], KV_CELL_BYTES, l->cell.key);   /* through every port */
    kv_front_unlock(p);
    kv_front_leave(p);
    return l;
}

bool kv_connect_link(struct kv_poller *p, uint32_t id, const struct kv_remote *peer, uint32_t window,
                     struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    struct kv_link *l = find_opened_locked(p, id, e);
    bool ok = l;
    if (l && l->connected)
        ok = kv_error_set(e, KV_CLOSED, "link %u is connected already", id);
    ok = ok && kv_link_set_remote(l, peer, window, e) &&
         kv_front_submit(p, (struct kv_command){.kind = KV_CONNECT_LINK, .link = id}, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}

bool kv_close_link(struct kv_poller *p, uint32_t id, bool fence, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    struct kv_link *l = kv_front_find(p, id, e);
    bool ok = l && kv_front_submit(p, (struct kv_command){.kind = KV_CLOSE_LINK, .link = id, .value = fence},
                                   e);
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
    kv_front_unlock(p);
    kv_front_leave(p);
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

static bool fill_entry(struct kv_link *l, const struct kv_entry_spec *spec, uint32_t index, struct kv_entry *n,
                       struct kv_error *e)
{
    const struct kv_domain *d = &l->nic->domain;
    bool src_known = spec->src_region >= 0 && spec->src_region < d->num_sources;
    bool dst_known = spec->dst_region >= 0 && spec->dst_region < l->num_remote_regions;
    const struct kv_region *src = src_known ? &d->sources[spec->src_region] : NULL;
    const struct kv_remote_region *dst = dst_known ? &l->remote_regions[spec->dst_region] : NULL;
    if (spec->signal < 0 || spec->signal > KV_MAX_BUMPS || !src || !dst ||
        !room_from(spec->src_region, spec->src_base, d->num_sources, src->bytes, &n->src_room) ||
        !room_from(spec->dst_region, spec->dst_base, l->num_remote_regions, dst->bytes, &n->dst_room))
        return kv_error_set(e, KV_INVALID, "entry %u: no such place: source region %lld at %lld of %u regions, "
                            "destination region %lld at %lld of %u regions, signal %lld",
                            index, (long long)spec->src_region,
                            (long long)spec->src_base, d->num_sources, (long long)spec->dst_region,
                            (long long)spec->dst_base, l->num_remote_regions, (long long)spec->signal);
    if (!src->mr)
        return kv_error_set(e, KV_INVALID, "entry %u: source region %lld is not registered on the interface of link %u",
                            index, (long long)spec->src_region, l->id);
    n->src = src->address + spec->src_base;
    n->dst = dst->base + (uint64_t)spec->dst_base;
    n->src_region = (uint32_t)spec->src_region, n->dst_region = (uint32_t)spec->dst_region;
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
    struct kv_link *l = kv_front_find(p, link, e);
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
        t->src_page = spec->src_page, t->dst_page = spec->dst_page;
        t->row_bytes = spec->row_bytes, t->item_bytes = spec->item_bytes;
        if (spec->num_runs)
            memcpy(t->runs, spec->runs, spec->num_runs * sizeof *t->runs);
        for (uint32_t i = 0; i < spec->num_entries && ok; i++)
            ok = fill_entry(l, &spec->entries[i], i, &t->entries[i], e);
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
    if (!kv_front_enter(p, e))
        return -1;
    kv_front_lock(p);
    int64_t place = add_template_locked(p, link, spec, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return place;
}
