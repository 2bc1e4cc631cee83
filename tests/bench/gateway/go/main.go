// Command gateway is Go's ReverseProxy as a gateway, which `cargo xtask bench gateway` compares the activator with.
package main

import (
	"flag"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"
)

// newProxy returns a proxy to the pod at `to`, which speaks HTTP/2 with prior knowledge if http2 is true.
func newProxy(to string, http2 bool) http.Handler {
	target, err := url.Parse(to)
	if err != nil {
		log.Fatalf("bad URL of a pod: %v", err)
	}
	transport := &http.Transport{
		MaxIdleConnsPerHost: 4096,
		IdleConnTimeout:     10 * time.Minute,
		DisableCompression:  true,
	}
	if http2 {
		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		transport.Protocols = protocols
	}
	return &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(request *httputil.ProxyRequest) {
			request.SetURL(target)
			request.Out.Host = request.In.Host
			request.SetXForwarded()
		},
	}
}

// newServer returns a server of HTTP/1.1 and of HTTP/2, with and without TLS.
func newServer(address string, handler http.Handler) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Addr:              address,
		Handler:           handler,
		Protocols:         protocols,
		ReadHeaderTimeout: time.Minute,
		IdleTimeout:       10 * time.Minute,
	}
}

func main() {
	address := flag.String("address", "127.0.0.1", "IP address to listen on")
	pod := flag.String("pod", "http://127.0.0.1:8080", "URL of the pod")
	grpc := flag.String("grpc", "http://127.0.0.1:8082", "URL of the pod that speaks gRPC")
	certificate := flag.String("certificate", "", "file with the certificate chain in PEM")
	key := flag.String("key", "", "file with the private key in PEM")
	flag.Parse()

	toPod, toGrpc := newProxy(*pod, false), newProxy(*grpc, true)
	ended := make(chan error)
	serve := func(port string, handler http.Handler) {
		go func() { ended <- newServer(*address+":"+port, handler).ListenAndServe() }()
	}
	serve("8080", toPod)
	serve("8081", toPod)
	serve("8082", toGrpc)
	go func() { ended <- newServer(*address+":8443", toPod).ListenAndServeTLS(*certificate, *key) }()
	log.Fatal(<-ended)
}
