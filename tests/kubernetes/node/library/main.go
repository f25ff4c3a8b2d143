// Command library does through kas what programs do with client-go: reads, writes, server-side apply, an
// informer, logs, exec and port-forward. It checks every result, names each part that has passed, and fails at
// the first that does not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// within is the time limit for everything together.
const within = 40 * time.Second

// client has what every part needs.
type client struct {
	config    *rest.Config
	set       *kubernetes.Clientset
	namespace string
	pod       string
	// The file that is the log of the pod.
	log string
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig of kas")
	namespace := flag.String("namespace", "", "the namespace of the objects")
	pod := flag.String("pod", "", "a pod that runs")
	logFile := flag.String("log", "", "the file that is its log")
	flag.Parse()
	if err := run(*kubeconfig, *namespace, *pod, *logFile); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, namespace, pod, logFile string) error {
	if namespace == "" || pod == "" || logFile == "" {
		return errors.New("-namespace, -pod and -log are needed")
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 200, 200
	config.UserAgent = "library"
	// As controllers do; what cannot be protobuf is JSON.
	typed := rest.CopyConfig(config)
	typed.ContentType = runtime.ContentTypeProtobuf
	typed.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	set, err := kubernetes.NewForConfig(typed)
	if err != nil {
		return err
	}
	c := &client{config: config, set: set, namespace: namespace, pod: pod, log: logFile}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	for _, part := range []struct {
		name  string
		check func(context.Context) error
	}{
		{"discovery", c.discovers},
		{"objects", c.writesAndReads},
		{"pages", c.readsPages},
		{"apply", c.applies},
		{"informer", c.observes},
		{"logs", c.followsLogs},
		{"exec by websocket", c.execsByWebSocket},
		{"exec by spdy", c.execsBySPDY},
		{"exec with fallback", c.execsWithFallback},
		{"terminal", c.execsInTerminal},
		{"port-forward by websocket", c.forwardsByWebSocket},
		{"port-forward by spdy", c.forwardsBySPDY},
	} {
		if err := part.check(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		fmt.Println(part.name, "ok")
	}
	return nil
}

func (c *client) configMaps() typedcorev1.ConfigMapInterface {
	return c.set.CoreV1().ConfigMaps(c.namespace)
}

func configMap(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"of": "library"}},
		Data:       map[string]string{"key": value},
	}
}

func (c *client) discovers(context.Context) error {
	version, err := c.set.Discovery().ServerVersion()
	if err != nil {
		return err
	}
	if version.Major != "1" {
		return fmt.Errorf("version %v", version)
	}
	lists, err := c.set.Discovery().ServerPreferredResources()
	if err != nil {
		return err
	}
	if len(lists) < 10 {
		return fmt.Errorf("%d groups of resources", len(lists))
	}
	return nil
}

