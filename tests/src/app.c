/*
 * Program of the test containers: one file, no libraries. Each argument is one step, executed in order:
 *
 * env, id             prints the environment; prints user and group
 * say=TEXT, show=FILE prints a line; prints a file
 * polite, stubborn    ends on SIGTERM with a line; ignores SIGTERM
 * sleep=S, wait       sleeps for seconds; sleeps until a signal ends the process
 * need=FILE           ends with 1 unless the file exists
 * await=FILE          waits until the file exists
 * touch=FILE          makes a file, and prints if that succeeded
 * fill=MIB, eat=MIB   prints so much; allocates so much memory
 * exit=CODE           ends
 * listen=PORT         greets each client; with `sick` as the first argument, responds to three HTTP requests alone
 * listen6=PORT        as listen, for IPv6 alone
 * tunnel=PORT         switches each connection to an echo of its bytes
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void term(int signal) {
    (void)signal;
    write(1, "asked to end\n", 13);
    _exit(0);
}

static void show(const char *path) {
    char text[4096];
    int file = open(path, O_RDONLY), length;
    while (file >= 0 && (length = read(file, text, sizeof text)) > 0) write(1, text, length);
}

/* Opens a listener on all addresses: of both families, or of IPv6 alone. */
static int open_listener(const char *port, int six_only) {
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_port = htons(atoi(port))};
    int server = socket(AF_INET6, SOCK_STREAM, 0);
    setsockopt(server, IPPROTO_IPV6, IPV6_V6ONLY, &six_only, sizeof six_only);
    if (bind(server, (void *)&at, sizeof at) || listen(server, 16)) exit(9);
    return server;
}

static int tunnel;

/* A WebSocket's close frame with the code 1001, "going away" (RFC 6455 §5.5.1 and §7.4.1). */
static void close_tunnel(int signal) {
    (void)signal;
    write(tunnel, "\x88\x02\x03\xe9", 4);
    _exit(0);
}

/* Passes SIGTERM on to the other processes, because only the first process gets it. */
static void close_tunnels(int number) {
    signal(number, SIG_IGN);
    kill(0, number);
    while (wait(0) > 0) {}
    _exit(0);
}

/* Responds to a request with 101 and the peer's address, then echoes every byte until the peer ends. */
static void echo_tunnel(void) {
    char bytes[4096], peer[INET6_ADDRSTRLEN];
    struct sockaddr_in6 from;
    socklen_t size = sizeof from;
    int length = 0, more;
    signal(SIGTERM, SIG_DFL);
    while (!length || !memmem(bytes, length, "\r\n\r\n", 4)) {
        more = read(tunnel, bytes + length, sizeof bytes - length);
        if (more <= 0) return;
        length += more;
    }
    getpeername(tunnel, (void *)&from, &size);
    inet_ntop(AF_INET6, &from.sin6_addr, peer, sizeof peer);
    signal(SIGTERM, close_tunnel);
    dprintf(tunnel, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Peer: %s\r\n\r\n",
            strncmp(peer, "::ffff:", 7) ? peer : peer + 7);
    while ((length = read(tunnel, bytes, sizeof bytes)) > 0) write(tunnel, bytes, length);
}

int main(int count, char **words) {
    extern char **environ;
    setvbuf(stdout, 0, _IONBF, 0);
    for (int at = 1; at < count; at++) {
        char *word = words[at];
        if (!strcmp(word, "env")) for (char **one = environ; *one; one++) puts(*one);
        else if (!strcmp(word, "id")) printf("uid %d gid %d\n", getuid(), getgid());
        else if (!strcmp(word, "polite")) signal(SIGTERM, term);
        else if (!strcmp(word, "stubborn")) signal(SIGTERM, SIG_IGN);
        else if (!strcmp(word, "wait")) for (;;) pause();
        else if (!strncmp(word, "say=", 4)) puts(word + 4);
        else if (!strncmp(word, "show=", 5)) show(word + 5);
        else if (!strncmp(word, "exit=", 5)) exit(atoi(word + 5));
        else if (!strncmp(word, "sleep=", 6)) sleep(atoi(word + 6));
        else if (!strncmp(word, "need=", 5)) {
            if (access(word + 5, F_OK)) return printf("no %s\n", word + 5), 1;
        } else if (!strncmp(word, "await=", 6)) while (access(word + 6, F_OK)) usleep(10000);
        else if (!strncmp(word, "fill=", 5)) {
            char line[1024];
            memset(line, 'x', sizeof line);
            line[sizeof line - 1] = '\n';
            /* A full disk does not end the program. */
            for (int left = atoi(word + 5) << 10; left > 0; left--) write(1, line, sizeof line);
        } else if (!strncmp(word, "touch=", 6)) {
            int file = open(word + 6, O_CREAT | O_WRONLY, 0644);
            puts(file < 0 ? "refused" : "made");
        } else if (!strncmp(word, "eat=", 4)) {
            size_t bytes = (size_t)atoi(word + 4) << 20;
            memset(malloc(bytes), 1, bytes);
            puts("eaten");
        } else if (!strncmp(word, "tunnel=", 7)) {
            int server = open_listener(word + 7, 0);
            signal(SIGTERM, close_tunnels);
            signal(SIGCHLD, SIG_IGN);
            while ((tunnel = accept(server, 0, 0)) >= 0) {
                if (!fork()) return echo_tunnel(), 0;
                close(tunnel);
            }
        } else if (!strncmp(word, "listen=", 7) || !strncmp(word, "listen6=", 8)) {
            int server = open_listener(strchr(word, '=') + 1, word[6] == '6');
            for (;;) {
                char head[512];
                int client = accept(server, 0, 0);
                if (!strcmp(words[1], "sick")) {
                    /* Responds to three requests, then never again. */
                    static int requests;
                    if (requests++ >= 3) for (;;) pause();
                    read(client, head, sizeof head);
                    write(client, "HTTP/1.1 204 Well\r\n\r\n", 21);
                    close(client);
                    continue;
                }
                write(client, "hello\n", 6);
                close(client);
            }
        }
    }
    return 0;
}
