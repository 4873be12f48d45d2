# The C core, as far as the owners in native.pyx use it.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "<stdbool.h>":
    ctypedef bint c_bool "bool"

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *text, size_t most)

cdef extern from "census.h" nogil:
    enum: KV_NUM_OBJECTS
    enum kv_object:
        pass
    const char *const *kv_census_names
    int64_t kv_census_read(kv_object object)

cdef extern from "clock.h" nogil:
    uint64_t kv_now_ns()

cdef extern from "error.h" nogil:
    enum kv_error_kind:
        KV_OK, KV_INVALID, KV_FULL, KV_CLOSED, KV_MISSING, KV_NO_MEMORY, KV_NATIVE, KV_SYSTEM
    struct kv_error:
        kv_error_kind kind
        int code
        const char *call
        char text[256]

cdef extern from "layer_counter.h" nogil:
    enum: KV_MAX_SLOTS
    const uint64_t KV_MAX_TICKET
    struct kv_layer_counter:
        uint32_t num_slots
    size_t kv_layer_counter_bytes(uint32_t num_slots)
    kv_layer_counter *kv_layer_counter_init(void *memory, uint32_t num_slots)
    kv_layer_counter *kv_layer_counter_new(uint32_t num_slots)
    void kv_layer_counter_free(kv_layer_counter *c)
    void kv_counter_start(kv_layer_counter *c, uint32_t num_slots, uint64_t ticket)
    void kv_counter_bump(kv_layer_counter *c, uint32_t num_slots)
    uint64_t kv_counter_current(kv_layer_counter *c)
    uint64_t kv_word_ticket(uint64_t word)
    uint32_t kv_word_bumps(uint64_t word)
    uint64_t kv_counter_read(kv_layer_counter *c, uint32_t num_slots, uint64_t ticket)

cdef extern from "state.h" nogil:
    enum: KV_GENERATION_BITS, KV_SLOT_BITS, KV_NUM_ATTEMPTS, KV_NUM_LEGS, KV_LABEL_BYTES, KV_MAX_GROUPS
    struct kv_state_info:
        char name[64]
        char address[128]
        char provider[32]
        char software[32]
    struct kv_pages_view:
        char name[24]
        uint64_t held, total
    struct kv_state_header:
        uint32_t pid, libfabric_version
        uint64_t pid_started, started_ns
        char incarnation[40]
    struct kv_state:
        kv_state_header *header
    struct kv_attempt_view:
        uint64_t id, rows, expected, started_ns
        int state
        char label[65]
    kv_state *kv_state_create(const char *path, const char *incarnation, kv_error *e)
    kv_state *kv_state_look(const char *path, kv_error *e)
    c_bool kv_state_close(kv_state *s, kv_error *e)
    c_bool kv_state_open_attempt(kv_state *s, uint64_t attempt, uint64_t expected, const char *label,
                                 size_t label_bytes, kv_error *e)
    c_bool kv_state_end_attempt(kv_state *s, uint64_t attempt, kv_error *e)
    c_bool kv_state_link_slot(kv_state *s, uint32_t slot_index, uint64_t attempt, kv_error *e)
    void kv_state_link_beat(kv_state *s, uint32_t slot_index, uint32_t link)
    void kv_state_unlink_slot(kv_state *s, uint32_t slot_index)
    uint64_t kv_state_await_slot(kv_state *s, uint32_t slot_index, uint64_t rows)
    void kv_state_set_info(kv_state *s, const kv_state_info *info)
    void kv_state_read_info(const kv_state *s, kv_state_info *out)
    void kv_state_set_pages(kv_state *s, uint32_t group, const char *name, uint64_t held, uint64_t total)
    kv_pages_view kv_state_pages(const kv_state *s, uint32_t group)
    uint64_t kv_state_quarantined(const kv_state *s)
    void kv_state_quarantine(kv_state *s, uint64_t num_pages)
    uint64_t kv_state_poller_seen_ns(const kv_state *s)
    uint64_t kv_state_slot_rows(const kv_state *s, uint32_t slot_index)
    c_bool kv_state_view(const kv_state *s, uint32_t entry, kv_attempt_view *out)
    c_bool kv_attempt_known(const kv_state *s, uint64_t attempt)
    uint64_t kv_state_attempt_rows(const kv_state *s, uint64_t attempt)
    int64_t kv_state_expecting(const kv_state *s)
    enum kv_landed:
        KV_LANDED_COUNTED, KV_LANDED_REACHED, KV_LANDED_OVERFLOW, KV_LANDED_STRAY_SEEN, KV_LANDED_STRAY
        KV_LANDED_BEAT
    struct kv_landing:
        uint64_t attempt, rows
        c_bool slot_reached
        uint32_t slot_index
        uint64_t slot_rows
    kv_landed kv_state_land(kv_state *s, uint32_t imm, kv_landing *out)
    void kv_state_seen(const kv_state *s, uint64_t now_ns)

