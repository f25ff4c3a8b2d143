//! Seeds from the EndpointSlices of a headless Kubernetes Service.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    pin::pin,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, Client, Config,
    runtime::watcher::{self, DefaultBackoff, Event, watcher},
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    Discovery, DiscoveryError, Health,
    health::{FailureKind, Publisher},
};

/// The label of a slice with the name of its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// How long one watch request lasts, in seconds; the next one continues where it ended. A connection that
/// died silently is noticed 5 s after that. A shorter time notices it earlier, and costs the API server more
/// requests from each replica.
const WATCH_SECONDS: u32 = 60;

/// How long a connection may be silent. Longer than a watch lasts, since a watch without changes is silent.
const SILENT_FOR: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);

/// How long a connection to the API server may take, TLS included.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// How long a watch must last after a failure until the failure is considered over. A successful list does
/// not prove it: the rules may allow to list but not to watch, so that lookups would succeed and fail in
/// turn.
const PROVEN_AFTER: Duration = Duration::from_secs(1);

/// The wait between two attempts if the backoff returned none, which cannot happen.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Which port of an endpoint to use.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PortSelector {
    /// This port on every address, whatever the Service declares.
    Number(u16),
    /// The port with this name in the Service. Its number may differ between slices, for example during a
    /// rollout that changes it.
    Name(String),
}

/// Finds replicas as the endpoints of a headless Service.
///
/// Needs `get`, `list` and `watch` of `endpointslices` in one namespace:
///
/// ```yaml
/// kind: Role
/// rules:
/// - apiGroups: [discovery.k8s.io]
///   resources: [endpointslices]
///   verbs: [get, list, watch]
/// ```
///
/// Endpoints are used whether they are ready or not, and the Service should set `publishNotReadyAddresses:
/// true`. Otherwise replicas that start together never find each other, as each waits for the others to be
/// ready.
///
/// While the API server cannot be reached, or refuses, the last seeds are kept. It is asked again after 0.8
/// s, then at increasing intervals up to a minute. Missing rules may be added meanwhile; `run` does not
/// return because of them. A Service without endpoints, however, is an answer: the set becomes empty.
#[derive(Debug)]
pub struct Kubernetes {
    config: Config,
    namespace: String,
    service: String,
    port: PortSelector,
    health: watch::Sender<Health>,
}

impl Kubernetes {
    /// Uses the API server of the pod's own cluster and the pod's ServiceAccount. `namespace` defaults to
    /// that of the pod.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError::NotInCluster`] and [`DiscoveryError::ObjectName`].
    pub fn in_cluster(
        namespace: Option<&str>,
        service: &str,
        port: PortSelector,
    ) -> Result<Self, DiscoveryError> {
        let config = Config::incluster().map_err(DiscoveryError::NotInCluster)?;
        Self::with_config(config, namespace, service, port)
    }

    /// Uses the API server in `config`. `namespace` defaults to the one in `config`. The timeouts and retries
    /// in `config` are replaced, because a watch needs specific ones.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError::ObjectName`].
    pub fn with_config(
        mut config: Config,
        namespace: Option<&str>,
        service: &str,
        port: PortSelector,
    ) -> Result<Self, DiscoveryError> {
        config.connect_timeout = Some(CONNECT_WITHIN);
        config.read_timeout = Some(SILENT_FOR);
        config.reset_reader_on_write = true;
        // The backoff below alone decides how often a failing server is asked.
        config.default_retry = false;
        // The mounted file may end in a line break.
        let namespace = namespace.unwrap_or(config.default_namespace.trim());
        let namespace = object_name("namespace", namespace)?;
        let service = object_name("service", service)?;
        Ok(Self { config, namespace, service, port, health: watch::Sender::default() })
    }
}

/// Checks a name that becomes part of a path and of a selector, where other characters have a meaning.
fn object_name(kind: &'static str, name: &str) -> Result<String, DiscoveryError> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_name = !name.is_empty() && name.len() <= 63 && name.bytes().all(allowed);
    if is_name {
        Ok(name.to_owned())
    } else {
        Err(DiscoveryError::ObjectName { kind, name: name.to_owned() })
    }
}

