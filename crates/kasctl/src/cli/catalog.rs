//! Arguments of `components` and `apps`.

use clap::Args;

pub(super) const COMPONENTS_HELP: &str = "\
Examples:
  kasctl components all
  kasctl components 'name=prod-*' -n monitoring
  kasctl components all -o json | jq -r '.agents[] | select(any(.components[]; .name == \"prometheus\")).id'

Known software: Prometheus, Flux, Argo CD, cert-manager, ingress controllers, Gateway API, meshes, Trivy, policy \
engines, KEDA; components.files of kas may name others. kas keeps what it has read for 10 min. What could not be read \
is named on standard error, and the exit code is 6.

JSON is stable: fields may be added, but are not changed or removed.
  {\"agents\": [{\"id\", \"name\", \"components\": [{\"name\", \"namespace\", \"version\", \"version_from\", \"workloads\",
   \"apis\", \"service\"}], \"missing\"}], \"unanswered\": [{\"id\", \"name\", \"reason\"}]}";

pub(super) const APPS_HELP: &str = "\
Examples:
  kasctl apps all
  kasctl apps project=3 -n shop
  kasctl apps all -o json | jq -r '.agents[].applications[] | select(.name == \"redis\").version'

Applications are found by objects of app.k8s.io, Flux and Argo CD, by the recommended labels of workloads, and by \
releases of Helm if kas.yaml of the agent has applications: {helm: true}. kas keeps what it has read for 10 min. What \
could not be read is named on standard error, and the exit code is 6.

JSON is stable: fields may be added, but are not changed or removed.
  {\"agents\": [{\"id\", \"name\", \"applications\": [{\"namespace\", \"instance\", \"name\", \"version\", \"version_by\",
   \"by\", \"status\"}], \"missing\"}], \"unanswered\": [{\"id\", \"name\", \"reason\"}]}";

/// Arguments of `components` and `apps`.
#[derive(Debug, Args)]
pub(crate) struct CatalogArgs {
    /// Which agents: all, or id=7|9, project=3, name=prod-* and labels, joined by commas
    #[arg(value_name = "SELECTOR")]
    pub(crate) agents: String,
    /// Only this namespace; may be repeated [default: all]
    #[arg(short, long = "namespace", value_name = "NAMESPACE")]
    pub(crate) namespaces: Vec<String>,
}