// writesAndReads creates, changes and deletes an object, and gets the errors that client-go knows.
func (c *client) writesAndReads(ctx context.Context) error {
	maps := c.configMaps()
	created, err := maps.Create(ctx, configMap("object", "one"), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if _, err := maps.Create(ctx, configMap("object", "one"), metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("created twice: %w", err)
	}
	changed := created.DeepCopy()
	changed.Data["key"] = "two"
	if changed, err = maps.Update(ctx, changed, metav1.UpdateOptions{}); err != nil {
		return err
	}
	if _, err := maps.Update(ctx, created, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		return fmt.Errorf("an old version was written: %w", err)
	}
	for _, patch := range []struct {
		kind types.PatchType
		data string
		want string
	}{
		{types.MergePatchType, `{"data":{"key":"three"}}`, "three"},
		{types.StrategicMergePatchType, `{"data":{"key":"four"}}`, "four"},
		{types.JSONPatchType, `[{"op":"replace","path":"/data/key","value":"five"}]`, "five"},
	} {
		patched, err := maps.Patch(ctx, "object", patch.kind, []byte(patch.data), metav1.PatchOptions{})
		if err != nil {
			return fmt.Errorf("%s: %w", patch.kind, err)
		}
		if patched.Data["key"] != patch.want {
			return fmt.Errorf("%s: %v", patch.kind, patched.Data)
		}
	}
	read, err := maps.Get(ctx, "object", metav1.GetOptions{})
	if err != nil {
		return err
	}
	if read.UID != changed.UID || read.Data["key"] != "five" {
		return fmt.Errorf("read %v", read)
	}
	if err := maps.Delete(ctx, "object", metav1.DeleteOptions{}); err != nil {
		return err
	}
	if _, err := maps.Get(ctx, "object", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return fmt.Errorf("read after it was deleted: %w", err)
	}
	return nil
}

// readsPages lists five objects, two at a time.
func (c *client) readsPages(ctx context.Context) error {
	maps := c.configMaps()
	for n := range 5 {
		if _, err := maps.Create(ctx, configMap("page-"+strconv.Itoa(n), ""), metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	var pages, names []string
	options := metav1.ListOptions{LabelSelector: "of in (library, other)", Limit: 2}
	for {
		page, err := maps.List(ctx, options)
		if err != nil {
			return err
		}
		pages = append(pages, strconv.Itoa(len(page.Items)))
		for _, item := range page.Items {
			names = append(names, item.Name)
		}
		if options.Continue = page.Continue; options.Continue == "" {
			break
		}
	}
	if got := strings.Join(pages, " "); got != "2 2 1" {
		return fmt.Errorf("pages of %s: %v", got, names)
	}
	options = metav1.ListOptions{LabelSelector: "of=library"}
	return maps.DeleteCollection(ctx, metav1.DeleteOptions{}, options)
}

// applies writes an object as one owner of its field, and then as another one.
func (c *client) applies(ctx context.Context) error {
	maps := c.configMaps()
	apply := func(owner, value string, force bool) (*corev1.ConfigMap, error) {
		object := applycorev1.ConfigMap("applied", c.namespace).WithData(map[string]string{"key": value})
		return maps.Apply(ctx, object, metav1.ApplyOptions{FieldManager: owner, Force: force})
	}
	if _, err := apply("one", "first", false); err != nil {
		return err
	}
	_, err := apply("two", "second", false)
	if !apierrors.IsConflict(err) || !strings.Contains(err.Error(), `conflict with "one"`) {
		return fmt.Errorf("another owner wrote it: %w", err)
	}
	taken, err := apply("two", "second", true)
	if err != nil {
		return err
	}
	owns := func(entry metav1.ManagedFieldsEntry) bool {
		return entry.Operation == metav1.ManagedFieldsOperationApply &&
			strings.Contains(string(entry.FieldsV1.Raw), `"f:key"`)
	}
	var owners []string
	for _, entry := range taken.ManagedFields {
		if owns(entry) {
			owners = append(owners, entry.Manager)
		}
	}
	if taken.Data["key"] != "second" || strings.Join(owners, " ") != "two" {
		return fmt.Errorf("%v is owned by %v", taken.Data, owners)
	}
	return maps.Delete(ctx, "applied", metav1.DeleteOptions{})
}

// observes keeps a copy with an informer, and sees each change of an object.
func (c *client) observes(ctx context.Context) error {
	maps := c.configMaps()
	if _, err := maps.Create(ctx, configMap("before", "0"), metav1.CreateOptions{}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	factory := informers.NewSharedInformerFactoryWithOptions(c.set, 0, informers.WithNamespace(c.namespace),
		informers.WithTweakListOptions(func(options *metav1.ListOptions) { options.LabelSelector = "of=library" }))
	defer func() {
		// Shutdown waits for the informer.
		cancel()
		factory.Shutdown()
	}()
	informer := factory.Core().V1().ConfigMaps()
	// More than there are changes: the informer never waits for the reader below.
	events := make(chan string, 16)
	saw := func(what string, object any) {
		if tombstone, ok := object.(cache.DeletedFinalStateUnknown); ok {
			object = tombstone.Obj
		}
		if object, ok := object.(*corev1.ConfigMap); ok {
			events <- what + " " + object.Name + " " + object.Data["key"]
		}
	}
	if _, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { saw("added", object) },
		UpdateFunc: func(_, object any) { saw("changed", object) },
		DeleteFunc: func(object any) { saw("deleted", object) },
	}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.Informer().HasSynced) {
		return errors.New("there is no copy")
	}
	next := func(want string) error {
		select {
		case got := <-events:
			if got != want {
				return fmt.Errorf("%q instead of %q", got, want)
			}
			return nil
		case <-ctx.Done():
			return fmt.Errorf("no event %q", want)
		}
	}
	if err := next("added before 0"); err != nil {
		return err
	}
	object, err := maps.Create(ctx, configMap("after", "1"), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if err := next("added after 1"); err != nil {
		return err
	}
	object.Data["key"] = "2"
	if _, err := maps.Update(ctx, object, metav1.UpdateOptions{}); err != nil {
		return err
	}
	if err := next("changed after 2"); err != nil {
		return err
	}
	copied, err := informer.Lister().ConfigMaps(c.namespace).Get("after")
	if err != nil {
		return err
	}
	if copied.Data["key"] != "2" {
		return fmt.Errorf("the copy is %v", copied.Data)
	}
	if err := maps.DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: "of=library"}); err != nil {
		return err
	}
	deleted := map[string]bool{"deleted after 2": true, "deleted before 0": true}
	for range 2 {
		select {
		case got := <-events:
			if !deleted[got] {
				return fmt.Errorf("%q instead of %v", got, deleted)
			}
			delete(deleted, got)
		case <-ctx.Done():
			return fmt.Errorf("no event %v", deleted)
		}
	}
	return nil
}