#[async_trait]
impl Discovery for Kubernetes {
    fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    async fn run(self: Box<Self>, seeds: watch::Sender<HashSet<SocketAddr>>) -> DiscoveryError {
        let Self { config, namespace, service, port, health } = *self;
        let publisher = Publisher { source: "kubernetes", seeds, health: &health };
        let client = match Client::try_from(config) {
            Ok(client) => client,
            Err(error) => return DiscoveryError::Client(Box::new(error)),
        };
        let api = Api::namespaced(client, &namespace);
        let config =
            watcher::Config::default().labels(&format!("{SERVICE_NAME}={service}")).timeout(WATCH_SECONDS);

        // kube's `default_backoff`, applied by our own loop: the watcher alone would ask a server that is
        // down 10,000 times a second. kube's combinator is not used, because it neither shows when a watch
        // works again (it is silent until something changes) nor increases the backoff while the list fails:
        // it counts the `Init` before each list as success. So each failure starts with a new list. The
        // backoff resets itself after 2 minutes without a failure.
        let mut backoff = DefaultBackoff::default();
        let mut slices = Slices::default();
        loop {
            let error = Box::pin(follow(&api, &config, &port, &mut slices, &publisher)).await;
            match Error::new(error, &namespace) {
                // Not a failure: the API server no longer knows the position of this watch, and a new list
                // shows what was missed.
                Error::Refused { code: 410, message } => tracing::debug!(message, "watch restarted"),
                error => publisher.failed(error.kind(), &error),
            }
            sleep(backoff.next().unwrap_or(LONGEST_WAIT)).await;
        }
    }
}

/// Lists and watches until an error occurs.
async fn follow(
    api: &Api<EndpointSlice>,
    config: &watcher::Config,
    port: &PortSelector,
    slices: &mut Slices,
    publisher: &Publisher<'_>,
) -> watcher::Error {
    let mut events = pin!(watcher(api.clone(), config.clone()));
    let mut listed = HashMap::new();
    // Whether an answer has arrived that does not end the last failure yet.
    let mut unproven = false;
    loop {
        let event = if unproven {
            match timeout(PROVEN_AFTER, events.next()).await {
                Ok(event) => event,
                Err(_) => {
                    unproven = false;
                    slices.report(port, publisher);
                    continue;
                }
            }
        } else {
            events.next().await
        };
        match event {
            Some(Ok(Event::Init)) => {
                listed.clear();
                continue;
            }
            Some(Ok(Event::InitApply(slice))) => {
                listed.extend(Slice::read(slice, port));
                continue;
            }
            // The set is replaced at once, so that no partial list is published. Slices that are not listed
            // are removed.
            Some(Ok(Event::InitDone)) => {
                slices.by_name = std::mem::take(&mut listed);
                unproven = publisher.is_failing();
            }
            Some(Ok(Event::Apply(slice))) => {
                slices.by_name.extend(Slice::read(slice, port));
                unproven = false;
            }
            Some(Ok(Event::Delete(slice))) => {
                if let Some(name) = &slice.metadata.name {
                    slices.by_name.remove(name);
                }
                unproven = false;
            }
            Some(Err(error)) => return error,
            // The watcher never ends by itself. If it did, a new list would be needed.
            None => return watcher::Error::NoResourceVersion,
        }
        slices.publish(publisher);
        if unproven {
            publisher.answered();
        } else {
            slices.report(port, publisher);
        }
    }
}

/// The last known slices.
#[derive(Debug, Default)]
struct Slices {
    by_name: HashMap<String, Slice>,
}

impl Slices {
    /// Whether there are endpoints, and none of them has the port.
    fn lacks_port(&self) -> bool {
        let mut portless = self.by_name.values().filter(|slice| slice.ports.is_some()).peekable();
        portless.peek().is_some() && self.by_name.values().all(|slice| slice.addresses.is_empty())
    }

