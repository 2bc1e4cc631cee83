package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
)

// sendRequests sends requests of every kind one after the other over one connection of HTTP/2, and then count
// requests of the last path at once.
func sendRequests(url, last, count string) error {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: protocols}}
	for _, path := range []string{"/hello", "/chunks", "/big", "/empty", "/hello"} {
		if err := send(client, http.MethodGet, url+path, nil); err != nil {
			return err
		}
	}
	if err := send(client, http.MethodHead, url+"/hello", nil); err != nil {
		return err
	}
	for _, size := range []int{5, 200_000, 2_000_000} {
		body := bytes.NewReader(bytes.Repeat([]byte("x"), size))
		if err := send(client, http.MethodPost, url+"/echo", body); err != nil {
			return err
		}
	}
	atOnce, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	errs := make(chan error, atOnce)
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() { errs <- send(client, http.MethodGet, url+last, nil) })
	}
	all.Wait()
	for range atOnce {
		if err := <-errs; err != nil {
			return err
		}
	}
	return nil
}

func send(client *http.Client, method, url string, body io.Reader) error {
	request, err := http.NewRequest(method, url, body)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return err
	}
	if response.StatusCode >= 300 || response.ProtoMajor != 2 {
		return fmt.Errorf("%s %s: %s by %s", method, url, response.Status, response.Proto)
	}
	return nil
}
