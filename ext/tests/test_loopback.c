/* Two real pollers over libfabric, of two interfaces each: bytes, links closed under traffic, and calls from several
   threads at once. A link lives on each interface; each writes to the peer's endpoint on the other one, by a layer
   counter of its own. */
#include "census.h"
#include "check.h"
#include "poller.h"
#include <poll.h>
#include <sched.h>
#include <string.h>

#define PAGE 4096u
#define PAGES 64u
#define ROW 256u
#define BYTES (PAGES * PAGE)
#define STEPS 40u
#define BEAT_SLOT 9u
#define NICS 2u

struct node {
    struct kv_state *state;
    struct kv_poller *poller;
    struct kv_layer_counter *counters[NICS];
    char *memory;
    uint32_t links[NICS], templates[NICS];
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
    const char *nics[NICS] = {"127.0.0.1", "127.0.0.1"};
    struct kv_config config = {.provider = provider, .nics = nics, .num_nics = NICS, .core = -1, .cq_entries = 1024,
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
    CHECK(kv_register(n->poller, (uint64_t)(uintptr_t)n->memory, BYTES, 3, &error) == 0);
    for (uint32_t i = 0; i < NICS; i++) {
        CHECK((n->counters[i] = kv_layer_counter_new(8)));
        CHECK(kv_add_stream(n->poller, n->counters[i], NULL, &error) == i);
        uint64_t key = 0x123400000000ull + (uint64_t)(uintptr_t)&n->links[i], keys[2] = {key, ~key};
        CHECK(kv_open_link(n->poller, 7, keys, 2, &error) == -1 && error.kind == KV_INVALID);
        int64_t link = kv_open_link(n->poller, i, keys, 2, &error);
        CHECK(link >= 0 && wait_record(n, KV_LINK_OPENED).id == (uint64_t)link);
        n->links[i] = (uint32_t)link;
    }
    return true;
}

/* Every link writes to every endpoint, and beats the one on its own interface. */
static void connect_to(struct node *from, struct node *to)
{
    uint8_t raw[NICS][KV_NAME_BYTES];
    struct kv_remote_name names[NICS];
    struct kv_remote_region regions[NICS], cell;
    struct kv_remote_cell beats[NICS];
    for (uint32_t i = 0; i < NICS; i++) {
        int64_t bytes = kv_link_name(to->poller, to->links[i], raw[i], &error);
        CHECK(bytes > 0 && kv_link_regions(to->poller, to->links[i], &regions[i], &error) == 1);
        CHECK(kv_link_cell(to->poller, to->links[i], &cell, &error));
        names[i] = (struct kv_remote_name){raw[i], (size_t)bytes};
        regions[i].target = i;
        kv_state_link_beat(to->state, (BEAT_SLOT + i) << KV_GENERATION_BITS, to->links[i]);
        beats[i] = (struct kv_remote_cell){.base = cell.base, .key = cell.key, .target = i,
                                           .imm = (BEAT_SLOT + i) << (KV_GENERATION_BITS + KV_ROW_BITS)};
    }
    for (uint32_t i = 0; i < NICS; i++) {
        struct kv_remote peer = {names, regions, &beats[i], NICS, NICS, 1};
        CHECK(kv_connect_link(from->poller, from->links[i], &peer, 64, &error));
    }
}

static void close_node(struct node *n)
{
    kv_poller_free(n->poller);
    for (uint32_t i = 0; i < NICS; i++)
        kv_layer_counter_free(n->counters[i]);
    CHECK(kv_state_close(n->state, &error));
    free(n->memory);
}

static void add_templates(struct node *n)
{
    for (uint32_t i = 0; i < NICS; i++) {
        struct kv_run run = {0, 0, PAGE, PAGE / ROW};
        struct kv_entry_spec entry = {.dst_region = 1 - i, .signal = 1};
        struct kv_page page = {PAGE, 1, 0};
        struct kv_template_spec spec = {.runs = &run, .entries = &entry, .num_runs = 1, .num_entries = 1,
                                        .src_page = page, .dst_page = page, .row_bytes = ROW, .item_bytes = 2};
        int64_t template = kv_add_template(n->poller, n->links[i], &spec, &error);
        CHECK(template >= 0);
        n->templates[i] = (uint32_t)template;
    }
}

/* All pages, each to its mirror: half of them by each link. They join the steps of these tickets, or are armed with new
   ones. */
static bool order(struct node *n, uint32_t num_bumps, bool ready, bool joins, uint64_t tickets[NICS],
                  struct kv_error *e)
{
    int32_t pages[2 * PAGES];
    struct kv_order orders[NICS];
    struct kv_part parts[NICS];
    for (int32_t i = 0; i < (int32_t)PAGES; i++)
        pages[2 * i] = i, pages[2 * i + 1] = (int32_t)PAGES - 1 - i;
    for (uint32_t i = 0; i < NICS; i++) {
        parts[i] = (struct kv_part){i, num_bumps, 1};
        orders[i] = (struct kv_order){.part = i, .link = n->links[i], .template = n->templates[i], .imm = 3 << 18,
                                      .tag = i, .ready = ready,
                                      .chunk = {.pages = pages + i * PAGES, .num_pages = PAGES / NICS}};
    }
    return joins ? kv_join_step(&n->poller, 1, parts, NICS, tickets, orders, NICS, e)
                 : kv_begin_step(&n->poller, 1, parts, NICS, orders, NICS, 20 * KV_S, tickets, e);
}

static bool begin(struct node *n, uint32_t num_bumps, bool ready, uint64_t tickets[NICS], struct kv_error *e)
{
    return order(n, num_bumps, ready, false, tickets, e);
}

static bool join(struct node *n, uint64_t tickets[NICS], struct kv_error *e)
{
    return order(n, 0, false, true, tickets, e);
}

static void expect(struct node *n, uint64_t rows)
{
    CHECK(kv_state_open_attempt(n->state, 1, rows, "", 0, &error));
    CHECK(kv_state_link_slot(n->state, 3 << KV_GENERATION_BITS, 1, &error));
}

static void test_steps_move_bytes(struct node *source, struct node *target)
{
    uint64_t tickets[NICS];
    expect(target, STEPS * BYTES / ROW);
    for (uint32_t i = 0; i < STEPS; i++) {
        while (!begin(source, 1, false, tickets, &error))
            CHECK(error.kind == KV_FULL);
        for (uint32_t k = 0; k < NICS; k++) {   /* each part goes by its own counter */
            kv_counter_start(source->counters[k], source->counters[k]->num_slots, tickets[k]);
            kv_counter_bump(source->counters[k], source->counters[k]->num_slots);
            struct kv_record r = wait_record(source, KV_SENT);
            CHECK(r.id == k && r.extra == PAGES / NICS);
        }
    }
    CHECK(wait_record(target, KV_REACHED).value == STEPS * BYTES / ROW);
    for (uint32_t i = 0; i < PAGES; i++)
        CHECK(!memcmp(source->memory + i * PAGE, target->memory + (PAGES - 1 - i) * PAGE, PAGE));
}

static void test_a_step_is_armed_as_a_whole(struct node *source)
{
    uint64_t one[8], both[NICS];
    struct kv_part part = {1, 1, 1};
    int num = 0;
    while (kv_begin_step(&source->poller, 1, &part, 1, NULL, 0, 20 * KV_S, &one[num], &error))
        num++;
    CHECK(num && num < 8);   /* the last one of the steps before is not over yet */
    CHECK(!begin(source, 1, false, both, &error) && error.kind == KV_FULL);
    CHECK(strstr(error.text, "8 steps of layer counter 1"));
    kv_counter_start(source->counters[1], source->counters[1]->num_slots, one[0]);
    CHECK(wait_record(source, KV_STEP_ENDED).value == STEPS);
    for (int i = 0; i < num; i++)
        CHECK(kv_abandon(source->poller, 1, one[i], &error));
    while (!begin(source, 1, false, both, &error))
        CHECK(error.kind == KV_FULL);
    CHECK(both[0] == STEPS + 1 && both[1] == one[num - 1] + 1);   /* what was refused has cost no ticket */
    for (uint32_t k = 0; k < NICS; k++) {
        CHECK(kv_abandon(source->poller, k, both[k], &error));
        CHECK(wait_record(source, KV_STOPPED).id == k);
    }
    struct kv_part twice[] = {{0, 1, 1}, {0, 1, 1}};
    CHECK(!kv_begin_step(&source->poller, 1, twice, 2, NULL, 0, KV_S, both, &error) && strstr(error.text, "two parts"));
}

static void test_a_join_is_armed_as_a_whole(struct node *source)
{
    uint64_t tickets[NICS] = {1, 1}, none[NICS] = {1, 0};
    uint32_t num = 0;
    while (kv_commands_reserve(&source->poller->commands))
        num++;
    CHECK(num > KV_COMMANDS / 2);
    CHECK(!join(source, tickets, &error) && error.kind == KV_FULL && strstr(error.text, "commands wait"));
    while (num--)
        kv_commands_unreserve(&source->poller->commands);
    CHECK(!join(source, none, &error) && error.kind == KV_INVALID && strstr(error.text, "part 1: ticket 0"));
    CHECK(!order(source, 0, true, true, tickets, &error) && strstr(error.text, "cannot be ready"));
}

/* ---- joins from one thread, while another one is the engine ---- */
struct joiner { struct node *node; uint64_t tickets[NICS]; _Atomic uint32_t num_begun; };

static void *join_each(void *arg)
{
    struct joiner *j = arg;
    for (uint32_t i = 1; i <= STEPS; i++) {
        while (atomic_load_explicit(&j->num_begun, memory_order_acquire) < i)
            sched_yield();
        struct kv_error e;
        CHECK(join(j->node, j->tickets, &e));
    }
    return NULL;
}

static void test_transfers_join_from_another_thread(struct node *source, struct node *target)
{
    struct joiner j = {.node = source};
    pthread_t thread;
    expect(target, STEPS * BYTES / ROW);
    CHECK(!pthread_create(&thread, NULL, join_each, &j));
    for (uint32_t i = 0; i < STEPS; i++) {
        struct kv_part parts[NICS] = {{0, 1, 1}, {1, 1, 1}};
        while (!kv_begin_step(&source->poller, 1, parts, NICS, NULL, 0, 20 * KV_S, j.tickets, &error))
            CHECK(error.kind == KV_FULL);
        atomic_store_explicit(&j.num_begun, i + 1, memory_order_release);
        for (uint32_t k = 0; k < NICS; k++) {
            kv_counter_start(source->counters[k], source->counters[k]->num_slots, j.tickets[k]);
            kv_counter_bump(source->counters[k], source->counters[k]->num_slots);
        }
        for (uint32_t k = 0; k < NICS; k++)
            CHECK(wait_record(source, KV_SENT).extra == PAGES / NICS);
    }
    pthread_join(thread, NULL);
    CHECK(wait_record(target, KV_REACHED).value == STEPS * BYTES / ROW);
}

struct caller { struct node *node; uint32_t armed; };

static void *call_until_closed(void *arg)
{
    struct caller *c = arg;
    struct kv_error e = {0};
    uint64_t tickets[NICS];
    while (e.kind != KV_CLOSED && e.kind != KV_INVALID) {   /* the poller is closed, or a link and its templates */
        e.kind = KV_OK;
        bool armed = begin(c->node, 0, true, tickets, &e);
        c->armed += armed;
        if (armed)
            join(c->node, tickets, &e);   /* lost, for that step never ran */
    }
    return NULL;
}

static void test_closing_under_calls_ends_everything(struct node *source, struct node *target)
{
    struct caller callers[2] = {{source, 0}, {source, 0}};
    pthread_t threads[2];
    expect(target, 1);   /* far too few: it overflows while it closes */
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&threads[i], NULL, call_until_closed, &callers[i]));
    CHECK(wait_record(target, KV_OVERFLOW).id == 1);
    for (uint32_t i = 0; i < NICS; i++)
        CHECK(kv_close_link(source->poller, source->links[i], true, &error));
    for (uint32_t i = 0; i < NICS; i++)
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
    add_templates(&source);
    test_steps_move_bytes(&source, &target);
    test_a_step_is_armed_as_a_whole(&source);
    test_a_join_is_armed_as_a_whole(&source);
    test_transfers_join_from_another_thread(&source, &target);
    test_closing_under_calls_ends_everything(&source, &target);
    close_node(&source);
    close_node(&target);
    for (int i = 0; i < KV_NUM_OBJECTS; i++)
        CHECK(kv_census_read(i) == 0);
    return 0;
}
