// The CustomResourceDefinitions that the charts' optional objects and deploy/chaos-mesh need. Nothing here is compiled: go fetches the modules
// and checks them against go.sum.
module kas.test/crds

go 1.26.0

require (
	github.com/chaos-mesh/chaos-mesh v0.9.1-0.20260902003049-47411975a8cb // Go cannot name its releases v2.x
	github.com/prometheus-operator/prometheus-operator v0.68.0
	sigs.k8s.io/gateway-api v1.4.1
)