cdef extern from "leg.h" nogil:
    enum kv_leg_role:
        KV_FETCH, KV_SERVE
    struct kv_leg_info:
        uint64_t attempt, rows_expected, started_ns, since_ns
        uint32_t slot_index, num_layers, pages_held, role
        char request_id[64]
        char peer[40]
        char state[16]
        char reason[20]
        char why[164]
    struct kv_leg_view:
        uint32_t number
        kv_leg_info info
        uint64_t rows_posted
        uint32_t writes_posted, signals_seen, entries_posted, num_entries
        c_bool torn
    c_bool kv_state_open_leg(kv_state *s, uint32_t number, const kv_leg_info *info, kv_error *e)
    c_bool kv_state_update_leg(kv_state *s, uint32_t number, const kv_leg_info *info, kv_error *e)
    void kv_state_close_leg(kv_state *s, uint32_t number)
    c_bool kv_state_next_leg(const kv_state *s, uint32_t *entry, kv_leg_view *out)
    void kv_leg_posted(const kv_state *s, uint32_t tag, uint32_t rows, uint32_t entries, uint32_t num_entries)
    uint64_t kv_leg_rows_posted(const kv_state *s, uint32_t tag)
    void kv_leg_signalled(const kv_state *s, uint32_t tag, uint32_t bumps)

cdef extern from "plan.h" nogil:
    struct kv_run:
        pass
    struct kv_page:
        uint64_t page_bytes, units, unit_bytes
    struct kv_chunk:
        const int32_t *pages
        size_t num_pages
        const uint64_t *edges
        size_t num_edges

cdef extern from "domain.h" nogil:
    enum: KV_NAME_BYTES
    c_bool kv_providers(char (*names)[64], size_t capacity, size_t *num, kv_error *e)
    uint32_t fi_version()
    uint32_t FI_MAJOR(uint32_t version)
    uint32_t FI_MINOR(uint32_t version)
    const char *fi_strerror(int code)

cdef extern from "turns.h" nogil:
    struct kv_turns:
        pass
    kv_turns *kv_turns_new(uint32_t num_slots)
    void kv_turns_drop(kv_turns *t)

cdef extern from "transfer.h" nogil:
    struct kv_order:
        uint32_t part, link, template, imm, tag
        c_bool ready
        kv_chunk chunk

cdef extern from "link.h" nogil:
    struct kv_remote_region:
        uint64_t base, bytes, key
        uint32_t target
    struct kv_remote_cell:
        uint64_t base, key
        uint32_t imm, target
    struct kv_remote_name:
        const void *bytes
        size_t num_bytes
    struct kv_remote:
        const kv_remote_name *names
        const kv_remote_region *regions
        const kv_remote_cell *cells
        uint32_t num_names, num_regions, num_cells

cdef extern from "fault.h" nogil:
    enum kv_fault:
        KV_FAULT_DROP, KV_FAULT_FLIP, KV_FAULT_FAIL, KV_FAULT_REORDER, KV_NUM_FAULTS
    struct kv_disturbance:
        uint64_t seed, slow_ns
        double chance[5]

cdef extern from "trace.h" nogil:
    struct kv_mark:
        uint64_t tag, entry_index, bumps_seen, t_ns

cdef extern from "records.h" nogil:
    enum kv_record_kind:
        KV_REACHED, KV_OVERFLOW, KV_STRAY, KV_SENT, KV_STOPPED, KV_LINK_OPENED, KV_LINK_FAILED, KV_LINK_CLOSED
        KV_STEP_ENDED, KV_STEP_FAULT, KV_SLOT_REACHED, KV_LINK_HELD, KV_PORT_OPENED, KV_PORT_FAILED, KV_PORT_CLOSED
        KV_JOIN_LOST
    enum kv_step_fault:
        KV_FEWER, KV_MORE, KV_DEADLINE
    enum kv_link_failure:
        KV_FAILED_OPEN, KV_FAILED_REGISTER, KV_FAILED_CONNECT, KV_FAILED_POST, KV_FAILED_COMPLETION
        KV_FAILED_TIMEOUT, KV_FAILED_CLOSE, KV_FAILED_LEASE, KV_FAILED_STUCK
    struct kv_record:
        uint64_t kind, id, value, t_ns, extra

