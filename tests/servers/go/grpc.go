package main

import (
	"context"
	"errors"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// text has the same bytes as `Text` of ../echo.proto, so that nothing needs to be generated.
type text = wrapperspb.StringValue

// serveGRPC serves the service Echo of ../echo.proto by grpc-go's own HTTP/2.
func serveGRPC(listener net.Listener) error {
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "servers.Echo",
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: "Unary", Handler: unary}},
		Streams: []grpc.StreamDesc{
			{StreamName: "ServerStream", Handler: serverStream, ServerStreams: true},
			{StreamName: "ClientStream", Handler: clientStream, ClientStreams: true},
			{StreamName: "Bidi", Handler: bidi, ServerStreams: true, ClientStreams: true},
		},
	}, nil)
	return server.Serve(listener)
}

// answer does what a message asks for: it waits, fails, or returns the text.
func answer(ctx context.Context, in *text) (*text, error) {
	switch in.Value {
	case "wait":
		wait(ctx)
	case "fail":
		return nil, status.Error(codes.FailedPrecondition, "asked to fail")
	}
	return in, nil
}

func unary(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	defer begin()()
	in := new(text)
	if err := decode(in); err != nil {
		return nil, err
	}
	return answer(ctx, in)
}

func serverStream(_ any, stream grpc.ServerStream) error {
	defer begin()()
	in := new(text)
	if err := stream.RecvMsg(in); err != nil {
		return err
	}
	for range 3 {
		out, err := answer(stream.Context(), in)
		if err != nil {
			return err
		}
		if err := stream.SendMsg(out); err != nil {
			return err
		}
	}
	return nil
}

func clientStream(_ any, stream grpc.ServerStream) error {
	defer begin()()
	last := new(text)
	for {
		in := new(text)
		if err := stream.RecvMsg(in); errors.Is(err, io.EOF) {
			return stream.SendMsg(last)
		} else if err != nil {
			return err
		}
		out, err := answer(stream.Context(), in)
		if err != nil {
			return err
		}
		last = out
	}
}

func bidi(_ any, stream grpc.ServerStream) error {
	defer begin()()
	for {
		in := new(text)
		if err := stream.RecvMsg(in); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		out, err := answer(stream.Context(), in)
		if err != nil {
			return err
		}
		if err := stream.SendMsg(out); err != nil {
			return err
		}
	}
}
