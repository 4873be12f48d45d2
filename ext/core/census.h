/* Live native objects of this process, so that a test can prove that nothing was left behind. */
#ifndef KV_CENSUS_H
#define KV_CENSUS_H
#include <stdatomic.h>
#include <stdint.h>

enum kv_object {
    KV_LIVE_ENDPOINTS,
    KV_LIVE_REGIONS,
    KV_LIVE_SLOTS,       /* linked to an attempt, or to a link for its heartbeats */
    KV_LIVE_RINGS,       /* of layer counters */
    KV_LIVE_TRANSFERS,
    KV_LIVE_TEMPLATES,
    KV_LIVE_STEPS,
    KV_LIVE_LINKS,
    KV_LIVE_POLLERS,
    KV_LIVE_STATE_FILES,
    KV_NUM_OBJECTS
};
extern _Atomic int64_t kv_census[KV_NUM_OBJECTS];
extern const char *const kv_census_names[KV_NUM_OBJECTS];

static inline int64_t kv_census_read(enum kv_object object)
{
    return atomic_load_explicit(&kv_census[object], memory_order_relaxed);
}
static inline void kv_live(enum kv_object object, int64_t change)
{
    atomic_fetch_add_explicit(&kv_census[object], change, memory_order_relaxed);
}
#endif
