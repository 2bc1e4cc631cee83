/* What test containers run: one file, no libraries, each argument one thing to do. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
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
            /* A full disk stops nobody. */
            for (int left = atoi(word + 5) << 10; left > 0; left--) write(1, line, sizeof line);
        } else if (!strncmp(word, "touch=", 6)) {
            int file = open(word + 6, O_CREAT | O_WRONLY, 0644);
            puts(file < 0 ? "refused" : "made");
        } else if (!strncmp(word, "eat=", 4)) {
            size_t bytes = (size_t)atoi(word + 4) << 20;
            memset(malloc(bytes), 1, bytes);
            puts("eaten");
        } else if (!strncmp(word, "listen=", 7)) {
            /* Takes both families. */
            struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_port = htons(atoi(word + 7))};
            int server = socket(AF_INET6, SOCK_STREAM, 0);
            if (bind(server, (void *)&at, sizeof at) || listen(server, 16)) return 9;
            for (;;) {
                char head[512];
                int client = accept(server, 0, 0);
                if (!strcmp(words[1], "sick")) {
                    /* Answers well a few times, then never again. */
                    static int asked;
                    if (asked++ >= 3) for (;;) pause();
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
