package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/coder/websocket"
)

// holdWebSockets opens count WebSockets, has a message echoed on each, says so, and closes them when its input ends.
func holdWebSockets(url string, count int) error {
	ctx := context.Background()
	var sockets []*websocket.Conn
	for range count {
		socket, _, err := websocket.Dial(ctx, url, nil)
		if err != nil {
			return err
		}
		if err := socket.Write(ctx, websocket.MessageText, []byte("hello")); err != nil {
			return err
		}
		if _, said, err := socket.Read(ctx); err != nil || string(said) != "hello" {
			return fmt.Errorf("the server said %q (%v)", said, err)
		}
		sockets = append(sockets, socket)
	}
	fmt.Println("open")
	if _, err := io.ReadAll(os.Stdin); err != nil {
		return err
	}
	for _, socket := range sockets {
		if err := socket.Close(websocket.StatusNormalClosure, ""); err != nil {
			return err
		}
	}
	return nil
}
