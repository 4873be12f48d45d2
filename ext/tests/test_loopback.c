/* Two real pollers over libfabric: bytes, a link closed under traffic, and calls from several threads at once. */
#include "census.h"
#include "check.h"
#include "poller.h"
#include <poll.h>
#include <string.h>

#define PAGE 4096u
#define PAGES 64u
#define ROW 256u
#define BYTES (PAGES * PAGE)
#define STEPS 40u
#define BEAT_SLOT 9u

struct node {
    struct kv_state *state;
    struct kv_poller *poller;
    struct kv_layer_counter *counter;
    char *memory;
    int64_t link;
};

static struct kv_error error;

static struct kv_record wait_record(struct node *n, uint64_t kind)
{
    struct kv_record r;
    uint64_t limit = kv_now_ns() + 20 * KV_S;
    for (;;) {
        while (kv_take(n->poller, &r, 1))
            if (r.kind == kind)
                return r;
        struct pollfd fd = {.fd = n->poller->records.bell.fd, .events = POLLIN};
        poll(&fd, 1, 1000);
        CHECK(kv_now_ns() < limit);
    }
}

static bool open_node(struct node *n, const char *provider)
{
    struct kv_config config = {.provider = provider, .node = "127.0.0.1", .core = -1, .cq_entries = 1024,
                               .spin_ns = 50 * KV_US, .sleep_max_ns = 8 * KV_MS, .max_write_bytes = PAGE,
                               .link_bytes = 1 << 20, .op_timeout_ns = 10 * KV_S,
                               .heartbeat_ns = KV_S / 2, .lease_ns = 10 * KV_S};
    *n = (struct node){.state = kv_state_create(NULL, "1", &error)};
    CHECK(n->state);
    n->poller = kv_poller_open(&config, n->state, &error);
    if (!n->poller) {
        CHECK(error.kind == KV_NATIVE && kv_state_close(n->state, &error));
        return false;
    }
    CHECK(kv_poller_self_test(n->poller, &error));
    CHECK((n->memory = aligned_alloc(4096, BYTES)));
    memset(n->memory, 0, BYTES);
    CHECK(kv_register(n->poller, (uint64_t)(uintptr_t)n->memory, BYTES, &error) == 0);
    CHECK((n->counter = kv_layer_counter_new(8)));
    CHECK(kv_add_stream(n->poller, n->counter, &error) == 0);
    uint64_t key = 0x123400000000ull + (uint64_t)(uintptr_t)n, keys[2] = {key, ~key};
    n->link = kv_open_link(n->poller, keys, 2, &error);
    CHECK(n->link >= 0 && wait_record(n, KV_LINK_OPENED).id == (uint64_t)n->link);
    return true;
}

static void connect_to(struct node *from, struct node *to)
{
    uint8_t name[KV_NAME_BYTES];
    struct kv_remote_region region, cell;
    int64_t bytes = kv_link_name(to->poller, (uint32_t)to->link, name, &error);
    CHECK(bytes > 0 && kv_link_regions(to->poller, (uint32_t)to->link, &region, &error) == 1);
    CHECK(kv_link_cell(to->poller, (uint32_t)to->link, &cell, &error));
    kv_state_link_beat(to->state, BEAT_SLOT << KV_GENERATION_BITS, (uint32_t)to->link);
    struct kv_remote_cell beat = {cell.base, cell.key, BEAT_SLOT << (KV_GENERATION_BITS + KV_ROW_BITS)};
    CHECK(kv_connect_link(from->poller, (uint32_t)from->link, name, (size_t)bytes, &region, 1, 64, &beat, &error));
}

static void close_node(struct node *n)
{
    kv_poller_free(n->poller);
    kv_layer_counter_free(n->counter);
    CHECK(kv_state_close(n->state, &error));
    free(n->memory);
}

