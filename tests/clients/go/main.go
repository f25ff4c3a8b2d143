// Calls kas like any Go program: with grpc-go, and messages that are built from proto/ at run time.
//
// The plan arrives as JSON on standard input. It prints each passed check, and exits with 0 if all passed.
package main

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bufbuild/protocompile"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
)

// within is the timeout of any call.
const within = 20 * time.Second

type plan struct {
	API     string            `json:"api"`
	Agent   string            `json:"agent"`
	Token   string            `json:"token"`
	Proto   string            `json:"proto"`
	Issuer  string            `json:"issuer"`
	Tokens  []tokenCase       `json:"tokens"`
	Secrets map[string][]byte `json:"secrets"`
}

// tokenCase is a valid token or, with a message, an invalid one.
type tokenCase struct {
	What    string         `json:"what"`
	Alg     string         `json:"alg"`
	Claims  map[string]any `json:"claims"`
	Exp     *int64         `json:"exp"`
	Nbf     *int64         `json:"nbf"`
	Secret  string         `json:"secret"`
	Scheme  *string        `json:"scheme"`
	Times   *int           `json:"times"`
	Message string         `json:"message"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	var plan plan
	if err := json.NewDecoder(os.Stdin).Decode(&plan); err != nil {
		return err
	}
	schema, err := compile(plan.Proto)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient(plan.API, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	c := client{plan: plan, schema: schema, conn: conn}
	c.token = "bearer " + c.sign(tokenCase{})
	for _, part := range []struct {
		name  string
		check func() error
	}{
		{"kas_api", c.kasAPI},
		{"gitlab", c.gitlab},
		{"passed_on", c.passedOn},
		{"reflection_and_health", c.reflectionAndHealth},
		{"headers", c.headers},
	} {
		if err := part.check(); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		fmt.Println(part.name, "ok")
	}
	for _, token := range plan.Tokens {
		if err := c.tokenCase(token); err != nil {
			return fmt.Errorf("%s: %w", token.What, err)
		}
	}
	fmt.Println("tokens ok", len(plan.Tokens))
	return nil
}

// methods of every service in proto/, by their full path.
type methods map[string]protoreflect.MethodDescriptor

func compile(folder string) (methods, error) {
	var files []string
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".proto") {
			var name string
			name, err = filepath.Rel(folder, path)
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	sources := &protocompile.SourceResolver{ImportPaths: []string{folder}}
	compiler := protocompile.Compiler{Resolver: protocompile.WithStandardImports(sources)}
	compiled, err := compiler.Compile(context.Background(), files...)
	if err != nil {
		return nil, err
	}
	all := methods{}
	for _, file := range compiled {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				method := service.Methods().Get(j)
				all[fmt.Sprintf("/%s/%s", service.FullName(), method.Name())] = method
			}
		}
	}
	return all, nil
}

type client struct {
	plan   plan
	schema methods
	conn   *grpc.ClientConn
	token  string
}

// sign returns a token in the format of GitLab (lib/json_web_token), with the changes of a case.
func (c *client) sign(of tokenCase) string {
	now := time.Now().Unix()
	or := func(value *int64, otherwise int64) int64 {
		if value != nil {
			return now + *value
		}
		return now + otherwise
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id)
	claims := map[string]any{
		"jti": hex.EncodeToString(id), "aud": "gitlab-kas", "iss": c.plan.Issuer,
		"iat": now, "nbf": or(of.Nbf, -5), "exp": or(of.Exp, 60),
	}
	maps.Copy(claims, of.Claims)
	maps.DeleteFunc(claims, func(_ string, value any) bool { return value == nil })
	alg := of.Alg
	if alg == "" {
		alg = "HS256"
	}
	part := func(value any) string {
		data, _ := json.Marshal(value)
		return base64.RawURLEncoding.EncodeToString(data)
	}
	text := part(map[string]string{"alg": alg, "typ": "JWT"}) + "." + part(claims)
	if alg == "none" {
		return text + "."
	}
	secret := of.Secret
	if secret == "" {
		secret = "new"
	}
	digest := map[string]func() hash.Hash{"HS384": sha512.New384, "HS512": sha512.New}[alg]
	if digest == nil {
		digest = sha256.New
	}
	mac := hmac.New(digest, c.plan.Secrets[secret])
	mac.Write([]byte(text))
	return text + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

func outgoing(pairs ...string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	return metadata.AppendToOutgoingContext(ctx, pairs...), cancel
}

// message builds the request of a method from JSON.
func (c *client) message(path, text string) (protoreflect.MethodDescriptor, proto.Message, error) {
	method := c.schema[path]
	if method == nil {
		return nil, nil, fmt.Errorf("proto/ has no %s", path)
	}
	request := dynamicpb.NewMessage(method.Input())
	return method, request, protojson.Unmarshal([]byte(text), request)
}

// call makes a unary call with a message in JSON, and returns the decoded response.
func (c *client) call(ctx context.Context, path, text string) (map[string]any, error) {
	method, request, err := c.message(path, text)
	if err != nil {
		return nil, err
	}
	response := dynamicpb.NewMessage(method.Output())
	if err := c.conn.Invoke(ctx, path, request, response); err != nil {
		return nil, err
	}
	return asJSON(response)
}

func asJSON(message proto.Message) (map[string]any, error) {
	data, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
	if err != nil {
		return nil, err
	}
	var value map[string]any
	return value, json.Unmarshal(data, &value)
}

// own makes a call with the client's token.
func (c *client) own(path, text string, pairs ...string) (map[string]any, error) {
	ctx, cancel := outgoing(append(pairs, "authorization", c.token)...)
	defer cancel()
	return c.call(ctx, path, text)
}

// refused is nil if err has this code and this message.
func refused(err error, code codes.Code, text string) error {
	if said := status.Convert(err); err == nil || said.Code() != code || !strings.Contains(said.Message(), text) {
		return fmt.Errorf("%v %q expected, got %v", code, text, err)
	}
	return nil
}

func list(value map[string]any, key string) []map[string]any {
	items, _ := value[key].([]any)
	var all []map[string]any
	for _, item := range items {
		object, _ := item.(map[string]any)
		all = append(all, object)
	}
	return all
}

func want(what string, holds bool, got any) error {
	if holds {
		return nil
	}
	return fmt.Errorf("%s: %v", what, got)
}

const (
	kas     = "/kas.api.v1.KasApi/"
	tracker = "/gitlab.agent.agent_tracker.rpc.AgentTracker/"
	request = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest"
)

func (c *client) kasAPI() error {
	for _, call := range [][2]string{
		{"ConnectedAgentsById", `{"agent_id": 1}`},
		{"ConnectedAgentsForProject", `{"project_id": 1}`},
	} {
		got, err := c.own(kas+call[0], call[1])
		if err != nil {
			return err
		}
		agents := list(got, "agents")
		if err := want(call[0], len(agents) == 1 && agents[0]["id"] == "1", got); err != nil {
			return err
		}
	}
	first, err := c.own(kas+"GetPods", `{"agent_id": 1, "page_size": 5}`)
	if err != nil {
		return err
	}
	token, _ := json.Marshal(first["next_page_token"])
	rest, err := c.own(kas+"GetPods", fmt.Sprintf(`{"agent_id": 1, "page_token": %s}`, token))
	if err != nil {
		return err
	}
	pods := append(list(first, "pods"), list(rest, "pods")...)
	named := slices.ContainsFunc(pods, func(pod map[string]any) bool { return pod["name"] == "web-1" })
	if err := want("pods in pages", len(list(first, "pods")) == 5 && len(pods) >= 12 && named, pods); err != nil {
		return err
	}
	replicas, err := c.own(kas+"ListReplicas", `{}`)
	if err != nil {
		return err
	}
	known := list(replicas, "replicas")
	if err := want("one replica", len(known) == 1 && known[0]["standing"] == "self", replicas); err != nil {
		return err
	}
	told, err := c.own(kas+"ExplainAgent", `{"agent_id": 1}`)
	if err != nil {
		return err
	}
	if err := want("how a request would go", strings.Contains(fmt.Sprint(told["route"]), "idle tunnels here"), told); err != nil {
		return err
	}
	if err := c.watch(); err != nil {
		return err
	}
	_, err = c.own(kas+"GetPods", `{"agent_id": 0}`)
	if err := refused(err, codes.InvalidArgument, "agent_id: "); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second/2)
	defer cancel()
	_, err = c.call(metadata.AppendToOutgoingContext(ctx, "authorization", c.token), kas+"GetPods", `{"agent_id": 2}`)
	return refused(err, codes.DeadlineExceeded, "")
}

func (c *client) watch() error {
	path := kas + "WatchConnectedAgents"
	method, message, err := c.message(path, `{"agent_id": 1}`)
	if err != nil {
		return err
	}
	ctx, cancel := outgoing("authorization", c.token)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path)
	if err != nil {
		return err
	}
	if err := errors.Join(stream.SendMsg(message), stream.CloseSend()); err != nil {
		return err
	}
	for _, expected := range []string{"connected", "snapshot_complete"} {
		event := dynamicpb.NewMessage(method.Output())
		if err := stream.RecvMsg(event); err != nil {
			return err
		}
		got, err := asJSON(event)
		if err != nil {
			return err
		}
		if _, is := got[expected]; !is {
			return fmt.Errorf("%s expected, got %v", expected, got)
		}
	}
	return nil
}

func (c *client) gitlab() error {
	// The feature flags of current GitLab.
	flag := []string{"kas-feature-a-flag", "true"}
	for method, message := range map[string]string{
		"GetConnectedAgents":            `{"agent_id": 1}`,
		"GetConnectedAgentsByAgentIDs":  `{"agent_ids": [1, 2]}`,
		"GetConnectedAgentksByAgentIDs": `{"agent_ids": [2, 1]}`,
	} {
		got, err := c.own(tracker+method, message, flag...)
		if err != nil {
			return fmt.Errorf("%s: %w", method, err)
		}
		agents := list(got, "agents")
		if err := want(method, len(agents) == 1 && agents[0]["agent_id"] == "1", got); err != nil {
			return err
		}
	}
	_, err := c.own(tracker+"GetConnectedAgents", `{}`, flag...)
	if err := refused(err, codes.InvalidArgument, "value is required"); err != nil {
		return err
	}
	info, err := c.own("/gitlab.agent.server_info.rpc.ServerInfo/GetServerInfo", `{}`, flag...)
	if err != nil {
		return err
	}
	if err := want("which kas", strings.Contains(fmt.Sprint(info["current_server_info"]), "version:v"), info); err != nil {
		return err
	}
	push := `{"event": {"project": {"id": 1, "full_path": "a/b"}}}`
	_, err = c.own("/gitlab.agent.notifications.rpc.Notifications/GitPushEvent", push, flag...)
	return err
}

// makeRequest sends a complete request, and passes the response messages to take until it returns false.
func (c *client) makeRequest(header string, pairs []string, take func(map[string]any) bool) error {
	method := c.schema[request]
	ctx, cancel := outgoing(append(pairs, "authorization", c.token)...)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, request)
	if err != nil {
		return err
	}
	for _, text := range []string{header, `{"trailer": {}}`} {
		_, message, err := c.message(request, text)
		if err != nil {
			return err
		}
		// The received status shows the error.
		if err := stream.SendMsg(message); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		message := dynamicpb.NewMessage(method.Output())
		if err := stream.RecvMsg(message); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		got, err := asJSON(message)
		if err != nil {
			return err
		}
		if !take(got) {
			return nil
		}
	}
}

// passedOn is MakeRequest: a complete response, and one that continues until the caller cancels.
func (c *client) passedOn() error {
	toAgent := []string{"kas-agent-id", "1"}
	var kinds []string
	var body []byte
	collect := func(got map[string]any) bool {
		kinds = append(kinds, slices.Collect(maps.Keys(got))...)
		if data, is := got["data"].(map[string]any); is {
			text, _ := data["data"].(string)
			piece, _ := base64.StdEncoding.DecodeString(text)
			body = append(body, piece...)
		}
		return strings.Count(string(body), "\n") < 13
	}
	head := `{"header": {"request": {"method": "GET", "url_path": "/version"}, "content_length": "0"}}`
	if err := c.makeRequest(head, toAgent, collect); err != nil {
		return err
	}
	last := len(kinds) - 1
	if err := want("in order", last >= 2 && kinds[0] == "header" && kinds[last] == "trailer", kinds); err != nil {
		return err
	}
	var version map[string]any
	if err := json.Unmarshal(body, &version); err != nil || version["platform"] != "demo" {
		return fmt.Errorf("body: %s", body)
	}
	kinds, body = nil, nil
	watch := `{"header": {"request": {"method": "GET", "url_path": "/api/v1/pods", "query": {"watch": {"value": ["true"]}}}}}`
	if err := c.makeRequest(watch, toAgent, collect); err != nil {
		return err
	}
	if err := want("pods, then an event of a moment ago", strings.Contains(string(body), `"ADDED"`) && !slices.Contains(kinds, "trailer"), kinds); err != nil {
		return err
	}
	// An unknown type of HeaderExtra is refused.
	header := c.schema[request].Input().Fields().ByName("header").Message()
	message := dynamicpb.NewMessage(header)
	extra := message.Mutable(header.Fields().ByName("extra")).Message()
	extra.Set(extra.Descriptor().Fields().ByName("type_url"), protoreflect.ValueOfString("type.googleapis.com/unknown.Extra"))
	ctx, cancel := outgoing("authorization", c.token, "kas-agent-id", "1")
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, request)
	if err != nil {
		return err
	}
	first := dynamicpb.NewMessage(c.schema[request].Input())
	first.Set(first.Descriptor().Fields().ByName("header"), protoreflect.ValueOfMessage(message))
	_ = stream.SendMsg(first)
	if err := refused(stream.RecvMsg(dynamicpb.NewMessage(c.schema[request].Output())), codes.InvalidArgument, "extra is of a type"); err != nil {
		return err
	}
	err = c.makeRequest(head, nil, collect)
	return refused(err, codes.Unimplemented, "kas-agent-id")
}

func (c *client) reflectionAndHealth() error {
	ctx, cancel := outgoing()
	defer cancel()
	// Without a token.
	health := healthpb.NewHealthClient(c.conn)
	got, err := health.Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if err := want("health", got.Status == healthpb.HealthCheckResponse_SERVING, got); err != nil {
		return err
	}
	watch, err := health.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return err
	}
	if got, err := watch.Recv(); err != nil || got.Status != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("health, watched: %v, %w", got, err)
	}
	_, err = health.Check(ctx, &healthpb.HealthCheckRequest{Service: "x"})
	if err := refused(err, codes.NotFound, ""); err != nil {
		return err
	}
	with, cancel := outgoing("authorization", c.token)
	defer cancel()
	reflection, err := reflectionpb.NewServerReflectionClient(c.conn).ServerReflectionInfo(with)
	if err != nil {
		return err
	}
	ask := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}
	if err := reflection.Send(ask); err != nil {
		return err
	}
	answer, err := reflection.Recv()
	if err != nil {
		return err
	}
	names := fmt.Sprint(answer.GetListServicesResponse())
	for _, name := range []string{"kas.api.v1.KasApi", "gitlab.agent.agent_tracker.rpc.AgentTracker", "grpc.health.v1.Health"} {
		if err := want("listed", strings.Contains(names, name), names); err != nil {
			return err
		}
	}
	ask.MessageRequest = &reflectionpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "kas.api.v1.KasApi"}
	if err := reflection.Send(ask); err != nil {
		return err
	}
	answer, err = reflection.Recv()
	if err != nil {
		return err
	}
	files := answer.GetFileDescriptorResponse().GetFileDescriptorProto()
	described := slices.ContainsFunc(files, func(file []byte) bool { return strings.Contains(string(file), "WatchConnectedAgents") })
	if err := want("described", described, len(files)); err != nil {
		return err
	}
	without, err := reflectionpb.NewServerReflectionClient(c.conn).ServerReflectionInfo(ctx)
	if err != nil {
		return err
	}
	_, err = without.Recv()
	return refused(err, codes.Unauthenticated, "Request unauthenticated with bearer")
}

// headers that are too large: kas explains them up to twice the limit; above that, grpc-go refuses to send them.
func (c *client) headers() error {
	agents, err := grpc.NewClient(c.plan.Agent, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer agents.Close()
	large := func(count, size int) []string {
		return slices.Repeat([]string{"x-large", strings.Repeat("x", size<<10)}, count)
	}
	own := func(pairs []string) error {
		_, err := c.own(tracker+"GetConnectedAgents", `{"agent_id": 1}`, pairs...)
		return err
	}
	passedOn := func(pairs []string) error {
		ctx, cancel := outgoing(append(pairs, "authorization", c.token, "kas-agent-id", "1")...)
		defer cancel()
		stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, request)
		if err != nil {
			return err
		}
		return stream.RecvMsg(dynamicpb.NewMessage(c.schema[request].Output()))
	}
	register := func(pairs []string) error {
		const path = "/gitlab.agent.agent_registrar.rpc.AgentRegistrar/Register"
		method, message, err := c.message(path, `{"pod_id": 7}`)
		if err != nil {
			return err
		}
		ctx, cancel := outgoing(append(pairs, "authorization", "Bearer "+c.plan.Token)...)
		defer cancel()
		return agents.Invoke(ctx, path, message, dynamicpb.NewMessage(method.Output()))
	}
	for _, one := range []struct {
		call    func([]string) error
		answers bool
	}{{own, true}, {passedOn, false}, {register, true}} {
		if one.answers {
			if err := one.call(large(1, 14)); err != nil {
				return err
			}
		}
		// The last is a list of many small values.
		for _, pairs := range [][]string{large(1, 17), large(1, 31), large(20, 1)} {
			if err := refused(one.call(pairs), codes.ResourceExhausted, "at most 16384 are accepted here"); err != nil {
				return err
			}
		}
		if err := refused(one.call(large(1, 40)), codes.Internal, "violates the maximum size"); err != nil {
			return err
		}
		// The connection still works.
		if one.answers {
			if err := one.call(nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// tokenCase calls a method of kas and a forwarded one, both with the same token.
func (c *client) tokenCase(of tokenCase) error {
	scheme, times := "Bearer", 1
	if of.Scheme != nil {
		scheme = *of.Scheme
	}
	if of.Times != nil {
		times = *of.Times
	}
	var pairs []string
	value := strings.TrimLeft(scheme+" "+c.sign(of), " ")
	for range times {
		pairs = append(pairs, "authorization", value)
	}
	ctx, cancel := outgoing(pairs...)
	defer cancel()
	got, err := c.call(ctx, tracker+"GetConnectedAgents", `{"agent_id": 1}`)
	if of.Message == "" {
		if err != nil {
			return err
		}
		return want("connected", len(list(got, "agents")) == 1, got)
	}
	exactly := func(err error) error {
		if said := status.Convert(err); said.Code() != codes.Unauthenticated || said.Message() != of.Message {
			return fmt.Errorf("%q expected, got %w", of.Message, err)
		}
		return nil
	}
	if err := exactly(err); err != nil {
		return err
	}
	stream, err := c.conn.NewStream(metadata.AppendToOutgoingContext(ctx, "kas-agent-id", "1"), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, request)
	if err != nil {
		return err
	}
	return exactly(stream.RecvMsg(dynamicpb.NewMessage(c.schema[request].Output())))
}
