/* Prints the IPv4 address of a name, as each function of the C library finds it: one line for each, with its name.
 * Linked with musl, whose resolver asks by a socket that is not connected, and drops answers of other sources. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <stdio.h>
#include <sys/socket.h>

static void print_address(const char *function, const void *address)
{
	char text[INET_ADDRSTRLEN];
	printf("%s %s\n", function, inet_ntop(AF_INET, address, text, sizeof text) ? text : "?");
}

/* With AF_UNSPEC musl sends two queries from one socket, before it has an answer to either. */
static void print_getaddrinfo(const char *function, const char *name, int family)
{
	struct addrinfo hints = {.ai_family = family, .ai_socktype = SOCK_STREAM};
	struct addrinfo *found = NULL, *each;
	int error = getaddrinfo(name, "80", &hints, &found);
	if (error) {
		printf("%s failed: %s\n", function, gai_strerror(error));
		return;
	}
	for (each = found; each; each = each->ai_next)
		if (each->ai_family == AF_INET)
			print_address(function, &((struct sockaddr_in *)each->ai_addr)->sin_addr);
	freeaddrinfo(found);
}

static void print_gethostbyname(const char *name)
{
	struct hostent *host = gethostbyname(name);
	if (host && host->h_addrtype == AF_INET && host->h_addr_list[0])
		print_address("gethostbyname", host->h_addr_list[0]);
	else
		printf("gethostbyname failed: %s\n", hstrerror(h_errno));
}

/* The last four bytes of a response with one record of type A are its address. */
static void print_res_query(const char *name)
{
	unsigned char answer[512];
	int length = res_query(name, ns_c_in, ns_t_a, answer, sizeof answer);
	if (length >= 4 && length <= (int)sizeof answer)
		print_address("res_query", answer + length - 4);
	else
		printf("res_query failed: %d\n", length);
}

int main(int argc, char **argv)
{
	if (argc != 2) {
		fprintf(stderr, "usage: resolve NAME\n");
		return 2;
	}
	print_getaddrinfo("getaddrinfo-ipv4", argv[1], AF_INET);
	print_getaddrinfo("getaddrinfo-any", argv[1], AF_UNSPEC);
	print_gethostbyname(argv[1]);
	print_res_query(argv[1]);
	return 0;
}
