package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// requestRounds sends rounds of requests by workers that share the pool of net/http. Each line of the input is the
// number of requests in a round, and a line of output tells how many failed and how many each pod has served.
func requestRounds(url, workers string) error {
	count, err := strconv.Atoi(workers)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: count}}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		left, err := strconv.Atoi(lines.Text())
		if err != nil {
			return err
		}
		fmt.Println(requestRound(client, url, count, left))
	}
	return lines.Err()
}

func requestRound(client *http.Client, url string, workers, requests int) string {
	var left, failed atomic.Int64
	left.Store(int64(requests))
	var lock sync.Mutex
	served := map[string]int{}
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				pod, err := askPod(client, url)
				if err != nil {
					failed.Add(1)
					fmt.Fprintln(os.Stderr, err)
					continue
				}
				lock.Lock()
				served[pod]++
				lock.Unlock()
			}
		})
	}
	all.Wait()
	words := []string{strconv.FormatInt(failed.Load(), 10)}
	for pod, count := range served {
		words = append(words, fmt.Sprintf("%s=%d", pod, count))
	}
	return strings.Join(words, " ")
}

// askPod returns the name of the pod that has served a request.
func askPod(client *http.Client, url string) (string, error) {
	response, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return "", err
	}
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", url, response.Status)
	}
	return response.Header.Get("X-Pod"), nil
}
