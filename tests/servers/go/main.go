// Servers and clients of the kernel tier's table, written with Go's own libraries. See ../README.md for what a server
// must do.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strconv"
	"time"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: servers http | h2c | grpc | requests URL LAST COUNT | https URL CA COUNT | rounds URL WORKERS | websockets URL COUNT | resolve NAME")
	}
	var err error
	switch os.Args[1] {
	case "http":
		err = serveHTTP(listen())
	case "h2c":
		err = serveH2C(listen())
	case "grpc":
		err = serveGRPC(listen())
	case "requests":
		err = sendRequests(os.Args[2], os.Args[3], os.Args[4])
	case "https":
		err = requestHTTPS(os.Args[2], os.Args[3], os.Args[4])
	case "rounds":
		err = requestRounds(os.Args[2], os.Args[3])
	case "websockets":
		var count int
		if count, err = strconv.Atoi(os.Args[3]); err == nil {
			err = holdWebSockets(os.Args[2], count)
		}
	case "resolve":
		err = resolve(os.Args[2])
	default:
		err = fmt.Errorf("unknown role %q", os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}

func listen() net.Listener {
	listener, err := net.Listen("tcp", ":"+os.Getenv("PORT"))
	if err != nil {
		log.Fatal(err)
	}
	return listener
}

var book = openBook()

// openBook opens the request record, with a line for the begin and the end of each request. Appended lines of two bytes
// stay whole.
func openBook() *os.File {
	name := os.Getenv("BOOK")
	if name == "" {
		return os.Stderr
	}
	file, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		log.Fatal(err)
	}
	return file
}

// begin notes that a request has begun. What it returns notes its end.
func begin() func() {
	note("+\n")
	return func() { note("-\n") }
}

func note(line string) {
	if _, err := book.WriteString(line); err != nil {
		log.Fatal(err)
	}
}

// wait returns once the gate is open, or the client has gone.
func wait(ctx context.Context) {
	for ctx.Err() == nil {
		if _, err := os.Stat(os.Getenv("GATE")); err == nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}
