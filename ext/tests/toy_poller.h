/* A poller without a thread and without libfabric: its endpoint notes what is posted, the test completes it. */
#ifndef KV_TOY_POLLER_H
#define KV_TOY_POLLER_H
#include "census.h"
#include "check.h"
#include "poller.h"
#include <string.h>

#define TOY_LINKS 3
#define TOY_ENTRIES 4
#define TOY_ROWS 8u

struct post { uint32_t link, rows, imm; uint64_t dst, key; fi_addr_t to; struct kv_op *op; };

static struct kv_poller *toy;
static struct kv_template *toy_templates[TOY_LINKS];
static struct fid_ep toy_endpoints[TOY_LINKS];
static struct kv_region toy_source;
static struct kv_nic toy_nic;
static struct kv_domain toy_domain;
static uint64_t toy_now_ns, toy_step_ns;   /* the latter: how far each look moves it */
static uint32_t toy_num_beats = 1;   /* of each link */
static struct post posts[4096];
static uint32_t num_posts;
static ssize_t toy_answer;   /* of the provider; 0: takes it */

static ssize_t toy_writedata(struct fid_ep *ep, const void *buf, size_t len, void *desc, uint64_t data, fi_addr_t dest,
                             uint64_t addr, uint64_t key, void *context)
{
    (void)buf, (void)len, (void)desc;
    if (toy_answer)
        return toy_answer;
    CHECK(num_posts < sizeof posts / sizeof *posts);
    posts[num_posts++] = (struct post){(uint32_t)(ep - toy_endpoints), (uint32_t)(data & (KV_MAX_ROWS - 1)) + 1,
                                       (uint32_t)data & ~(KV_MAX_ROWS - 1), addr, key, dest, context};
    return 0;
}
static struct fi_ops_rma toy_rma = {.size = sizeof toy_rma, .writedata = toy_writedata};

static uint64_t toy_clock(void) { return toy_now_ns += toy_step_ns; }
static inline struct kv_link *toy_link(uint32_t i) { return toy->links[i]; }

/* Its peer has two endpoints, with a region each under keys 100 and 101; heartbeats go to the first, or to both. */
static inline struct kv_link *toy_link_new(uint32_t slot, uint32_t window)
{
    struct kv_error error;
    struct kv_link *l = kv_link_new(1 << KV_LINK_SLOT_BITS | slot, &toy_nic, &(uint64_t){1}, (char *)&toy->cells[slot]);
    struct kv_remote_name names[] = {{"", 0}, {"", 0}};
    struct kv_remote_region regions[] = {{0, 1ull << 40, 100, 0}, {0, 1ull << 40, 101, 1}};
    struct kv_remote_cell cells[] = {{.key = 200, .target = 0}, {.key = 201, .target = 1}};
    struct kv_remote peer = {names, regions, cells, 2, 2, toy_num_beats};
    CHECK(l && kv_link_set_remote(l, &peer, window, &error));
    for (uint32_t i = 0; i < 2; i++)
        l->targets[i].address = l->targets[i].next_address = 10 + i;
    return l;
}

static inline void toy_open(uint32_t num_slots, uint32_t window, uint32_t row_bytes)
{
    struct kv_error error;
    toy = aligned_alloc(64, (sizeof *toy + 63) & ~(size_t)63);
    CHECK(toy);
    memset(toy, 0, sizeof *toy);
    toy->config = (struct kv_config){.max_write_bytes = TOY_ROWS * row_bytes, .link_bytes = 1 << 20,
                                     .op_timeout_ns = KV_S, .heartbeat_ns = 100, .lease_ns = 1000};
    toy->clock = toy_clock;
    toy->now_ns = toy_now_ns = 1;
    toy_step_ns = 0;
    toy_nic = (struct kv_nic){0};
    toy->nics = &toy_nic;
    toy->num_nics = 1;
    toy_domain = (struct kv_domain){.fabric = &toy_nic.fabric, .sources = &toy_source, .num_sources = 1,
                                    .lease_until_ns = UINT64_MAX};
    CHECK((toy->state = kv_state_create(NULL, "1", &error)));
    num_posts = 0;
    toy_answer = 0;
    kv_list_init(&toy->active);
    kv_list_init(&toy->domains);
    kv_list_init(&toy->ports);
    CHECK(kv_commands_init(&toy->commands) && kv_bell_init(&toy->records.bell, false));
    struct kv_layer_counter *counter = kv_layer_counter_new(num_slots);
    CHECK(counter);
    toy->streams[toy->num_streams++] = kv_stream_new(counter, 0, NULL);
    for (uint32_t i = 0; i < TOY_LINKS; i++) {
        struct kv_link *l = toy_link_new(i, window);
        toy_endpoints[i] = (struct fid_ep){.rma = &toy_rma};
        l->sending->endpoint.ep = &toy_endpoints[i];
        l->sending->domain = &toy_domain;
        toy->links[i] = l;
        struct kv_template *t = toy_templates[i] = kv_template_new(1, TOY_ENTRIES);
        t->link = l->id;
        t->src_page = t->dst_page = (struct kv_page){TOY_ROWS * row_bytes, 1, 0};
        t->row_bytes = row_bytes, t->item_bytes = 1;
        t->runs[0] = (struct kv_run){0, 0, TOY_ROWS * row_bytes, TOY_ROWS};
        for (uint32_t e = 0; e < TOY_ENTRIES; e++)
            t->entries[e] = (struct kv_entry){.src_room = 1ull << 40, .dst_room = 1ull << 40, .signal = e + 1};
        CHECK(kv_template_check(t, &error));
    }
}

