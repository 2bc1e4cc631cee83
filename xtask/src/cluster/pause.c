/* The process that a pod's namespaces are kept by: it waits, and collects what other processes of the pod leave. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int signal) { _exit(signal == SIGINT || signal == SIGTERM ? 0 : 1); }

static void collect(int signal)
{
    (void)signal;
    while (waitpid(-1, NULL, WNOHANG) > 0) {}
}

int main(void)
{
    struct sigaction end = {.sa_handler = leave}, child = {.sa_handler = collect, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGINT, &end, NULL);
    sigaction(SIGTERM, &end, NULL);
    sigaction(SIGCHLD, &child, NULL);
    for (;;) pause();
}
