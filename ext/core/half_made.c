/* Connections to an endpoint that were begun and not finished. libfabric's net (1.17, and tcp as it is called later)
   keeps what it has accepted until the peer's request comes in, for as long as that takes, and closing the endpoint
   frees what it then looks into. A peer that is stopped or cut off at the wrong moment is enough, and the crash comes
   when it goes on or dies. libfabric offers no way to see or to end them, so we reset their sockets, which we find among
   the process's by the endpoint's address. Nobody else closes them meanwhile: that is for the endpoint's thread.

   Connections that were answered are none of these, and stay as they are until the endpoint is closed. */
#include "domain.h"
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static bool is_at(int fd, const struct kv_endpoint *n)
{
    struct sockaddr_storage at = {0};
    socklen_t bytes = sizeof at;
    return !getsockname(fd, (struct sockaddr *)&at, &bytes) && bytes == n->name_bytes && !memcmp(&at, n->name, bytes);
}

/* A listener is half made as well: nothing more is to be accepted. */
static bool is_half_made(int fd)
{
    struct tcp_info info = {0};
    socklen_t bytes = sizeof info;
    return !getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) && !info.tcpi_data_segs_out;
}

int kv_endpoint_cut_off(const struct kv_fabric *f, const struct kv_endpoint *n, uint32_t *num)
{
    const struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    const struct dirent *entry;
    *num = 0;
    if (!f->descriptors || !n->ep)
        return 0;
    rewinddir(f->descriptors);
    while (errno = 0, (entry = readdir(f->descriptors)) != NULL) {
        int fd = atoi(entry->d_name);   /* of "." and ".." it makes 0, which has its own entry anyway */
        if (!is_at(fd, n) || !is_half_made(fd))
            continue;
        if (connect(fd, &nowhere, sizeof nowhere))
            return -errno;
        ++*num;
    }
    return -errno;
}
