package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"
	streamhttp "k8s.io/streaming/pkg/httpstream"
)

// large is more than the windows of every hop.
const large = 1 << 20

// noise returns bytes that do not repeat soon.
func noise(length int) []byte {
	bytes := make([]byte, length)
	state := uint32(2463534242)
	for at := range bytes {
		state ^= state << 13
		state ^= state >> 17
		state ^= state << 5
		bytes[at] = byte(state)
	}
	return bytes
}

// followsLogs reads a log while it grows, and leaves.
func (c *client) followsLogs(ctx context.Context) error {
	if err := os.WriteFile(c.log, []byte("first\n"), 0o600); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	options := &corev1.PodLogOptions{Follow: true}
	stream, err := c.set.CoreV1().Pods(c.namespace).GetLogs(c.pod, options).Stream(ctx)
	if err != nil {
		return err
	}
	defer stream.Close()
	lines := bufio.NewReader(stream)
	for _, want := range []string{"first\n", "second\n", "third\n"} {
		if want != "first\n" {
			if err := appendTo(c.log, want); err != nil {
				return err
			}
		}
		got, err := lines.ReadString('\n')
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("%q instead of %q", got, want)
		}
	}
	return nil
}

func appendTo(name, text string) error {
	file, err := os.OpenFile(name, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	return errors.Join(err, file.Close())
}

// execURL returns the URL of a command. Which streams there are is a part of it.
func (c *client) execURL(options *corev1.PodExecOptions) *url.URL {
	return c.set.CoreV1().RESTClient().Post().Resource("pods").Namespace(c.namespace).Name(c.pod).
		SubResource("exec").VersionedParams(options, scheme.ParameterCodec).URL()
}

func (c *client) execsByWebSocket(ctx context.Context) error {
	return c.execs(ctx, func(target *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, target.String())
	})
}

func (c *client) execsBySPDY(ctx context.Context) error {
	return c.execs(ctx, func(target *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewSPDYExecutor(c.config, http.MethodPost, target)
	})
}

// execsWithFallback asks by WebSocket for a protocol that no API server has, as one that is older than the
// client refuses a new one, and goes on by SPDY.
func (c *client) execsWithFallback(ctx context.Context) error {
	return c.execs(ctx, func(target *url.URL) (remotecommand.Executor, error) {
		first, err := remotecommand.NewWebSocketExecutorForProtocols(c.config, http.MethodGet, target.String(),
			"v99.channel.k8s.io")
		if err != nil {
			return nil, err
		}
		second, err := remotecommand.NewSPDYExecutor(c.config, http.MethodPost, target)
		if err != nil {
			return nil, err
		}
		return remotecommand.NewFallbackExecutor(first, second, streamhttp.IsUpgradeFailure)
	})
}

// execs runs two commands: one has an exit code and both outputs, the other one sends back its whole input.
func (c *client) execs(ctx context.Context, executor func(*url.URL) (remotecommand.Executor, error)) error {
	command := []string{"sh", "-c", "echo out; echo err >&2; exit 7"}
	options := &corev1.PodExecOptions{Command: command, Stdout: true, Stderr: true}
	run, err := executor(c.execURL(options))
	if err != nil {
		return err
	}
	var out, errOut bytes.Buffer
	err = run.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &errOut})
	if exited := (utilexec.CodeExitError{}); !errors.As(err, &exited) || exited.Code != 7 {
		return fmt.Errorf("exit code 7 was expected: %w", err)
	}
	if out.String() != "out\n" || errOut.String() != "err\n" {
		return fmt.Errorf("outputs %q and %q", out.String(), errOut.String())
	}

	options = &corev1.PodExecOptions{Command: []string{"cat"}, Stdin: true, Stdout: true}
	if run, err = executor(c.execURL(options)); err != nil {
		return err
	}
	sent := noise(large)
	out.Reset()
	err = run.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: bytes.NewReader(sent), Stdout: &out})
	if err != nil {
		return err
	}
	if !bytes.Equal(out.Bytes(), sent) {
		return fmt.Errorf("%d bytes came back, or others", out.Len())
	}
	return nil
}

// sizes is a terminal that has one size.
type sizes chan remotecommand.TerminalSize

func (s sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s
	if !ok {
		return nil
	}
	return &size
}

// execsInTerminal runs a command that waits until its terminal has the size of that of the client.
func (c *client) execsInTerminal(ctx context.Context) error {
	const script = `until [ "$(stty size)" = "33 101" ]; do sleep 0.01; done; echo it fits`
	options := &corev1.PodExecOptions{
		Command: []string{"sh", "-c", script}, Stdin: true, Stdout: true, TTY: true,
	}
	run, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, c.execURL(options).String())
	if err != nil {
		return err
	}
	terminal := make(sizes, 1)
	terminal <- remotecommand.TerminalSize{Width: 101, Height: 33}
	defer close(terminal)
	// Its input stays open, as that of a person.
	input, keyboard := io.Pipe()
	defer keyboard.Close()
	var out bytes.Buffer
	err = run.StreamWithContext(ctx, remotecommand.StreamOptions{
		Stdin: input, Stdout: &out, Tty: true, TerminalSizeQueue: terminal,
	})
	if err != nil {
		return err
	}
	if out.String() != "it fits\r\n" {
		return fmt.Errorf("the terminal shows %q", out.String())
	}
	return nil
}

func (c *client) portForwardURL() *url.URL {
	return c.set.CoreV1().RESTClient().Post().Resource("pods").Namespace(c.namespace).Name(c.pod).
		SubResource("portforward").URL()
}

func (c *client) forwardsByWebSocket(ctx context.Context) error {
	dialer, err := portforward.NewSPDYOverWebsocketDialer(c.portForwardURL(), c.config)
	if err != nil {
		return err
	}
	return c.forwards(ctx, dialer)
}

func (c *client) forwardsBySPDY(ctx context.Context) error {
	transport, upgrader, err := spdy.RoundTripperFor(c.config)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: transport}
	return c.forwards(ctx, spdy.NewDialer(upgrader, client, http.MethodPost, c.portForwardURL()))
}

// forwards sends bytes through two connections of one upgrade, and reads them again.
func (c *client) forwards(ctx context.Context, dialer httpstream.Dialer) error {
	// What the pod serves is on this machine.
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer server.Close()
	go echo(server)
	_, port, err := net.SplitHostPort(server.Addr().String())
	if err != nil {
		return err
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	var errOut strings.Builder
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:" + port}, stop,
		ready, io.Discard, &errOut)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- forwarder.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		return fmt.Errorf("it ended before it was ready: %w", err)
	case <-ctx.Done():
		return ctx.Err()
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		return err
	}
	results := make(chan error, 2)
	for n := range cap(results) {
		go func() { results <- exchange(ctx, ports[0].Local, noise(large+n)) }()
	}
	for range cap(results) {
		err = errors.Join(err, <-results)
	}
	close(stop)
	err = errors.Join(err, <-ended)
	if err == nil && errOut.Len() > 0 {
		err = errors.New(errOut.String())
	}
	return err
}

// exchange sends bytes to an echo, and compares what comes back.
func exchange(ctx context.Context, port uint16, sent []byte) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
	}
	written := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		written <- err
	}()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil {
		return errors.Join(err, <-written)
	}
	if !bytes.Equal(got, sent) {
		return errors.New("other bytes came back")
	}
	return <-written
}

// echo sends back what comes, until the listener is closed.
func echo(server net.Listener) {
	for {
		conn, err := server.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			// The client notices whatever is missing.
			_, _ = io.Copy(conn, conn)
		}()
	}
}