static uint32_t add_template(struct node *n)
{
    struct kv_run run = {0, 0, PAGE, PAGE / ROW};
    struct kv_entry_spec entry = {0, 0, 0, 0, 1};
    struct kv_template_spec spec = {.runs = &run, .entries = &entry, .num_runs = 1, .num_entries = 1,
                                    .src_page_bytes = PAGE, .dst_page_bytes = PAGE, .row_bytes = ROW, .item_bytes = 2};
    int64_t template = kv_add_template(n->poller, (uint32_t)n->link, &spec, &error);
    CHECK(template >= 0);
    return (uint32_t)template;
}

/* All pages, each to its mirror. */
static uint64_t begin(struct node *n, uint32_t template, uint32_t num_bumps, bool ready, struct kv_error *e)
{
    int32_t pages[2 * PAGES];
    for (int32_t i = 0; i < (int32_t)PAGES; i++)
        pages[2 * i] = i, pages[2 * i + 1] = (int32_t)PAGES - 1 - i;
    struct kv_order o = {.link = (uint32_t)n->link, .template = template, .imm = 3 << 18, .tag = 1, .ready = ready,
                         .chunk = {.pages = pages, .num_pages = PAGES}};
    return kv_begin_step(n->poller, 0, num_bumps, &o, 1, 20 * KV_S, e);
}

static void expect(struct node *n, uint64_t rows)
{
    CHECK(kv_state_open_attempt(n->state, 1, rows, "", 0, &error));
    CHECK(kv_state_link_slot(n->state, 3 << KV_GENERATION_BITS, 1, &error));
}

static void test_steps_move_bytes(struct node *source, struct node *target, uint32_t template)
{
    expect(target, STEPS * BYTES / ROW);
    for (uint32_t i = 0; i < STEPS; i++) {
        uint64_t ticket = begin(source, template, 1, false, &error);
        while (!ticket && error.kind == KV_FULL)
            ticket = begin(source, template, 1, false, &error);
        CHECK(ticket);
        kv_counter_start(source->counter, ticket);
        kv_counter_bump(source->counter);
        CHECK(wait_record(source, KV_SENT).extra == PAGES);
    }
    CHECK(wait_record(target, KV_REACHED).value == STEPS * BYTES / ROW);
    for (uint32_t i = 0; i < PAGES; i++)
        CHECK(!memcmp(source->memory + i * PAGE, target->memory + (PAGES - 1 - i) * PAGE, PAGE));
}

struct caller { struct node *node; uint32_t template, armed; };

static void *call_until_closed(void *arg)
{
    struct caller *c = arg;
    struct kv_error e = {0};
    while (e.kind != KV_CLOSED && e.kind != KV_INVALID) {   /* the poller is closed, or the link and its templates */
        e.kind = KV_OK;
        c->armed += begin(c->node, c->template, 0, true, &e) != 0;
    }
    return NULL;
}

static void test_closing_under_calls_ends_everything(struct node *source, struct node *target, uint32_t template)
{
    struct caller callers[2] = {{source, template, 0}, {source, template, 0}};
    pthread_t threads[2];
    expect(target, 1);   /* far too few: it overflows while it closes */
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&threads[i], NULL, call_until_closed, &callers[i]));
    CHECK(wait_record(target, KV_OVERFLOW).id == 1);
    CHECK(kv_close_link(source->poller, (uint32_t)source->link, true, &error));
    wait_record(source, KV_LINK_CLOSED);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK(callers[0].armed + callers[1].armed > 0);
}

int main(int argc, char **argv)
{
    const char *provider = argc > 1 ? argv[1] : "net";
    struct node source, target;
    if (!open_node(&source, provider)) {
        puts("this provider is not offered here");
        return 77;   /* skipped */
    }
    CHECK(open_node(&target, provider));
    for (uint32_t i = 0; i < BYTES; i++)
        source.memory[i] = (char)(1 + i * 7 % 251);
    connect_to(&source, &target);
    connect_to(&target, &source);
    uint32_t template = add_template(&source);
    test_steps_move_bytes(&source, &target, template);
    test_closing_under_calls_ends_everything(&source, &target, template);
    close_node(&source);
    close_node(&target);
    for (int i = 0; i < KV_NUM_OBJECTS; i++)
        CHECK(kv_census_read(i) == 0);
    return 0;
}
