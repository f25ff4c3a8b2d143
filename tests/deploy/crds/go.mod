// The CustomResourceDefinitions that the charts' optional objects need. Nothing here is compiled: go fetches the modules
// and checks them against go.sum.
module kas.test/crds

go 1.26.0

require (
	github.com/prometheus-operator/prometheus-operator v0.68.0
	sigs.k8s.io/gateway-api v1.4.1
)
