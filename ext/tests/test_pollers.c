/* Two real pollers that watch one layer counter: an engine runs against both, many times round the ring. */
#include "census.h"
#include "check.h"
#include "poller.h"
#include <pthread.h>
#include <sched.h>
#include <string.h>

#define SLOTS 4u
#define STEPS 2000u
#define BUMPS 3u
#define POLLERS 2u

static struct kv_error error;
static struct kv_poller *pollers[POLLERS];
static struct kv_layer_counter *counter;
static struct kv_turns *turns;
static uint64_t tickets[STEPS];   /* they rise, and the ones whose ring slot had not come back are left out */
static _Atomic uint64_t announced;

static void *engine(void *arg)
{
    (void)arg;
    for (uint64_t step = 0; step < STEPS; step++) {
        while (atomic_load_explicit(&announced, memory_order_acquire) <= step)
            sched_yield();
        kv_counter_start(counter, counter->num_slots, tickets[step]);
        for (uint32_t bump = 0; bump < BUMPS; bump++)
            kv_counter_bump(counter, counter->num_slots);
    }
    return NULL;
}

static bool open_pollers(struct kv_state *state, const char *provider)
{
    for (uint32_t i = 0; i < POLLERS; i++) {
        const char *nic = "127.0.0.1";
        struct kv_config config = {.provider = provider, .nics = &nic, .num_nics = 1, .index = i,
                                   .num_pollers = POLLERS, .core = -1, .cq_entries = 64, .spin_ns = 50 * KV_US,
                                   .sleep_max_ns = 8 * KV_MS, .max_write_bytes = 4096, .link_bytes = 4096,
                                   .op_timeout_ns = KV_S, .heartbeat_ns = KV_S / 2, .lease_ns = 10 * KV_S};
        if (!(pollers[i] = kv_poller_open(&config, state, &error)))
            return false;
        CHECK(kv_add_stream(pollers[i], counter, turns, &error) == 0);
    }
    return true;
}

static bool begin(uint64_t made, enum kv_error_kind refused)
{
    struct kv_part part = {0, BUMPS, 3};
    uint64_t given;
    if (!kv_begin_step(pollers, POLLERS, &part, 1, NULL, 0, 60 * KV_S, &given, &error)) {
        CHECK(error.kind == refused);
        return false;
    }
    CHECK(given > (made ? tickets[made - 1] : 0));
    tickets[made] = given;
    return true;
}

/* Reads what both say: each step ends once. */
static void take(uint64_t *ended)
{
    struct kv_record r;
    for (uint32_t i = 0; i < POLLERS; i++)
        while (kv_take(pollers[i], &r, 1))
            CHECK(r.kind == KV_STEP_ENDED && r.extra == BUMPS && ++*ended);
}

int main(int argc, char **argv)
{
    struct kv_state *state = kv_state_create(NULL, "1", &error);
    CHECK(state && (counter = kv_layer_counter_new(SLOTS)) && (turns = kv_turns_new(SLOTS)));
    bool offered = open_pollers(state, argc > 1 ? argv[1] : "net");
    pthread_t thread;
    CHECK(!offered || !pthread_create(&thread, NULL, engine, NULL));
    uint64_t ended = 0, made = 0, limit_ns = kv_now_ns() + 60 * KV_S;
    while (offered && ended < STEPS - 1) {
        CHECK(kv_now_ns() < limit_ns);
        if (made < STEPS && begin(made, KV_FULL))
            atomic_store_explicit(&announced, ++made, memory_order_release);
        else
            sched_yield();
        take(&ended);
        CHECK(made - ended <= SLOTS + 1);
    }
    if (offered) {
        pthread_join(thread, NULL);
        CHECK(kv_poller_close(pollers[1]));
        CHECK(!begin(made, KV_CLOSED));   /* on all of them, or on none */
        take(&ended);
        CHECK(ended == STEPS - 1 && made == STEPS);
    }
    for (uint32_t i = 0; i < POLLERS && pollers[i]; i++)
        kv_poller_free(pollers[i]);
    kv_turns_drop(turns);
    kv_layer_counter_free(counter);
    CHECK(kv_state_close(state, &error));
    for (int i = 0; i < KV_NUM_OBJECTS; i++)
        CHECK(kv_census_read(i) == 0);
    return offered ? 0 : 77;
}
