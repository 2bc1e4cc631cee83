// The same as app.py, on Go's own server, which also speaks HTTP/2 to those who begin with it.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
)

// Adds a line to the file that the test names, if it does, before anything is sent.
func book(r *http.Request) {
	path := os.Getenv("REQUEST_LOG")
	if path == "" {
		return
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	fmt.Fprintf(file, "%s %s\n", r.Method, r.RequestURI)
}

func respond(w http.ResponseWriter, r *http.Request) {
	book(r)
	if r.URL.Path == "/early" {
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		io.WriteString(w, "big\n")
		return
	}
	if r.URL.Path == "/reject" {
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusUnauthorized)
		io.WriteString(w, "no\n")
		return
	}
	if r.URL.Path == "/hints" {
		w.Header().Set("Link", "</a>")
		w.WriteHeader(http.StatusEarlyHints)
	}
	count, _ := io.Copy(io.Discard, r.Body)
	var many int
	fmt.Sscanf(r.RequestURI, "/many?n=%d", &many)
	for i := 0; i < many; i++ {
		w.Header().Set(fmt.Sprintf("X-Line-%d", i), "v")
	}
	fmt.Fprintf(w, "%s %s %d\n", r.Method, r.RequestURI, count)
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	server := http.Server{Handler: http.HandlerFunc(respond), Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	panic(server.Serve(listener))
}
