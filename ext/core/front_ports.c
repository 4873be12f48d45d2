/* The callers' side: ports that all links share, and how links follow when one is exchanged for another. */
#include "front.h"
#include <stdlib.h>
#include <string.h>

static bool may_rotate(struct kv_poller *p, const struct kv_keys *keys, uint32_t num_lists, struct kv_error *e)
{
    uint32_t older = atomic_load(&p->port_older);
    if (!p->config.shared_endpoint)
        return kv_error_set(e, KV_CLOSED, "each link has a port of its own: open the poller with a shared endpoint");
    if (num_lists != p->num_nics)
        return kv_error_set(e, KV_INVALID, "%u lists of keys for %u interfaces", num_lists, p->num_nics);
    for (uint32_t i = 0; i < num_lists; i++)
        if (keys[i].num != p->nics[i].domain.num_registered)
            return kv_error_set(e, KV_INVALID, "%u keys for %u regions of interface %u", keys[i].num,
                                p->nics[i].domain.num_registered, i);
    if (older)
        return kv_error_set(e, KV_CLOSED, "port %u is still open: it is closed before another one is opened", older);
    if (atomic_load(&p->rotating))
        return kv_error_set(e, KV_CLOSED, "another port is being opened already");
    return true;
}

static void free_ports(struct kv_poller *p, struct kv_port **ports)
{
    for (uint32_t i = 0; i < p->num_nics && ports && ports[i]; i++)
        kv_port_free(ports[i]);
    free(ports);
}

static bool rotate_locked(struct kv_poller *p, const struct kv_keys *keys, uint32_t num_lists, struct kv_error *e)
{
    if (!may_rotate(p, keys, num_lists, e) || !kv_front_start(p, e))
        return false;
    struct kv_port **ports = calloc(p->num_nics, sizeof *ports);
    bool made = ports;
    for (uint32_t i = 0; i < p->num_nics && made; i++)
        made = (ports[i] = kv_port_new(&p->nics[i], keys[i].keys));
    if (!made) {
        free_ports(p, ports);
        return kv_error_memory(e);
    }
    atomic_store(&p->rotating, true);
    if (kv_front_submit(p, (struct kv_command){.kind = KV_ROTATE, .object = ports}, e))
        return true;
    atomic_store(&p->rotating, false);
    free_ports(p, ports);
    return false;
}

bool kv_rotate_port(struct kv_poller *p, const struct kv_keys *keys, uint32_t num_lists, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    bool ok = rotate_locked(p, keys, num_lists, e);
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
    bool ok = oldest && (!number || number == oldest);
    if (!ok && older)
        kv_error_set(e, KV_MISSING, "port %u cannot be closed: the one to close is port %u", number, older);
    else if (!ok)
        kv_error_set(e, KV_MISSING, "port %u is not open", number);
    ok = ok && kv_front_submit(p, (struct kv_command){.kind = KV_CLOSE_PORT, .value = oldest}, e);
    kv_front_unlock(p);
    kv_front_leave(p);
    return ok;
}

static bool same_regions(const struct kv_link *l, const struct kv_remote *peer, struct kv_error *e)
{
    if (peer->num_regions != l->num_remote_regions)
        return kv_error_set(e, KV_INVALID, "%u regions of the peer were %u before", peer->num_regions,
                            l->num_remote_regions);
    for (uint32_t i = 0; i < peer->num_regions; i++) {
        const struct kv_remote_region *was = &l->remote_regions[i], *is = &peer->regions[i];
        if (is->base != was->base || is->bytes != was->bytes || is->target != was->target)
            return kv_error_set(e, KV_INVALID, "region %u of the peer has %llu bytes at 0x%llx by target %u, and had "
                                "%llu at 0x%llx by %u: only its key may change", i, (unsigned long long)is->bytes,
                                (unsigned long long)is->base, is->target, (unsigned long long)was->bytes,
                                (unsigned long long)was->base, was->target);
    }
    return true;
}

static bool same_shape(const struct kv_link *l, const struct kv_remote *peer, struct kv_error *e)
{
    if (peer->num_names != l->num_targets || peer->num_cells != l->num_beats)
        return kv_error_set(e, KV_INVALID, "%u targets and %u heartbeats of the peer were %u and %u before",
                            peer->num_names, peer->num_cells, l->num_targets, l->num_beats);
    for (uint32_t i = 0; i < peer->num_cells; i++)
        if (peer->cells[i].target != l->beats[i].cell.target)
            return kv_error_set(e, KV_INVALID, "heartbeats %u of the peer go to target %u and went to %u", i,
                                peer->cells[i].target, l->beats[i].cell.target);
    return same_regions(l, peer, e);
}

static struct kv_retarget *copy_remote(const struct kv_remote *peer)
{
    struct kv_retarget *to = calloc(1, sizeof *to + peer->num_names * sizeof *to->names +
                                           peer->num_regions * sizeof *to->keys + peer->num_cells * sizeof *to->cells);
    if (!to)
        return NULL;
    to->keys = (void *)(to->names + peer->num_names);
    to->cells = (void *)(to->keys + peer->num_regions);
    for (uint32_t i = 0; i < peer->num_names; i++)
        memcpy(to->names[i], peer->names[i].bytes, peer->names[i].num_bytes);
    for (uint32_t i = 0; i < peer->num_regions; i++)
        to->keys[i] = peer->regions[i].key;
    for (uint32_t i = 0; i < peer->num_cells; i++)
        to->cells[i] = peer->cells[i];
    return to;
}

static bool retarget_locked(struct kv_poller *p, uint32_t id, const struct kv_remote *peer, struct kv_error *e)
{
    struct kv_link *l = kv_front_find(p, id, e);
    if (!l)
        return false;
    if (!l->connected)
        return kv_error_set(e, KV_CLOSED, "link %u is not connected: there is nothing to point elsewhere", id);
    if (!kv_link_check_remote(peer, e) || !same_shape(l, peer, e))
        return false;
    struct kv_retarget *to = copy_remote(peer);
    if (!to)
        return kv_error_memory(e);
    if (kv_front_submit(p, (struct kv_command){.kind = KV_RETARGET_LINK, .link = id, .object = to}, e))
        return true;
    free(to);
    return false;
}

bool kv_retarget_link(struct kv_poller *p, uint32_t id, const struct kv_remote *peer, struct kv_error *e)
{
    if (!kv_front_enter(p, e))
        return false;
    kv_front_lock(p);
    bool ok = retarget_locked(p, id, peer, e);
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