/* The rest of it, once its links are gone. */
static inline void toy_free(void)
{
    CHECK(toy->num_active == 0 && toy->num_flying == 0 && toy->num_armed == 0);
    CHECK(kv_state_close(toy->state, &(struct kv_error){0}));
    kv_layer_counter_free(toy->streams[0]->counter);
    kv_stream_free(toy->streams[0]);
    kv_bell_close(&toy->commands.bell);
    kv_bell_close(&toy->records.bell);
    free(toy->backlog);
    free(toy);
    for (int i = 0; i < KV_NUM_OBJECTS; i++)
        CHECK(kv_census_read(i) == 0);
}

static inline void toy_close(void)
{
    kv_watch_close(toy);
    for (uint32_t i = 0; i < TOY_LINKS; i++) {
        KV_EACH(node, &toy_link(i)->transfers)
            kv_transfer_stop(toy, KV_OF(node, struct kv_transfer, in_link));
        KV_EACH(node, &toy_link(i)->flying_ops)
            kv_link_retire_op(toy, KV_OF(node, struct kv_op, node));
        CHECK(kv_list_empty(&toy_link(i)->transfers));
        kv_template_drop(toy_templates[i]);
        toy_link(i)->sending->domain = NULL;
        kv_link_free(toy_link(i));
    }
    toy_free();
}

/* A transfer of `num_pages` scattered pages: one write a page and entry. */
static inline struct kv_transfer *toy_transfer(uint32_t link, uint32_t tag, int num_pages, bool ready)
{
    struct kv_error error;
    int32_t pages[512];
    for (int i = 0; i < num_pages; i++)
        pages[2 * i] = i, pages[2 * i + 1] = 2 * i;
    struct kv_order o = {.imm = tag << KV_ROW_BITS, .tag = tag, .ready = ready,
                         .chunk = {.pages = pages, .num_pages = (size_t)num_pages}};
    struct kv_transfer *x = kv_transfer_new(toy_templates[link], &o, toy->config.max_write_bytes, &error);
    CHECK(x && x->num_writes == (uint32_t)num_pages);
    return x;
}

/* A step with the transfers given, armed. Returns its ticket. */
static inline uint64_t toy_step(uint32_t num_bumps, struct kv_transfer *one, struct kv_transfer *other)
{
    struct kv_step *s = kv_step_new(toy->streams[0], num_bumps, 1000);
    CHECK(s && (s->ticket = kv_turns_claim(toy->streams[0]->turns, 1)));
    uint64_t ticket = s->ticket;
    if (one)
        kv_list_append(&s->transfers, &one->in_step);
    if (other)
        kv_list_append(&s->transfers, &other->in_step);
    kv_step_arm(toy, s);
    return ticket;
}

/* Transfers join the step of a ticket. */
static inline void toy_join(uint64_t ticket, struct kv_transfer *one, struct kv_transfer *other)
{
    struct kv_step *s = kv_step_new(toy->streams[0], 0, 0);
    CHECK(s);
    s->ticket = ticket;
    kv_list_append(&s->transfers, &one->in_step);
    if (other)
        kv_list_append(&s->transfers, &other->in_step);
    kv_step_join(toy, s);
}

static inline struct kv_layer_counter *toy_counter(void) { return toy->streams[0]->counter; }
/* What an engine does. */
static inline void toy_run(uint64_t ticket, uint32_t num_bumps)
{
    kv_counter_start(toy_counter(), toy_counter()->num_slots, ticket);
    for (uint32_t i = 0; i < num_bumps; i++)
        kv_counter_bump(toy_counter(), toy_counter()->num_slots);
}

static inline void toy_check_timeouts(void)
{
    kv_look(toy);
    kv_link_check_timeouts(toy);
}
static inline struct kv_record toy_record(void)
{
    struct kv_record r = {0};
    CHECK(kv_records_take(&toy->records, &r, 1) == 1);
    return r;
}
static inline void toy_no_record(void)
{
    struct kv_record r;
    CHECK(kv_records_take(&toy->records, &r, 1) == 0);
}
static inline void toy_check_record(uint64_t kind, uint64_t id, uint64_t value, uint64_t extra)
{
    struct kv_record r = toy_record();
    CHECK(r.kind == kind && r.id == id && r.value == value && r.extra == extra);
}
static inline void toy_complete(uint32_t first, uint32_t num)
{
    for (uint32_t i = first; i < first + num; i++)
        kv_link_retire_op(toy, posts[i].op);
}
#endif
