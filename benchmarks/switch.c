/* A switch that keeps each packet for a while: see networks.py.

       switch DELAY_NS NS_PER_BYTE FD...

   Each FD is a TUN device, the first that of address x.x.x.1, and so on. No
   packet is lost. At the end of its input the switch prints the packets and the
   bytes delivered, and by how many nanoseconds they were late on average. */

#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    PORTS = 64,
    HEADER = 10,  /* struct virtio_net_hdr, before each packet. */
    LARGEST = HEADER + 65535,
    AT_ONCE = 16, /* Packets of a port before another has its turn. */
    DESTINATION = HEADER + 19 /* The last byte of the IPv4 address. */
};

struct packet {
    struct packet *next;
    long long due;
    long size;
    unsigned char data[LARGEST];
};

/* Packets for a task, in order; when its link is free, up and down. */
static struct port {
    struct packet *first, *last;
    long long up, down;
} ports[PORTS];

static struct pollfd polled[PORTS + 1]; /* The last is the input. */
static int count;
static long long delay, packets, bytes, late;
static double ns_per_byte;

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static long long later(long long a, long long b) {
    return a > b ? a : b;
}

/* Queues a packet. A link that is busy begins with it when it is free. */
static void take(struct port *from, struct packet *packet) {
    int to = packet->data[DESTINATION] - 1;
    if (packet->data[HEADER] >> 4 != 4 || to < 0 || to >= count) {
        free(packet);
        return;
    }
    struct port *port = &ports[to];
    long long busy = (long long)((packet->size - HEADER) * ns_per_byte);
    from->up = later(now(), from->up) + busy;
    port->down = later(from->up, port->down + busy);
    packet->due = port->down + delay;
    packet->next = NULL;
    if (port->first)
        port->last->next = packet;
    else
        port->first = packet;
    port->last = packet;
}

/* Reads what a task has sent, but not so much that others wait for long. */
static void receive(int from) {
    for (int i = 0; i < AT_ONCE; i++) {
        struct packet *packet = malloc(sizeof *packet);
        if (!packet)
            exit(1);
        long size = read(polled[from].fd, packet->data, LARGEST);
        if (size <= DESTINATION) {
            if (size < 0 && errno != EAGAIN)
                polled[from].fd = -1; /* Its network has ended. */
            free(packet);
            return;
        }
        packet->size = size;
        /* In place: gives back what a small packet does not need. */
        packet = realloc(packet, offsetof(struct packet, data) + size);
        take(&ports[from], packet);
    }
}

/* Delivers what is due; returns when the next packet is, or -1. */
static long long deliver(void) {
    long long next = -1;
    for (int i = 0; i < count; i++) {
        struct port *port = &ports[i];
        struct packet *packet;
        while ((packet = port->first)) {
            long long lateness = now() - packet->due;
            if (lateness < 0)
                break;
            if (write(polled[i].fd, packet->data, packet->size) > 0) {
                packets++;
                bytes += packet->size - HEADER;
                late += lateness;
            }
            port->first = packet->next;
            free(packet);
        }
        if (packet && (next < 0 || packet->due < next))
            next = packet->due;
    }
    return next;
}

int main(int argc, char **argv) {
    count = argc - 3;
    if (count < 1 || count > PORTS)
        return 2;
    delay = atoll(argv[1]);
    ns_per_byte = atof(argv[2]);
    for (int i = 0; i < count; i++)
        polled[i] = (struct pollfd){atoi(argv[i + 3]), POLLIN, 0};
    polled[count] = (struct pollfd){STDIN_FILENO, POLLIN, 0};
    prctl(PR_SET_TIMERSLACK, 1);
    mallopt(M_TRIM_THRESHOLD, 1 << 28); /* Pages are not mapped again. */
    mallopt(M_TOP_PAD, 1 << 22);
    while (!polled[count].revents) {
        long long next = deliver();
        long long wait = next < 0 ? 0 : later(next - now(), 0);
        struct timespec time = {wait / 1000000000, wait % 1000000000};
        if (ppoll(polled, count + 1, next < 0 ? NULL : &time, NULL) < 0)
            return 1;
        for (int i = 0; i < count; i++)
            if (polled[i].revents)
                receive(i);
    }
    printf("%lld %lld %lld\n", packets, bytes, packets ? late / packets : 0);
    return 0;
}