cdef extern from "poller.h" nogil:
    enum: KV_MAX_REGIONS, KV_MAX_NICS, KV_MAX_STREAMS, KV_MAX_POLLERS
    struct kv_config:
        const char *provider
        const char *const *nics
        uint32_t num_nics, index, num_pollers
        int core
        uint32_t cq_entries
        c_bool spin, shared_endpoint
        uint64_t spin_ns, sleep_max_ns
        uint32_t max_write_bytes
        uint64_t link_bytes, op_timeout_ns, heartbeat_ns, lease_ns, first_lease_ns
    struct kv_bell:
        int fd
    struct kv_records:
        kv_bell bell
    struct kv_fabric:
        c_bool fence_proven
    struct kv_nic:
        kv_fabric fabric
    struct kv_poller:
        kv_records records
        kv_nic *nics
    const char *kv_fabric_provider(const kv_fabric *f)
    struct kv_entry_spec:
        int64_t src_region, src_base, dst_region, dst_base, signal
    struct kv_template_spec:
        const kv_run *runs
        const kv_entry_spec *entries
        uint32_t num_runs, num_entries
        kv_page src_page, dst_page
        uint64_t row_bytes, item_bytes
    struct kv_part:
        uint32_t stream, num_bumps
        uint64_t pollers
    struct kv_keys:
        uint64_t *keys
        uint32_t num
    kv_poller *kv_poller_open(const kv_config *config, kv_state *state, kv_error *e)
    c_bool kv_poller_self_test(kv_poller *p, kv_error *e)
    c_bool kv_poller_close(kv_poller *p)
    void kv_poller_free(kv_poller *p)
    int64_t kv_register(kv_poller *p, uint64_t address, uint64_t bytes, uint64_t nics, kv_error *e)
    int64_t kv_add_stream(kv_poller *p, kv_layer_counter *c, kv_turns *turns, kv_error *e)
    int64_t kv_open_link(kv_poller *p, uint32_t nic, const uint64_t *keys, uint32_t num_keys, kv_error *e)
    int64_t kv_link_name(kv_poller *p, uint32_t link, uint8_t *name, kv_error *e)
    int64_t kv_link_regions(kv_poller *p, uint32_t link, kv_remote_region *out, kv_error *e)
    c_bool kv_link_cell(kv_poller *p, uint32_t link, kv_remote_region *out, kv_error *e)
    c_bool kv_connect_link(kv_poller *p, uint32_t link, const kv_remote *peer, uint32_t window, kv_error *e)
    c_bool kv_close_link(kv_poller *p, uint32_t link, c_bool fence, kv_error *e)
    c_bool kv_rotate_port(kv_poller *p, const kv_keys *keys, uint32_t num_lists, kv_error *e)
    c_bool kv_close_port(kv_poller *p, uint32_t number, kv_error *e)
    c_bool kv_retarget_link(kv_poller *p, uint32_t link, const kv_remote *peer, kv_error *e)
    c_bool kv_resume_link(kv_poller *p, uint32_t link, kv_error *e)
    int64_t kv_add_template(kv_poller *p, uint32_t link, const kv_template_spec *spec, kv_error *e)
    c_bool kv_begin_step(kv_poller **pollers, uint32_t num_pollers, const kv_part *parts, uint32_t num_parts,
                         const kv_order *orders, size_t num_orders, uint64_t deadline_ns, uint64_t *tickets,
                         kv_error *e)
    c_bool kv_join_step(kv_poller **pollers, uint32_t num_pollers, const kv_part *parts, uint32_t num_parts,
                        uint64_t *tickets, const kv_order *orders, size_t num_orders, kv_error *e)
    c_bool kv_abandon(kv_poller *p, uint32_t stream, uint64_t ticket, kv_error *e)
    c_bool kv_resume_stream(kv_poller *p, uint32_t stream, uint64_t ticket, kv_error *e)
    c_bool kv_stop_tag(kv_poller *p, uint32_t link, uint32_t tag, kv_error *e)
    unsigned kv_take(kv_poller *p, kv_record *out, unsigned max)
    c_bool kv_inject(kv_poller *p, kv_fault fault, uint64_t nth, kv_error *e)
    c_bool kv_disturb(kv_poller *p, const kv_disturbance *d, kv_error *e)
    c_bool kv_hold(kv_poller *p, c_bool hold, kv_error *e)
    c_bool kv_trace_on(kv_poller *p, uint32_t capacity, kv_error *e)
    uint32_t kv_trace_read(kv_poller *p, kv_mark *out, uint32_t max)
    enum: KV_NUM_STATS
    const char *const *kv_stats_names
    void kv_stats_read(kv_poller *p, uint64_t *values)
