/* Intrusive circular lists. A node that is in no list points to itself, so removing it twice is harmless. */
#ifndef KV_LIST_H
#define KV_LIST_H
#include <stdbool.h>
#include <stddef.h>

struct kv_node { struct kv_node *prev, *next; };

/* The struct of `type` whose `member` is `node`. */
#define KV_OF(node, type, member) ((type *)(void *)((char *)(node) - offsetof(type, member)))

/* Walks a list; the current node may be removed and its struct freed on the way. */
#define KV_EACH(node, list) \
    for (struct kv_node *node = (list)->next, *node##_next = node->next; node != (list); \
         node = node##_next, node##_next = node->next)

static inline void kv_list_init(struct kv_node *n) { n->prev = n->next = n; }
static inline bool kv_list_empty(const struct kv_node *list) { return list->next == list; }

static inline void kv_list_insert(struct kv_node *after, struct kv_node *n)
{
    n->prev = after;
    n->next = after->next;
    after->next->prev = n;
    after->next = n;
}
static inline void kv_list_append(struct kv_node *list, struct kv_node *n) { kv_list_insert(list->prev, n); }

static inline void kv_list_remove(struct kv_node *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    kv_list_init(n);
}
static inline void kv_list_rotate(struct kv_node *list, struct kv_node *n)
{
    kv_list_remove(n);
    kv_list_append(list, n);
}
#endif
