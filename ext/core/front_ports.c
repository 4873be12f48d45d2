/* The callers' side: ports that all links share, and how links follow when one is exchanged for another. */
#include "front.h"
#include <stdlib.h>
#include <string.h>

static bool may_rotate(struct kv_poller *p, uint32_t num_keys, struct kv_error *e)
{
    uint32_t older = atomic_load(&p->port_older);
    if (!p->config.shared_endpoint)
        return kv_error_set(e, KV_CLOSED, "each link has a port of its own: open the poller with a shared endpoint");
    if (num_keys != p->domain.num_sources)
        return kv_error_set(e, KV_INVALID, "%u keys for %u regions", num_keys, p->domain.num_sources);
    if (older)
        return kv_error_set(e, KV_CLOSED, "port %u is still open: it is closed before another one is opened", older);
    if (atomic_load(&p->rotating))
        return kv_error_set(e, KV_CLOSED, "another port is being opened already");
    return true;
}

static bool rotate_locked(struct kv_poller *p, const uint64_t *keys, uint32_t num_keys, struct kv_error *e)
{
    if (!may_rotate(p, num_keys, e) || !kv_front_start(p, e))
        return false;
    struct kv_port *o = kv_port_new(p->domain.sources, keys, num_keys);
    if (!o)
        return kv_error_memory(e);
    atomic_store(&p->rotating, true);
    if (kv_front_submit(p, (struct kv_command){.kind = KV_ROTATE, .object = o}, e))
        return true;
    atomic_store(&p->rotating, false);
    kv_port_free(o);
    return false;
}

bool kv_rotate_port(struct kv_poller *p, const uint64_t *keys, uint32_t num_keys, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    bool ok = rotate_locked(p, keys, num_keys, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}

bool kv_close_port(struct kv_poller *p, uint32_t number, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    uint32_t older = atomic_load(&p->port_older), oldest = older ? older : atomic_load(&p->port_current);
    bool ok = number && number == oldest;
    if (!ok && older)
        kv_error_set(e, KV_MISSING, "port %u cannot be closed: the one to close is port %u", number, older);
    else if (!ok)
        kv_error_set(e, KV_MISSING, "port %u is not open", number);
    ok = ok && kv_front_submit(p, (struct kv_command){.kind = KV_CLOSE_PORT, .value = number}, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}

static bool same_places(const struct kv_link *l, const struct kv_remote_region *regions, uint32_t num_regions,
                        struct kv_error *e)
{
    if (num_regions != l->num_remote_regions)
        return kv_error_set(e, KV_INVALID, "%u regions of the peer were %u before", num_regions, l->num_remote_regions);
    for (uint32_t i = 0; i < num_regions; i++) {
        const struct kv_remote_region *was = &l->remote_regions[i], *is = &regions[i];
        if (is->base != was->base || is->bytes != was->bytes)
            return kv_error_set(e, KV_INVALID, "region %u of the peer has %llu bytes at 0x%llx and had %llu at 0x%llx: "
                                "only its key may change", i, (unsigned long long)is->bytes,
                                (unsigned long long)is->base, (unsigned long long)was->bytes,
                                (unsigned long long)was->base);
    }
    return true;
}

static bool retarget_locked(struct kv_poller *p, uint32_t id, const void *name, size_t name_bytes,
                            const struct kv_remote_region *regions, uint32_t num_regions,
                            const struct kv_remote_cell *cell, struct kv_error *e)
{
    struct kv_link *l = kv_front_find(p, id, e);
    if (!l)
        return false;
    if (!l->connected)
        return kv_error_set(e, KV_CLOSED, "link %u is not connected: there is nothing to point elsewhere", id);
    if (!same_places(l, regions, num_regions, e) || !kv_link_check_remote(name_bytes, cell, e))
        return false;
    struct kv_retarget *to = calloc(1, sizeof *to + num_regions * sizeof *to->keys);
    if (!to)
        return kv_error_memory(e);
    memcpy(to->name, name, name_bytes);
    to->cell = *cell;
    for (uint32_t i = 0; i < num_regions; i++)
        to->keys[i] = regions[i].key;
    if (kv_front_submit(p, (struct kv_command){.kind = KV_RETARGET_LINK, .link = id, .object = to}, e))
        return true;
    free(to);
    return false;
}

bool kv_retarget_link(struct kv_poller *p, uint32_t id, const void *name, size_t name_bytes,
                      const struct kv_remote_region *regions, uint32_t num_regions, const struct kv_remote_cell *cell,
                      struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    bool ok = retarget_locked(p, id, name, name_bytes, regions, num_regions, cell, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}

bool kv_resume_link(struct kv_poller *p, uint32_t id, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    bool ok = kv_front_find(p, id, e) &&
              kv_front_submit(p, (struct kv_command){.kind = KV_RESUME_LINK, .link = id}, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}
