/* What the native layer is measured against: a loop of fi_writedata and nothing else, on endpoints opened the same way;
   and what drives and times it without Python in between.

   Functions that can fail return false or 0 and leave the reason in the bare side's error. */
#include "clock.h"
#include "domain.h"
#include "layer_counter.h"
#include <stdlib.h>

#define LIMIT_NS (20 * KV_S)   /* nothing here takes a second */
#define CQ_ENTRIES 8192        /* both as the poller has them */
#define CQ_BATCH 64
#define ROUND_POSTS 32
#define NUM_IMMEDIATES (1u << 14)

struct bare {
    struct kv_fabric fabric;
    struct kv_domain domain;
    struct kv_endpoint endpoint;
    struct kv_region region;
    fi_addr_t peer;
    uint64_t peer_base, peer_key;
    struct kv_error error;
};

struct bare *bare_new(void) { return calloc(1, sizeof(struct bare)); }
const char *bare_error(const struct bare *b) { return b->error.text; }

static bool failed(struct bare *b, const char *call, int64_t rc)
{
    return kv_error_call(&b->error, KV_NATIVE, call, (int)-rc, "bare loop: %s failed: %s", call, fi_strerror((int)-rc));
}

bool bare_open(struct bare *b, const char *provider, const char *node, void *memory, uint64_t bytes, bool is_target)
{
    const char *call;
    if (!kv_fabric_open(&b->fabric, provider, node, CQ_ENTRIES, &b->error))
        return false;
    int rc = kv_domain_open(&b->domain, &b->fabric, &call);
    if (rc)
        return failed(b, call, rc);
    b->region = (struct kv_region){.address = memory, .bytes = bytes};
    rc = kv_region_open(&b->domain, &b->region, is_target ? FI_REMOTE_WRITE : FI_WRITE, kv_now_ns() >> 1);
    if (rc)
        return failed(b, "fi_mr_reg", rc);
    rc = kv_endpoint_open(&b->domain, &b->endpoint);
    return rc ? failed(b, "fi_endpoint", rc) : true;
}

void bare_close(struct bare *b)
{
    kv_endpoint_close(&b->domain, &b->endpoint);
    kv_region_close(&b->domain, &b->region);
    kv_domain_close(&b->domain);
    kv_fabric_close(&b->fabric);
    free(b);
}

uint64_t bare_name(struct bare *b, uint8_t name[KV_NAME_BYTES])
{
    for (size_t i = 0; i < b->endpoint.name_bytes; i++)
        name[i] = b->endpoint.name[i];
    return b->endpoint.name_bytes;
}
uint64_t bare_base(struct bare *b) { return b->fabric.virtual_addresses ? (uint64_t)(uintptr_t)b->region.address : 0; }
uint64_t bare_key(struct bare *b) { return fi_mr_key(b->region.mr); }

bool bare_connect(struct bare *b, const uint8_t *name, uint64_t base, uint64_t key)
{
    b->peer_base = base, b->peer_key = key;
    int rc = kv_endpoint_connect(&b->domain, &b->endpoint, name, &b->peer);
    return rc ? failed(b, "fi_av_insert", rc) : true;
}

/* Reads the queue once. Returns the entries, or -1. */
static ssize_t read_queue(struct bare *b, struct fi_cq_data_entry entries[CQ_BATCH])
{
    ssize_t num = fi_cq_read(b->domain.cq, entries, CQ_BATCH);
    if (num >= 0 || num == -FI_EAGAIN)
        return num < 0 ? 0 : num;
    struct fi_cq_err_entry error = {0};
    if (num == -FI_EAVAIL && fi_cq_readerr(b->domain.cq, &error, 0) == 1)
        num = -error.err;
    failed(b, "fi_cq_read", num);
    return -1;
}

static uint64_t write_pages(struct bare *b, const int32_t (*pages)[2], uint64_t num_pages, uint64_t page_bytes,
                            struct fi_context2 *contexts, struct fi_context2 **idle, uint64_t window)
{
    struct fi_cq_data_entry entries[CQ_BATCH];
    uint64_t posted = 0, completed = 0, num_idle = window, started_ns = kv_now_ns();
    for (uint64_t i = 0; i < window; i++)
        idle[i] = &contexts[i];
    while (completed < num_pages) {
        for (int k = 0; k < ROUND_POSTS && posted < num_pages && num_idle; k++, posted++) {
            const char *src = b->region.address + (uint64_t)pages[posted][0] * page_bytes;
            uint64_t dst = b->peer_base + (uint64_t)pages[posted][1] * page_bytes;
            ssize_t rc = fi_writedata(b->endpoint.ep, src, page_bytes, b->region.desc, posted % NUM_IMMEDIATES, b->peer,
                                      dst, b->peer_key, idle[num_idle - 1]);
            if (rc == -FI_EAGAIN)
                break;
            if (rc)
                return failed(b, "fi_writedata", rc);
            num_idle--;
        }
        ssize_t num = read_queue(b, entries);
        if (num < 0)
            return 0;
        for (ssize_t i = 0; i < num; i++)
            idle[num_idle++] = entries[i].op_context;
        completed += (uint64_t)num;
        if (!num && kv_now_ns() - started_ns > LIMIT_NS)
            return failed(b, "bare_write", -FI_ETIMEDOUT);
    }
    return started_ns;
}

