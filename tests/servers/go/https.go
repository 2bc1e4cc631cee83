package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
)

// requestHTTPS sends count requests over TLS, one after the other, and prints how many had a response by HTTP/2. It
// verifies the chain up to the authority in a file. CONNECT is the IP address of a host that no DNS knows.
func requestHTTPS(url, authority, count string) error {
	total, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	pem, err := os.ReadFile(authority)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("no certificate in %s", authority)
	}
	client := &http.Client{Transport: &http.Transport{
		DialContext:       dialFixed,
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		ForceAttemptHTTP2: true,
	}}
	for range total {
		if err := send(client, http.MethodGet, url, nil); err != nil {
			return err
		}
	}
	_, err = fmt.Printf("HTTP/2.0 %d\n", total)
	return err
}

// dialFixed connects to the address in CONNECT, if there is one, at the port of the URL.
func dialFixed(ctx context.Context, network, address string) (net.Conn, error) {
	if fixed := os.Getenv("CONNECT"); fixed != "" {
		_, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		address = net.JoinHostPort(fixed, port)
	}
	return new(net.Dialer).DialContext(ctx, network, address)
}
