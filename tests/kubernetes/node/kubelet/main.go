// Command kubelet is the part of a kubelet that the API server calls for exec, attach, port-forward and logs.
//
// It has no containers. Every pod is the same folder of this machine: commands run there as child processes
// of this one, and logs are files in it. A port of a pod is one of 127.0.0.1. Only clients with a certificate
// of the given CA may ask for any of that.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/creack/pty"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	// How long a connection may be silent: longer than any test.
	idleTimeout = time.Hour
	// How often a file that is followed is looked at.
	followInterval = 10 * time.Millisecond
)

// What runs as the main process of every container: attach shows that it has begun, and echoes.
var mainProcess = []string{"sh", "-c", "echo attached; exec cat"}

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "address to listen on")
	certificate := flag.String("certificate", "", "file with the certificate of the server")
	key := flag.String("key", "", "file with its key")
	clientCA := flag.String("client-ca", "", "file with the CA that has signed the certificates of clients")
	root := flag.String("root", "", "folder in which commands run and logs are")
	flag.Parse()
	if err := serve(*listen, *certificate, *key, *clientCA, *root); err != nil {
		log.Fatal(err)
	}
}

func serve(address, certificate, key, clientCA, root string) error {
	if root == "" {
		return errors.New("-root is missing")
	}
	pem, err := os.ReadFile(clientCA)
	if err != nil {
		return fmt.Errorf("cannot read the CA of clients: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(pem) {
		return fmt.Errorf("there is no certificate in %s", clientCA)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	report("kubelet is serving", "address", listener.Addr().String())
	server := &http.Server{
		Handler: (&kubelet{root: root}).routes(),
		TLSConfig: &tls.Config{
			ClientAuth: tls.RequireAndVerifyClientCert,
			ClientCAs:  clients,
		},
		// An upgrade takes its connection over, which HTTP/2 does not allow. Without an entry there is no HTTP/2.
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}
	return server.ServeTLS(listener, certificate, key)
}

// report writes a line for the test to standard error.
func report(message string, fields ...string) {
	line := map[string]string{"message": message}
	for at := 0; at+1 < len(fields); at += 2 {
		line[fields[at]] = fields[at+1]
	}
	// A map of strings always encodes, and the test reads until this process has ended.
	_ = json.NewEncoder(os.Stderr).Encode(line)
}

type kubelet struct{ root string }

var (
	_ remotecommand.Executor    = &kubelet{}
	_ remotecommand.Attacher    = &kubelet{}
	_ portforward.PortForwarder = &kubelet{}
)

func (k *kubelet) routes() http.Handler {
	mux := http.NewServeMux()
	// GET is for an upgrade to WebSocket, POST for one to SPDY.
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		command := r.URL.Query()["command"]
		if options, ok := streams(w, r); ok {
			remotecommand.ServeExec(w, r, k, r.PathValue("pod"), "", r.PathValue("container"), command, options,
				idleTimeout, remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
		}
	})
	mux.HandleFunc("/attach/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		if options, ok := streams(w, r); ok {
			remotecommand.ServeAttach(w, r, k, r.PathValue("pod"), "", r.PathValue("container"), options,
				idleTimeout, remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
		}
	})
	mux.HandleFunc("/portForward/{namespace}/{pod}", func(w http.ResponseWriter, r *http.Request) {
		options, err := portforward.NewV4Options(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		portforward.ServePortForward(w, r, k, r.PathValue("pod"), "", options,
			idleTimeout, remotecommand.DefaultStreamCreationTimeout, portforward.SupportedProtocols)
	})
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", k.logs)
	return mux
}

// streams reads from the query which streams a command gets.
func streams(w http.ResponseWriter, r *http.Request) (*remotecommand.Options, bool) {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return nil, false
	}
	return options, true
}

