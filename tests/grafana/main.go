// Grafana's own data source for Prometheus, without Grafana around it: asks what dashboards and the form of the
// data source ask, and prints what Grafana would show.
//
// Standard input is one JSON object, see request. Standard output is one JSON object: an entry for each
// question, by its name.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"time"

	"github.com/grafana/grafana-plugin-sdk-go/backend"
	"github.com/grafana/grafana-plugin-sdk-go/backend/log"
	"github.com/grafana/grafana-plugin-sdk-go/data"
	"github.com/grafana/grafana/pkg/promlib"
)

type request struct {
	// URL and Token are those of the data source; Method is its HTTP method.
	URL, Token, Method string
	// From and To are the time of the dashboard, in seconds.
	From, To int64
	// Expressions are panels.
	Expressions []string
	// Resources are what the query editor and variables ask.
	Resources []resource
}

type resource struct{ Method, Path, Query, Body string }

type series struct {
	Labels map[string]string `json:"labels"`
	Points [][2]any          `json:"points"`
}

type answer struct {
	Error   string   `json:"error,omitempty"`
	Status  int      `json:"status"`
	Series  []series `json:"series"`
	Notices []string `json:"notices"`
}

// number is a value as JSON can have it.
func number(value float64) string { return fmt.Sprint(value) }

// taken returns the series and notices of frames, in a fixed order.
func taken(response backend.DataResponse) answer {
	told := answer{Status: int(response.Status), Series: []series{}, Notices: []string{}}
	if response.Error != nil {
		told.Error = response.Error.Error()
	}
	for _, frame := range response.Frames {
		if frame.Meta != nil {
			for _, notice := range frame.Meta.Notices {
				told.Notices = append(told.Notices, notice.Text)
			}
		}
		var times *data.Field
		for _, field := range frame.Fields {
			if field.Type().Time() {
				times = field
				continue
			}
			one := series{Labels: field.Labels, Points: [][2]any{}}
			for i := range field.Len() {
				value, err := field.NullableFloatAt(i)
				if err != nil || value == nil || times == nil {
					continue
				}
				at, _ := times.ConcreteAt(i)
				one.Points = append(one.Points, [2]any{at.(time.Time).UnixMilli(), number(*value)})
			}
			told.Series = append(told.Series, one)
		}
	}
	key := func(i int) string {
		text, _ := json.Marshal(told.Series[i].Labels)
		return string(text)
	}
	sort.SliceStable(told.Series, func(i, j int) bool { return key(i) < key(j) })
	sort.Strings(told.Notices)
	return told
}

func run() error {
	var asked request
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	ctx := context.Background()
	settings := backend.DataSourceInstanceSettings{
		ID: 1, UID: "kas", Name: "kas", Type: "prometheus", URL: asked.URL, Updated: time.Unix(1, 0),
	}
	options := map[string]string{"httpMethod": asked.Method, "prometheusType": "Prometheus"}
	if asked.Token != "" {
		options["httpHeaderName1"] = "Authorization"
		settings.DecryptedSecureJSONData = map[string]string{"httpHeaderValue1": "Bearer " + asked.Token}
	}
	settings.JSONData, _ = json.Marshal(options)
	plugin := backend.PluginContext{
		OrgID: 1, PluginID: "prometheus", DataSourceInstanceSettings: &settings,
		GrafanaConfig: backend.NewGrafanaCfg(nil),
	}
	service := promlib.NewService(nil, log.DefaultLogger, nil)

	told := map[string]any{}
	health, err := service.CheckHealth(ctx, &backend.CheckHealthRequest{PluginContext: plugin})
	if err != nil {
		return fmt.Errorf("save and test: %w", err)
	}
	told["health"] = map[string]any{
		"status": health.Status.String(), "message": health.Message, "details": json.RawMessage(details(health)),
	}
	span := backend.TimeRange{From: time.Unix(asked.From, 0).UTC(), To: time.Unix(asked.To, 0).UTC()}
	for _, expression := range asked.Expressions {
		for _, kind := range []string{"range", "instant"} {
			model, _ := json.Marshal(map[string]any{
				"refId": "A", "expr": expression, kind: true, "intervalMs": 60_000, "maxDataPoints": 1_000,
				"legendFormat": "__auto",
			})
			query := backend.DataQuery{
				RefID: "A", TimeRange: span, JSON: model, Interval: time.Minute, MaxDataPoints: 1_000,
			}
			response, err := service.QueryData(ctx, &backend.QueryDataRequest{
				PluginContext: plugin, Queries: []backend.DataQuery{query},
			})
			if err != nil {
				return fmt.Errorf("%s of %s: %w", kind, expression, err)
			}
			told[kind+": "+expression] = taken(response.Responses["A"])
		}
	}
	for _, one := range asked.Resources {
		url := one.Path
		if one.Query != "" {
			url += "?" + one.Query
		}
		call := backend.CallResourceRequest{
			PluginContext: plugin, Path: one.Path, Method: one.Method, URL: url, Body: []byte(one.Body),
		}
		sender := backend.CallResourceResponseSenderFunc(func(response *backend.CallResourceResponse) error {
			var body any = string(response.Body)
			if json.Valid(response.Body) {
				body = json.RawMessage(response.Body)
			}
			told[one.Method+" "+url+" "+one.Body] = map[string]any{"status": response.Status, "body": body}
			return nil
		})
		if err := service.CallResource(ctx, &call, sender); err != nil {
			return fmt.Errorf("%s %s: %w", one.Method, url, err)
		}
	}
	return json.NewEncoder(os.Stdout).Encode(told)
}

func details(health *backend.CheckHealthResult) []byte {
	if len(health.JSONDetails) == 0 {
		return []byte("null")
	}
	return health.JSONDetails
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
