// Command informers keeps copies of twenty kinds of objects through kas, as controllers do: with the
// informers of client-go. Meanwhile it changes objects at the API server itself. Asked to end by SIGTERM, it
// compares the copies with the API server, and fails if they do not become equal.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"path"
	"strconv"
	"sync"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// How often an object is changed.
	writeInterval = 50 * time.Millisecond
	// How many objects of each kind that is written there are at most.
	objects = 20
	// How long the copies may take to become equal once nothing changes any more. An informer waits for up to
	// 30 s before it watches again.
	equalWithin = 60 * time.Second
)

// Nothing but this program changes objects of these kinds: there is no controller.
var kinds = []schema.GroupVersionResource{
	{Version: "v1", Resource: "configmaps"},
	{Version: "v1", Resource: "secrets"},
	{Version: "v1", Resource: "serviceaccounts"},
	{Version: "v1", Resource: "pods"},
	{Version: "v1", Resource: "services"},
	{Version: "v1", Resource: "replicationcontrollers"},
	{Version: "v1", Resource: "persistentvolumeclaims"},
	{Version: "v1", Resource: "limitranges"},
	{Version: "v1", Resource: "resourcequotas"},
	{Group: "apps", Version: "v1", Resource: "deployments"},
	{Group: "apps", Version: "v1", Resource: "statefulsets"},
	{Group: "apps", Version: "v1", Resource: "daemonsets"},
	{Group: "apps", Version: "v1", Resource: "replicasets"},
	{Group: "batch", Version: "v1", Resource: "jobs"},
	{Group: "batch", Version: "v1", Resource: "cronjobs"},
	{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"},
	{Group: "networking.k8s.io", Version: "v1", Resource: "ingresses"},
	{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"},
	{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"},
}

// Those of them that need no more than a name.
var written = []schema.GroupVersionResource{
	kinds[0], kinds[1], kinds[2],
	{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"},
}

func main() {
	direct := flag.String("direct", "", "kubeconfig of the API server")
	through := flag.String("through", "", "kubeconfig of kas")
	namespace := flag.String("namespace", "", "the namespace of the objects")
	flag.Parse()
	if err := run(*direct, *through, *namespace); err != nil {
		log.Fatal(err)
	}
}

func run(direct, through, namespace string) error {
	if namespace == "" {
		return errors.New("-namespace is missing")
	}
	server, err := client(direct, nil)
	if err != nil {
		return err
	}
	counts := &lists{byResource: map[string]int{}}
	kas, err := client(through, counts)
	if err != nil {
		return err
	}
	asked, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	background := context.Background()
	factory := dynamicinformer.NewFilteredDynamicSharedInformerFactory(kas, 0, namespace, nil)
	for _, kind := range kinds {
		factory.ForResource(kind)
	}
	factory.Start(background.Done())
	for kind, synced := range factory.WaitForCacheSync(asked.Done()) {
		if !synced {
			return fmt.Errorf("there is no copy of %s", kind.Resource)
		}
	}
	report("synced", nil)
	writes, err := write(asked, server, namespace)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(equalWithin)
	for _, kind := range kinds {
		if err := compare(background, server, factory, kind, namespace, deadline); err != nil {
			return err
		}
	}
	resource, most := counts.most()
	report("the copies are equal", map[string]any{"writes": writes, "most_lists": most, "of": resource})
	return nil
}

// client reads a kubeconfig. counts may be nil.
func client(kubeconfig string, counts *lists) (dynamic.Interface, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 200, 200
	if counts != nil {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return counting{next, counts} })
	}
	return dynamic.NewForConfig(rest.AddUserAgent(config, "informers"))
}

// write changes objects until it is asked to end. Returns how many changes there were.
func write(asked context.Context, server dynamic.Interface, namespace string) (int, error) {
	ticks := time.NewTicker(writeInterval)
	defer ticks.Stop()
	for n := 0; ; n++ {
		select {
		case <-asked.Done():
			return n, nil
		case <-ticks.C:
		}
		kind := written[n%len(written)]
		name := "object-" + strconv.Itoa(n/len(written)%objects)
		// Created, changed and deleted in turns.
		if err := change(server.Resource(kind).Namespace(namespace), name, n/len(written)/objects); err != nil {
			return n, fmt.Errorf("cannot change %s %s: %w", kind.Resource, name, err)
		}
	}
}

func change(objects dynamic.ResourceInterface, name string, round int) error {
	ctx := context.Background()
	switch round % 3 {
	case 0:
		object := &unstructured.Unstructured{}
		object.SetName(name)
		_, err := objects.Create(ctx, object, metav1.CreateOptions{})
		return err
	case 1:
		object, err := objects.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		object.SetLabels(map[string]string{"round": strconv.Itoa(round)})
		_, err = objects.Update(ctx, object, metav1.UpdateOptions{})
		return err
	default:
		return objects.Delete(ctx, name, metav1.DeleteOptions{})
	}
}

// compare waits until the copy of a kind has the same versions of the same objects as the API server.
func compare(ctx context.Context, server dynamic.Interface,
	factory dynamicinformer.DynamicSharedInformerFactory, kind schema.GroupVersionResource, namespace string,
	deadline time.Time) error {
	for {
		list, err := server.Resource(kind).Namespace(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		there := map[string]string{}
		for _, object := range list.Items {
			there[string(object.GetUID())] = object.GetResourceVersion()
		}
		copied, err := factory.ForResource(kind).Lister().List(labels.Everything())
		if err != nil {
			return err
		}
		here := map[string]string{}
		for _, object := range copied {
			object, ok := object.(metav1.Object)
			if !ok {
				return errors.New("a copy is no object")
			}
			here[string(object.GetUID())] = object.GetResourceVersion()
		}
		if maps.Equal(there, here) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: the API server has %v, and the copy %v", kind.Resource, there, here)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// lists counts requests for all objects of a resource.
type lists struct {
	lock       sync.Mutex
	byResource map[string]int
}

func (l *lists) most() (resource string, most int) {
	l.lock.Lock()
	defer l.lock.Unlock()
	for name, count := range l.byResource {
		if count > most {
			resource, most = name, count
		}
	}
	return resource, most
}

type counting struct {
	next  http.RoundTripper
	lists *lists
}

// RoundTrip counts lists, and watches that begin with all objects. Only those that are answered with success
// cost anything.
func (c counting) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := c.next.RoundTrip(request)
	query := request.URL.Query()
	isList := query.Get("watch") != "true" || query.Get("sendInitialEvents") == "true"
	if err == nil && response.StatusCode == http.StatusOK && isList {
		c.lists.lock.Lock()
		c.lists.byResource[path.Base(request.URL.Path)]++
		c.lists.lock.Unlock()
	}
	return response, err
}

// report writes a line for the test to standard error.
func report(message string, fields map[string]any) {
	line := map[string]any{"message": message}
	maps.Copy(line, fields)
	// Numbers and texts always encode, and the test reads until this process has ended.
	_ = json.NewEncoder(os.Stderr).Encode(line)
}