// ExecInContainer runs a command to its end. Its error has the exit code, if that is not 0.
func (k *kubelet) ExecInContainer(ctx context.Context, _, _, _ string, words []string, in io.Reader,
	out, errOut io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	if len(words) == 0 {
		return errors.New("there is no command")
	}
	command := exec.CommandContext(ctx, words[0], words[1:]...)
	command.Dir = k.root
	if tty {
		return inTerminal(command, in, out, resize)
	}
	if out != nil {
		command.Stdout = out
		defer out.Close()
	}
	if errOut != nil {
		command.Stderr = errOut
		defer errOut.Close()
	}
	var stdin io.WriteCloser
	if in != nil {
		// Not command.Stdin: with that, Wait also waits for the end of the input, which a command need not read.
		pipe, err := command.StdinPipe()
		if err != nil {
			return err
		}
		stdin = pipe
	}
	if err := command.Start(); err != nil {
		return err
	}
	if stdin != nil {
		go func() {
			// It ends at the latest with the connection. A command that does not read breaks the pipe.
			_, _ = io.Copy(stdin, in)
			_ = stdin.Close()
		}()
	}
	return exited(command.Wait())
}

// inTerminal runs a command in a terminal of its own, which has one output.
func inTerminal(command *exec.Cmd, in io.Reader, out io.WriteCloser,
	resize <-chan remotecommand.TerminalSize) error {
	terminal, err := pty.Start(command)
	if err != nil {
		return err
	}
	defer terminal.Close()
	if resize != nil {
		go func() {
			// The channel is closed with the connection. Once the command has ended, sizes have no effect.
			for size := range resize {
				_ = pty.Setsize(terminal, &pty.Winsize{Rows: size.Height, Cols: size.Width})
			}
		}()
	}
	if in != nil {
		go func() { _, _ = io.Copy(terminal, in) }()
	}
	if out != nil {
		defer out.Close()
		// Reading a terminal fails once every process in it has ended.
		_, _ = io.Copy(out, terminal)
	}
	return exited(command.Wait())
}

// exited tells the test that a command has ended, and returns its exit code as the client expects it.
func exited(err error) error {
	report("a command has ended")
	if ended := (*exec.ExitError)(nil); errors.As(err, &ended) {
		// A process that a signal has ended has no exit code; shells report at least 128 then.
		code := ended.ExitCode()
		if code < 0 {
			code = 128
		}
		return utilexec.CodeExitError{Err: ended, Code: code}
	}
	return err
}

// AttachContainer starts what stands for the main process of a container.
func (k *kubelet) AttachContainer(ctx context.Context, pod, uid, container string, in io.Reader,
	out, errOut io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize) error {
	return k.ExecInContainer(ctx, pod, uid, container, mainProcess, in, out, errOut, tty, resize, 0)
}

// PortForward connects a stream with a port of 127.0.0.1, until the port's side has ended.
func (k *kubelet) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return err
	}
	defer conn.Close()
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return errors.New("dialing TCP gave another kind of connection")
	}
	go func() {
		if _, err := io.Copy(tcp, stream); err == nil {
			// The client has nothing more to say, and still listens.
			_ = tcp.CloseWrite()
		} else {
			_ = tcp.Close()
		}
	}()
	_, err = io.Copy(stream, tcp)
	return err
}

// logs serves the file NAMESPACE_POD_CONTAINER.log; with follow=true until the client leaves.
func (k *kubelet) logs(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("namespace") + "_" + r.PathValue("pod") + "_" + r.PathValue("container") + ".log"
	if filepath.Base(name) != name {
		http.Error(w, "this is no name of a container", http.StatusBadRequest)
		return
	}
	file, err := os.Open(filepath.Join(k.root, name))
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	defer file.Close()
	follow := r.URL.Query().Get("follow") == "true"
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(w)
	for {
		_, err := io.Copy(w, file)
		if err == nil {
			err = flusher.Flush()
		}
		if !follow {
			return
		}
		if err == nil {
			select {
			case <-r.Context().Done():
				err = r.Context().Err()
			case <-time.After(followInterval):
			}
		}
		if err != nil {
			report("the client stopped following a log", "file", name)
			return
		}
	}
}
