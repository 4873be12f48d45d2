#include "census.h"

_Atomic int64_t kv_census[KV_NUM_OBJECTS];

const char *const kv_census_names[KV_NUM_OBJECTS] = {
    [KV_LIVE_ENDPOINTS] = "endpoints", [KV_LIVE_REGIONS] = "regions",
    [KV_LIVE_SLOTS] = "slots",         [KV_LIVE_RINGS] = "rings",
    [KV_LIVE_TRANSFERS] = "transfers", [KV_LIVE_TEMPLATES] = "templates",
    [KV_LIVE_STEPS] = "steps",         [KV_LIVE_LINKS] = "links",
    [KV_LIVE_POLLERS] = "pollers",     [KV_LIVE_STATE_FILES] = "state_files",
};
