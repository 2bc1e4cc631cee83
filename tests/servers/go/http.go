package main

import (
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/coder/websocket"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/h2c"
)

// serveHTTP serves HTTP/1.1, and HTTP/2 by prior knowledge.
func serveHTTP(listener net.Listener) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := http.Server{Handler: counted(application()), Protocols: protocols}
	return server.Serve(listener)
}

// serveH2C serves the same, and HTTP/2 by Upgrade too. The package is deprecated, but most programs that served HTTP/2
// without TLS before Go 1.24 use it.
func serveH2C(listener net.Listener) error {
	return http.Serve(listener, h2c.NewHandler(counted(application()), &http2.Server{}))
}

func counted(application http.Handler) http.Handler {
	return http.HandlerFunc(func(out http.ResponseWriter, in *http.Request) {
		defer begin()()
		application.ServeHTTP(out, in)
	})
}

func application() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(out http.ResponseWriter, _ *http.Request) {
		io.WriteString(out, "hello\n")
	})
	mux.HandleFunc("/empty", func(out http.ResponseWriter, _ *http.Request) {
		out.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("/hints", func(out http.ResponseWriter, _ *http.Request) {
		out.Header().Set("Link", "</style.css>; rel=preload")
		out.WriteHeader(http.StatusEarlyHints)
		io.WriteString(out, "hello\n")
	})
	mux.HandleFunc("/chunks", func(out http.ResponseWriter, _ *http.Request) {
		for range 5 {
			io.WriteString(out, "some words\n")
			http.NewResponseController(out).Flush()
		}
	})
	mux.HandleFunc("/big", func(out http.ResponseWriter, _ *http.Request) {
		io.WriteString(out, strings.Repeat("x", 1<<20))
	})
	mux.HandleFunc("/echo", func(out http.ResponseWriter, in *http.Request) {
		body, _ := io.ReadAll(in.Body)
		out.Write(body)
	})
	mux.HandleFunc("/early", func(out http.ResponseWriter, _ *http.Request) {
		http.Error(out, "no", http.StatusRequestEntityTooLarge)
	})
	mux.HandleFunc("/wait", func(out http.ResponseWriter, in *http.Request) {
		wait(in.Context())
		io.WriteString(out, "waited\n")
	})
	mux.HandleFunc("/websocket", echoWebSocket)
	return mux
}

// echoWebSocket returns when the client has closed.
func echoWebSocket(out http.ResponseWriter, in *http.Request) {
	socket, err := websocket.Accept(out, in, nil)
	if err != nil {
		return
	}
	defer socket.CloseNow()
	for {
		kind, data, err := socket.Read(in.Context())
		if err != nil {
			return
		}
		if socket.Write(in.Context(), kind, data) != nil {
			return
		}
	}
}
