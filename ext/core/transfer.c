#include "transfer.h"
#include "census.h"
#include "poller.h"
#include <stdlib.h>

struct kv_transfer *kv_transfer_new(struct kv_template *t, const struct kv_order *o, uint32_t max_write_bytes,
                                    struct kv_error *e)
{
    size_t bound = kv_plan_bound(t, &o->chunk, max_write_bytes);
    struct kv_transfer *x = malloc(sizeof *x + bound * sizeof *x->writes);
    if (!x) {
        kv_error_memory(e);
        return NULL;
    }
    size_t num = kv_plan_expand(t, &o->chunk, max_write_bytes, x->writes, e);
    if (!num) {
        free(x);
        return NULL;
    }
    if (num < bound) {   /* merged; giving memory back cannot fail in a way that matters */
        struct kv_transfer *smaller = realloc(x, sizeof *x + num * sizeof *x->writes);
        x = smaller ? smaller : x;
    }
    x->link = NULL;
    x->template = t;
    x->imm = o->imm, x->tag = o->tag, x->ready = o->ready;
    x->stopped = false;
    x->bumps_seen = x->released = x->entry_index = x->write_index = x->in_flight = x->num_aside = 0;
    x->credit = 0;
    x->rows_posted = x->writes_posted = 0;
    x->num_writes = (uint32_t)num;
    kv_list_init(&x->in_link);
    kv_list_init(&x->in_queue);
    kv_list_init(&x->in_step);
    kv_template_hold(t);
    kv_live(KV_LIVE_TRANSFERS, 1);
    return x;
}

void kv_transfer_free(struct kv_transfer *x)
{
    kv_list_remove(&x->in_link);
    kv_list_remove(&x->in_queue);
    kv_list_remove(&x->in_step);
    kv_template_drop(x->template);
    free(x);
    kv_live(KV_LIVE_TRANSFERS, -1);
}

bool kv_transfer_arrive(struct kv_poller *p, struct kv_transfer *x)
{
    struct kv_link *l = kv_link_find(p, x->template->link);
    if (!l || l->failed || l->closing) {
        kv_transfer_stop(p, x);
        return false;
    }
    x->link = l;
    kv_list_append(&l->transfers, &x->in_link);
    return true;
}

void kv_transfer_release(struct kv_poller *p, struct kv_transfer *x, uint32_t bumps)
{
    uint32_t released = x->released, all = x->template->num_entries;
    while (released < all && (x->ready || x->template->entries[released].signal <= bumps))
        released++;
    if (released == x->released)
        return;
    x->released = released;
    x->bumps_seen = bumps;
    kv_queue(p, x);
    if (released == all)
        kv_list_remove(&x->in_step);
}

void kv_transfer_stop(struct kv_poller *p, struct kv_transfer *x)
{
    if (x->stopped)
        return;
    x->stopped = true;
    kv_list_remove(&x->in_step);
    kv_unqueue(p, x);
    kv_drop_asides(p, x);
    kv_transfer_settle(p, x);
}

void kv_transfer_settle(struct kv_poller *p, struct kv_transfer *x)
{
    if (x->in_flight || !(x->stopped || kv_transfer_posted(x)))
        return;
    kv_report(p, x->stopped ? KV_STOPPED : KV_SENT, x->tag, x->rows_posted, x->writes_posted);
    kv_transfer_free(x);
}
