package main

import (
	"context"
	"fmt"
	"net"
	"time"
)

// resolve prints the IPv4 addresses of a name, as Go's own resolver finds them.
func resolve(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	resolver := net.Resolver{PreferGo: true}
	addresses, err := resolver.LookupIP(ctx, "ip4", name)
	if err != nil {
		return err
	}
	for _, address := range addresses {
		fmt.Println(address)
	}
	return nil
}
