// An agent that dials kas as GitLab's agentk 14.1 does inside WebSocket: with its versions of the gRPC and WebSocket
// libraries, and the same options. What it serves is one method, testkit.v1.Testkit/Echo.
//
// Envelopes are read and written field by field: they are few, and no code has to be generated.
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/encoding/protowire"
	"nhooyr.io/websocket"
)

const (
	getConfiguration = "/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration"
	connect          = "/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect"
	userAgent        = "agentk/v14.1.1/abc"
	readLimit        = 10 << 20
)

// Fields of ConnectRequest, which the agent sends.
const (
	descriptor = 1
	header     = 2
	message    = 3
	trailer    = 4
)

// Fields of ConnectResponse.
const (
	requestInfo  = 1
	theirMessage = 2
	closeSend    = 3
)

// raw is a codec that passes messages unchanged.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error) { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (raw) Name() string { return "proto" }

type token string

func (t token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(t)}, nil
}
func (token) RequireTransportSecurity() bool { return false }

func main() {
	if err := run(os.Args[1], token(os.Getenv("AGENT_TOKEN"))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(url string, token token) error {
	ctx := context.Background()
	conn, err := grpc.DialContext(ctx, url,
		grpc.WithInsecure(),
		grpc.WithUserAgent(userAgent),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 55 * time.Second, PermitWithoutStream: true}),
		grpc.WithPerRPCCredentials(token),
		grpc.WithDefaultCallOptions(grpc.UseCompressor(gzip.Name), grpc.ForceCodec(raw{})),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			conn, _, err := websocket.Dial(ctx, address, &websocket.DialOptions{
				HTTPHeader:   http.Header{"User-Agent": {userAgent}},
				Subprotocols: []string{"ws-tunnel"},
			})
			if err != nil {
				return nil, err
			}
			conn.SetReadLimit(readLimit)
			return websocket.NetConn(context.Background(), conn, websocket.MessageBinary), nil
		}),
	)
	if err != nil {
		return err
	}
	configuration, err := open(ctx, conn, getConfiguration, nil)
	if err != nil {
		return err
	}
	if err := configuration.CloseSend(); err != nil {
		return err
	}
	if _, err := configuration.Header(); err != nil {
		return err
	}
	failed := make(chan error)
	for i := 0; i < 10; i++ {
		go func() {
			for {
				if err := serve(ctx, conn); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	return <-failed
}

func open(ctx context.Context, conn *grpc.ClientConn, method string, first []byte) (grpc.ClientStream, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return nil, err
	}
	return stream, stream.SendMsg(&first)
}

// field encodes a field of bytes.
func field(number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
}

// serve opens a tunnel and answers the request that comes through it with its own messages.
func serve(ctx context.Context, conn *grpc.ClientConn) error {
	service := append(field(1, []byte("testkit.v1.Testkit")), field(2, field(1, []byte("Echo")))...)
	tunnel, err := open(ctx, conn, connect, field(descriptor, field(1, field(1, service))))
	if err != nil {
		return err
	}
	for {
		var envelope []byte
		if err := tunnel.RecvMsg(&envelope); err != nil {
			return fmt.Errorf("tunnel: %w", err)
		}
		number, _, n := protowire.ConsumeTag(envelope)
		if n < 0 {
			return protowire.ParseError(n)
		}
		value, m := protowire.ConsumeBytes(envelope[n:])
		if m < 0 {
			return protowire.ParseError(m)
		}
		var answer []byte
		switch number {
		case requestInfo:
			answer = field(header, nil)
		case theirMessage:
			// Both directions have the same message.
			answer = field(message, value)
		case closeSend:
			answer = field(trailer, nil)
		}
		if err := tunnel.SendMsg(&answer); err != nil {
			return err
		}
		if number == closeSend {
			if err := tunnel.CloseSend(); err != nil {
				return err
			}
			// The clean end.
			if err := tunnel.RecvMsg(&envelope); err == nil {
				return fmt.Errorf("%d bytes after the end", len(envelope))
			}
			return nil
		}
	}
}