/* Returns when it started. */
uint64_t bare_write(struct bare *b, const int32_t (*pages)[2], uint64_t num_pages, uint64_t page_bytes, uint64_t window)
{
    struct fi_context2 *contexts = calloc(window, sizeof *contexts), **idle = calloc(window, sizeof *idle);
    uint64_t started_ns = contexts && idle ? write_pages(b, pages, num_pages, page_bytes, contexts, idle, window)
                                           : failed(b, "calloc", -FI_ENOMEM);
    free(contexts);
    free(idle);
    return started_ns;
}

/* Returns when the last of `num_immediates` was seen. */
uint64_t bare_count(struct bare *b, uint64_t num_immediates)
{
    struct fi_cq_data_entry entries[CQ_BATCH];
    uint64_t limit_ns = kv_now_ns() + LIMIT_NS;
    while (num_immediates) {
        ssize_t num = read_queue(b, entries);
        if (num < 0)
            return 0;
        for (ssize_t i = 0; i < num; i++)
            num_immediates -= !!(entries[i].flags & FI_REMOTE_CQ_DATA);
        if (!num && kv_now_ns() > limit_ns)
            return failed(b, "bare_count", -FI_ETIMEDOUT);
    }
    return kv_now_ns();
}

/* The forward of `ticket`: a bump after each random gap. `bumped_ns` gets the time right before each. */
void bump_layers(struct kv_layer_counter *c, uint64_t ticket, uint32_t num_bumps, uint64_t least_gap_ns,
                 uint64_t gap_spread_ns, uint32_t seed, uint64_t *bumped_ns)
{
    kv_counter_start(c, c->num_slots, ticket);
    uint64_t at_ns = kv_now_ns();
    for (uint32_t i = 0; i < num_bumps; i++) {
        at_ns += least_gap_ns + (uint64_t)rand_r(&seed) % gap_spread_ns;
        struct timespec at = {.tv_sec = (time_t)(at_ns / KV_S), .tv_nsec = (long)(at_ns % KV_S)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
        bumped_ns[i] = kv_now_ns();
        kv_counter_bump(c, c->num_slots);
    }
}

/* The least a watcher of the layer words can do: `seen_ns` gets the time each bump of `ticket` was seen. */
bool watch_layers(struct kv_layer_counter *c, uint64_t ticket, uint32_t num_bumps, uint64_t *seen_ns)
{
    uint64_t limit_ns = kv_now_ns() + LIMIT_NS;
    for (uint32_t seen = 0; seen < num_bumps;) {
        uint32_t bumps = kv_word_bumps(kv_counter_read(c, c->num_slots, ticket));
        uint64_t now_ns = bumps > seen ? kv_now_ns() : 0;
        while (seen < bumps && seen < num_bumps)
            seen_ns[seen++] = now_ns;
        for (int i = 0; i < 1000 && !now_ns && kv_word_bumps(kv_counter_read(c, c->num_slots, ticket)) == bumps; i++)
            ;
        if (!now_ns && kv_now_ns() > limit_ns)
            return false;
    }
    return true;
}

/* What the machine does to a thread that only spins: for each limit, the gaps above it between two looks at the clock.
   Returns the longest. */
uint64_t spin_gaps(uint64_t for_ns, const uint64_t *limits_ns, uint32_t num_limits, uint64_t *num_gaps)
{
    uint64_t started_ns = kv_now_ns(), last_ns = started_ns, longest_ns = 0;
    while (last_ns - started_ns < for_ns) {
        uint64_t now_ns = kv_now_ns(), gap_ns = now_ns - last_ns;
        for (uint32_t i = 0; i < num_limits && gap_ns > limits_ns[i]; i++)   /* rising */
            num_gaps[i]++;
        longest_ns = gap_ns > longest_ns ? gap_ns : longest_ns;
        last_ns = now_ns;
    }
    return longest_ns;
}