    fn publish(&self, publisher: &Publisher<'_>) {
        // A missing port is a mistake in a manifest and no reason to drop replicas that are known.
        if !self.lacks_port() {
            publisher
                .publish(self.by_name.values().flat_map(|slice| slice.addresses.iter().copied()).collect());
        }
    }

    fn report(&self, port: &PortSelector, publisher: &Publisher<'_>) {
        match port {
            PortSelector::Name(name) if self.lacks_port() => {
                let ports = self.by_name.values().filter_map(|slice| slice.ports.as_ref()).flatten();
                let error = Error::NoPort { name: name.clone(), ports: ports.cloned().collect() };
                publisher.failed(error.kind(), &error);
            }
            _ => publisher.succeeded(),
        }
    }
}

/// The used parts of an EndpointSlice.
#[derive(Debug, PartialEq, Eq)]
struct Slice {
    addresses: HashSet<SocketAddr>,
    /// The names of its ports, if it has endpoints and the wanted port is not among them.
    ports: Option<Vec<String>>,
}

impl Slice {
    /// Returns the name of the slice and its used parts.
    fn read(slice: EndpointSlice, port: &PortSelector) -> Option<(String, Self)> {
        let name = slice.metadata.name?;
        // Conditions are ignored on purpose: see `Kubernetes`. Endpoints of pods have no host names, although
        // the type FQDN allows them.
        let addresses = slice.endpoints.iter().flat_map(|endpoint| &endpoint.addresses);
        let ips: Vec<IpAddr> = addresses.filter_map(|address| address.parse().ok()).collect();
        let declared = slice.ports.unwrap_or_default();
        let number = match port {
            PortSelector::Number(number) => Some(*number),
            PortSelector::Name(name) => declared
                .iter()
                // A Service with a single port may leave its name empty.
                .find(|port| port.name.as_deref().unwrap_or_default() == name)
                .and_then(|port| u16::try_from(port.port?).ok()),
        };
        let read = match number {
            Some(number) => {
                Self { addresses: ips.into_iter().map(|ip| (ip, number).into()).collect(), ports: None }
            }
            None => Self {
                addresses: HashSet::new(),
                ports: (!ips.is_empty()).then(|| declared.into_iter().filter_map(|port| port.name).collect()),
            },
        };
        Some((name, read))
    }
}

/// Why a watch or list failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("could not watch EndpointSlices")]
    Watch(#[source] Box<watcher::Error>),
    #[error("the API server refused to list or watch EndpointSlices ({code}): {message}")]
    Refused { code: u16, message: String },
    /// The message of the API server contains the ServiceAccount and the verb.
    #[error(
        "the API server forbids it: {message}; a Role in namespace {namespace} with apiGroups [discovery.k8s.io], \
         resources [endpointslices], verbs [get, list, watch], bound to the ServiceAccount, allows it"
    )]
    Forbidden { namespace: String, message: String },
    #[error("the API server does not accept the ServiceAccount's token: {message}")]
    Unauthorized { message: String },
    #[error("the Service has no port named {name:?}; its ports are {ports:?}")]
    NoPort { name: String, ports: BTreeSet<String> },
}

impl Error {
    fn new(error: watcher::Error, namespace: &str) -> Self {
        use watcher::Error::{InitialListFailed, WatchError, WatchFailed, WatchStartFailed};
        let status = match &error {
            InitialListFailed(kube::Error::Api(status))
            | WatchStartFailed(kube::Error::Api(status))
            | WatchFailed(kube::Error::Api(status))
            | WatchError(status) => status,
            _ => return Self::Watch(Box::new(error)),
        };
        let message = status.message.clone();
        match status.code {
            401 => Self::Unauthorized { message },
            403 => Self::Forbidden { namespace: namespace.to_owned(), message },
            code => Self::Refused { code, message },
        }
    }

