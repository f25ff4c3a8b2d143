//! Seeds behind a headless Service of Kubernetes, from its EndpointSlices.

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

/// The label by which a slice names its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// How long one watch request lasts, in seconds; the next goes on where it ended. A connection that died
/// silently is noticed 5 s after that. Shorter notices earlier, and costs the API server a request per
/// replica each time.
const WATCH_SECONDS: u32 = 60;

/// How long a connection of ours may be silent. Longer than a watch lasts, since a quiet watch is silent.
const SILENT_FOR: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);

/// How long a connection to the API server may take, TLS included.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// How long a watch must go on after a failure until the failure counts as over. A list that is answered does
/// not show it: the rules may allow to list and not to watch, which would otherwise work and fail in turn.
const PROVEN_AFTER: Duration = Duration::from_secs(1);

/// The wait between two tries if the back-off ever said none; it has no end.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Which port of an endpoint to use.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PortSelector {
    /// This one on every address, whatever the Service declares.
    Number(u16),
    /// The one that the Service gives this name. It may differ between slices, as during a rollout that
    /// changes it.
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
/// Endpoints count whether they are ready or not, and the Service should set `publishNotReadyAddresses:
/// true`: otherwise replicas that start together never find each other, as each waits for the others to be
/// ready.
///
/// While the API server cannot be reached, or refuses, the last seeds stay and it is asked again after 0.8 s,
/// then more and more rarely, up to a minute. Rules that are missing may be added meanwhile; `run` never
/// returns for them. A Service without endpoints, on the other hand, is an answer: the set becomes empty.
#[derive(Debug)]
pub struct Kubernetes {
    config: Config,
    namespace: String,
    service: String,
    port: PortSelector,
    health: watch::Sender<Health>,
}

impl Kubernetes {
    /// Asks the API server of the pod's own cluster, with the pod's ServiceAccount. Without a namespace: the
    /// pod's.
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

    /// Asks the API server that `config` says. Without a namespace: the one of the configuration. The
    /// configuration's timeouts and retries are replaced, as those of a watch are no matter of taste.
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
        // One policy decides how often a server in trouble is asked: the back-off below.
        config.default_retry = false;
        // The mounted file may end in a newline.
        let namespace = namespace.unwrap_or(config.default_namespace.trim());
        let namespace = object_name("namespace", namespace)?;
        let service = object_name("service", service)?;
        Ok(Self { config, namespace, service, port, health: watch::Sender::default() })
    }
}

/// Checks a name that becomes part of a path and of a selector, where other characters would mean something.
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

        // kube's `default_backoff`, as a policy of our own loop: the watcher alone would ask a server that is
        // down 10,000 times a second. Not as its combinator, because that tells neither when a watch works
        // again (it says nothing until something changes) nor backs off further while the list fails: the
        // `Init` before each list counts as success there. So each failure starts with a list anew. The
        // policy resets itself after 2 minutes without a failure.
        let mut backoff = DefaultBackoff::default();
        let mut slices = Slices::default();
        loop {
            let error = Box::pin(follow(&api, &config, &port, &mut slices, &publisher)).await;
            match Error::new(error, &namespace) {
                // Nothing failed: the API server only forgot where this watch was, and a list tells what it
                // missed.
                Error::Refused { code: 410, message } => tracing::debug!(message, "watch starts anew"),
                error => publisher.failed(error.kind(), &error),
            }
            sleep(backoff.next().unwrap_or(LONGEST_WAIT)).await;
        }
    }
}

/// Lists and watches until that fails.
async fn follow(
    api: &Api<EndpointSlice>,
    config: &watcher::Config,
    port: &PortSelector,
    slices: &mut Slices,
    publisher: &Publisher<'_>,
) -> watcher::Error {
    let mut events = pin!(watcher(api.clone(), config.clone()));
    let mut listed = HashMap::new();
    // Whether an answer came that did not end the last failure yet.
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
            // At once, so that nobody sees the set while it is half listed. What is not listed is gone.
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
            // The watcher never ends by itself; if it did, a list is what tells the truth again.
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

/// The slices as last seen.
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
        // A port that nobody has is a slip in a manifest, and no reason to forget replicas that are there.
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

/// What matters of an EndpointSlice.
#[derive(Debug, PartialEq, Eq)]
struct Slice {
    addresses: HashSet<SocketAddr>,
    /// The names of its ports, if it has endpoints and the wanted port is not among them.
    ports: Option<Vec<String>>,
}

impl Slice {
    /// Returns the name of the slice and what matters of it.
    fn read(slice: EndpointSlice, port: &PortSelector) -> Option<(String, Self)> {
        let name = slice.metadata.name?;
        // Conditions are not looked at, on purpose: see `Kubernetes`. A host name, which the type FQDN
        // allows, is nothing that the endpoints of pods have.
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

/// Why nothing is learned.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("could not watch EndpointSlices")]
    Watch(#[source] Box<watcher::Error>),
    #[error("the API server refused to list or watch EndpointSlices ({code}): {message}")]
    Refused { code: u16, message: String },
    /// The message of the API server names the ServiceAccount and the verb.
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
    fn a_host_name_among_the_addresses_is_passed_over() {
        let mixed = read(slice(&["kas.example", "10.0.0.1"], &[]), PortSelector::Number(1));
        assert_eq!(mixed.addresses, addresses(&["10.0.0.1:1"]));
    }

    #[test]
    fn names_that_would_mean_something_in_a_path_or_selector_are_refused() {
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