    fn kind(&self) -> FailureKind {
        match self {
            Self::Watch(_) | Self::Refused { .. } => FailureKind::Unavailable,
            Self::Forbidden { .. } | Self::Unauthorized { .. } => FailureKind::Denied,
            Self::NoPort { .. } => FailureKind::Empty,
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{
        api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort},
        apimachinery::pkg::apis::meta::v1::ObjectMeta,
    };

    use super::*;

    fn slice(addresses: &[&str], ports: &[(&str, i32)]) -> EndpointSlice {
        let endpoint = |address: &&str| Endpoint {
            addresses: vec![(*address).to_owned()],
            conditions: Some(EndpointConditions { ready: Some(false), ..EndpointConditions::default() }),
            ..Endpoint::default()
        };
        let port = |(name, port): &(&str, i32)| EndpointPort {
            name: Some((*name).to_owned()),
            port: Some(*port),
            ..EndpointPort::default()
        };
        EndpointSlice {
            metadata: ObjectMeta { name: Some("slice".to_owned()), ..ObjectMeta::default() },
            endpoints: addresses.iter().map(endpoint).collect(),
            ports: (!ports.is_empty()).then(|| ports.iter().map(port).collect()),
            ..EndpointSlice::default()
        }
    }

    fn read(slice: EndpointSlice, port: PortSelector) -> Slice {
        Slice::read(slice, &port).expect("it has a name").1
    }

    fn addresses(addresses: &[&str]) -> HashSet<SocketAddr> {
        addresses.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn a_port_is_taken_by_number_or_by_name() {
        let declared = [("api", 8080), ("gossip", 8150)];
        let two = || slice(&["10.0.0.1", "fd00::1"], &declared);
        let by_number = read(two(), PortSelector::Number(9));
        assert_eq!(by_number.addresses, addresses(&["10.0.0.1:9", "[fd00::1]:9"]));
        let by_name = read(two(), PortSelector::Name("gossip".to_owned()));
        assert_eq!(by_name.addresses, addresses(&["10.0.0.1:8150", "[fd00::1]:8150"]));
        // A headless Service may declare no port at all.
        let none = read(slice(&["10.0.0.1"], &[]), PortSelector::Number(9));
        assert_eq!(none.addresses, addresses(&["10.0.0.1:9"]));
        let unnamed = read(slice(&["10.0.0.1"], &[("", 7)]), PortSelector::Name(String::new()));
        assert_eq!(unnamed.addresses, addresses(&["10.0.0.1:7"]));
    }

    #[test]
    fn a_slice_without_the_port_gives_nothing() {
        let gossip = || PortSelector::Name("gossip".to_owned());
        let other = read(slice(&["10.0.0.1"], &[("api", 8080)]), gossip());
        assert_eq!(other, Slice { addresses: HashSet::new(), ports: Some(vec!["api".to_owned()]) });
        let out_of_range = read(slice(&["10.0.0.1"], &[("gossip", 70_000)]), gossip());
        assert!(out_of_range.addresses.is_empty());
        let empty = read(slice(&[], &[]), gossip());
        assert_eq!(empty, Slice { addresses: HashSet::new(), ports: None });
    }

    #[test]
    fn a_host_name_among_the_addresses_is_ignored() {
        let mixed = read(slice(&["kas.example", "10.0.0.1"], &[]), PortSelector::Number(1));
        assert_eq!(mixed.addresses, addresses(&["10.0.0.1:1"]));
    }

    #[test]
    fn names_with_special_characters_are_refused() {
        let config = || Config::new("https://127.0.0.1:1".parse().unwrap());
        let port = || PortSelector::Number(1);
        for bad in ["", "../default", "kas,app=x", "Kas", "kas kas", &"x".repeat(64)] {
            assert!(Kubernetes::with_config(config(), Some(bad), "kas", port()).is_err(), "{bad}");
            assert!(Kubernetes::with_config(config(), None, bad, port()).is_err(), "{bad}");
        }
        let mut mounted = config();
        mounted.default_namespace = "shop\n".to_owned();
        let discovery = Kubernetes::with_config(mounted, None, "kas-gossip", port()).unwrap();
        assert_eq!(discovery.namespace, "shop");
    }
}
