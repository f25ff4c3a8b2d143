//! Resolves names to addresses repeatedly, and keeps the last answers if a name server does not answer.
//!
//! The resolver is created anew for each round and caches nothing, like `getaddrinfo`: a changed
//! `resolv.conf` or `hosts` file takes effect in the next round, a broken connection to a name server affects
//! one round at most, and a cache can run on the node.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    pin::pin,
    time::Duration,
};

use futures_util::{
    StreamExt as _,
    future::{Either, select},
    stream,
};
use hickory_resolver::{
    Hosts, Resolver, ResolverBuilder, TokioResolver,
    config::{ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig},
    net::{NetError, runtime::TokioRuntimeProvider},
    proto::{
        op::Query,
        rr::{Name, RData, RecordType},
    },
};
use tokio::time::{sleep, timeout};

use crate::health::{FailureKind, Publisher};

/// Default maximum time between two rounds. A new replica is found at most this late. A shorter time means
/// more queries, one per replica and name.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);

/// The shortest wait after an answer, for records with a time to live of 0, which forbids caching but does
/// not require queries in a loop.
const SHORTEST: Duration = Duration::from_secs(1);

/// The wait after the first failed round; it doubles up to the interval. The names of a service appear
/// shortly after its first pod, so the first attempts are close together.
const RETRY: Duration = Duration::from_millis(500);

/// How long one packet to one name server may remain unanswered, unless `resolv.conf` sets less. With the
/// default of 5 s, a round with one dead name server takes longer than the interval.
const PACKET_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a query is repeated, unless `resolv.conf` sets less.
const ATTEMPTS: usize = 2;

/// How long one query may take, with all search domains, name servers and repetitions.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for the answer of the other address family once one has arrived. Some name servers never
/// answer queries for IPv6.
const GRACE: Duration = Duration::from_secs(1);

/// How many names are looked up at once: a hundred queries at the same time overflow a name server's socket.
const CONCURRENT: usize = 16;

/// Why a round, or a name in it, gave no new answer.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("could not set up a resolver")]
    System(#[source] Box<NetError>),
    #[error("could not look up {name}")]
    Failed { name: Name, source: Box<NetError> },
    #[error("looking up {name} took longer than {QUERY_TIMEOUT:?}")]
    TooSlow { name: Name },
    #[error("{name} has no addresses")]
    NoAddresses { name: Name },
    #[error("{name} has no SRV records")]
    NoServices { name: Name },
}

impl Error {
    fn kind(&self) -> FailureKind {
        match self {
            Self::System(_) | Self::Failed { .. } | Self::TooSlow { .. } => FailureKind::Unavailable,
            Self::NoAddresses { .. } | Self::NoServices { .. } => FailureKind::Empty,
        }
    }
}

/// What to look up, and how.
#[derive(Debug, Clone)]
pub(crate) struct Lookup {
    /// Addresses that need no lookup.
    pub(crate) fixed: HashSet<SocketAddr>,
    pub(crate) hosts: Vec<(Name, u16)>,
    /// A name with SRV records; each contains a host and a port.
    pub(crate) service: Option<Name>,
    pub(crate) nameserver: Option<SocketAddr>,
    pub(crate) interval: Duration,
}

impl Lookup {
    pub(crate) fn new() -> Self {
        Self { fixed: HashSet::new(), hosts: Vec::new(), service: None, nameserver: None, interval: INTERVAL }
    }

    /// Publishes forever.
    pub(crate) async fn run(mut self, publisher: &Publisher<'_>) -> std::convert::Infallible {
        let mut known = HashMap::new();
        if !self.fixed.is_empty() {
            // These need no lookup, so they are published at once.
            publisher.publish(self.fixed.clone());
        }
        if self.hosts.is_empty() && self.service.is_none() {
            publisher.succeeded();
            return std::future::pending().await;
        }

        let mut failures = 0;
        loop {
            let outcome = Box::pin(self.round(&mut known)).await;
            publisher.publish(self.seeds(&known));
            let wait = match outcome {
                Ok(ttl) => {
                    publisher.succeeded();
                    failures = 0;
                    ttl.max(SHORTEST)
                }
                Err(error) => {
                    publisher.failed(error.kind(), &error);
                    failures += 1;
                    RETRY.saturating_mul(1 << (failures - 1).min(16))
                }
            };
            // Earlier, never later, so that replicas that start together do not query in step.
            sleep(wait.min(self.interval).mul_f64(rand::random_range(0.8..=1.0))).await;
        }
    }

    /// Looks up all names once, and returns how long the answers are valid.
    ///
    /// # Errors
    ///
    /// If a name gave no answer: the first such error. The answers for other names are in `known` all the
    /// same.
    async fn round(&mut self, known: &mut HashMap<Name, Addresses>) -> Result<Duration, Error> {
        let asker = Asker::new(self.nameserver).await?;
        let mut ttl = Duration::MAX;
        // Addresses that were sent with the SRV records are not looked up again.
        let mut given: HashMap<Name, Addresses> = HashMap::new();
        if let Some(service) = &self.service {
            let found = asker.services(service).await?;
            self.hosts = found.targets;
            given = found.addresses;
            ttl = found.ttl;
        }

        let mut first_error = None;
        let names: HashSet<Name> = self.hosts.iter().map(|(name, _)| name.clone()).collect();
        let mut questions = Vec::new();
        for name in &names {
            if let Some(addresses) = given.remove(name) {
                known.insert(name.clone(), addresses);
            } else {
                questions.push(name.clone());
            }
        }
        let asker = &asker;
        let mut answers = stream::iter(questions)
            .map(|name| async move {
                let answer = asker.addresses(&name).await;
                (name, answer)
            })
            .buffer_unordered(CONCURRENT);
        while let Some((name, answer)) = answers.next().await {
            match answer.merge(&name, known) {
                Ok(valid) => ttl = ttl.min(valid),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        // A host in no record is removed; it is not only unanswered.
        known.retain(|name, _| names.contains(name));
        first_error.map_or(Ok(ttl), Err)
    }

    fn seeds(&self, known: &HashMap<Name, Addresses>) -> HashSet<SocketAddr> {
        let found = self.hosts.iter().flat_map(|(name, port)| {
            let addresses = known.get(name).into_iter();
            addresses
                .flat_map(|addresses| addresses.v4.iter().chain(&addresses.v6))
                .map(|ip| (*ip, *port).into())
        });
        self.fixed.iter().copied().chain(found).collect()
    }
}

/// The last answers for a name. The families are separate, since one can fail without the other.
#[derive(Debug, Default)]
struct Addresses {
    v4: HashSet<IpAddr>,
    v6: HashSet<IpAddr>,
}

/// The answer for one family; empty if the name has no address of it.
#[derive(Debug)]
struct Found {
    ips: HashSet<IpAddr>,
    ttl: Duration,
}

/// The answers for both families.
struct Answer {
    v4: Result<Found, Error>,
    v6: Result<Found, Error>,
}

impl Answer {
    /// Replaces what was known of the name with the answers, and returns how long they are valid.
    ///
    /// # Errors
    ///
    /// If neither family gave an address. The known addresses are kept.
    fn merge(self, name: &Name, known: &mut HashMap<Name, Addresses>) -> Result<Duration, Error> {
        let (v4, v6) = match (self.v4, self.v6) {
            (Ok(v4), Ok(v6)) if v4.ips.is_empty() && v6.ips.is_empty() => {
                return Err(Error::NoAddresses { name: name.clone() });
            }
            (Ok(v4), Ok(v6)) => (Some(v4), Some(v6)),
            // One family has addresses and the query for the other failed: the known addresses of the other
            // are kept.
            (Ok(v4), Err(error)) if !v4.ips.is_empty() => {
                tracing::debug!(%name, error = process::error::chain(&error), "no answer for IPv6");
                (Some(v4), None)
            }
            (Err(error), Ok(v6)) if !v6.ips.is_empty() => {
                tracing::debug!(%name, error = process::error::chain(&error), "no answer for IPv4");
                (None, Some(v6))
            }
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        let known = known.entry(name.clone()).or_default();
        let mut ttl = Duration::MAX;
        for (found, known) in [(v4, &mut known.v4), (v6, &mut known.v6)] {
            let Some(found) = found else { continue };
            if !found.ips.is_empty() {
                ttl = ttl.min(found.ttl);
            }
            *known = found.ips;
        }
        Ok(ttl)
    }
}

/// The contents of SRV records.
struct Services {
    targets: Vec<(Name, u16)>,
    /// Addresses of targets that the name server sent with the records.
    addresses: HashMap<Name, Addresses>,
    ttl: Duration,
}

/// Queries name servers during one round.
struct Asker {
    resolver: TokioResolver,
    hosts: Hosts,
}

impl Asker {
    async fn new(nameserver: Option<SocketAddr>) -> Result<Self, Error> {
        // Two small files are read on a thread for blocking work, where a slow disk blocks nothing else.
        let build = move || {
            let mut builder = match nameserver {
                None => Resolver::builder_tokio().unwrap_or_else(|error| {
                    // As in resolv.conf(5): without the file, or without a server in it, the default is this
                    // machine. Names of the hosts file need no server anyway.
                    tracing::debug!(%error, "no name server is configured");
                    builder_for(NameServerConfig::udp_and_tcp(Ipv4Addr::LOCALHOST.into()))
                }),
                Some(address) => {
                    let connections =
                        [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut connection| {
                            connection.port = address.port();
                            connection
                        });
                    builder_for(NameServerConfig::new(address.ip(), true, connections.into()))
                }
            };
            let options = builder.options_mut();
            options.timeout = options.timeout.min(PACKET_TIMEOUT);
            options.attempts = options.attempts.min(ATTEMPTS);
            options.cache_size = 0;
            // It would find only names of the hosts file that need no search domain.
            options.use_hosts_file = ResolveHosts::Never;
            Ok(Self { resolver: builder.build()?, hosts: Hosts::from_system().unwrap_or_default() })
        };
        match tokio::task::spawn_blocking(build).await {
            Ok(built) => built.map_err(|error| Error::System(Box::new(error))),
            // This happens only while the runtime shuts down.
            Err(_) => Err(Error::System(Box::new(NetError::Message("the runtime shuts down")))),
        }
    }

    async fn addresses(&self, name: &Name) -> Answer {
        let (v4, v6) = (self.in_hosts(name, RecordType::A), self.in_hosts(name, RecordType::AAAA));
        if !v4.ips.is_empty() || !v6.ips.is_empty() {
            // As in other resolvers, names in the hosts file are not looked up elsewhere.
            return Answer { v4: Ok(v4), v6: Ok(v6) };
        }
        let v4 = pin!(self.family(name, RecordType::A));
        let v6 = pin!(self.family(name, RecordType::AAAA));
        match select(v4, v6).await {
            Either::Left((v4, v6)) => {
                let v6 = Self::other(name, &v4, v6).await;
                Answer { v4, v6 }
            }
            Either::Right((v6, v4)) => {
                let v4 = Self::other(name, &v6, v4).await;
                Answer { v4, v6 }
            }
        }
    }

    /// Waits for the second family, but not for long if the first one has addresses.
    async fn other(
        name: &Name,
        first: &Result<Found, Error>,
        second: impl Future<Output = Result<Found, Error>>,
    ) -> Result<Found, Error> {
        if !first.as_ref().is_ok_and(|first| !first.ips.is_empty()) {
            return second.await;
        }
        timeout(GRACE, second).await.unwrap_or_else(|_| Err(Error::TooSlow { name: name.clone() }))
    }

    fn in_hosts(&self, name: &Name, family: RecordType) -> Found {
        let found = self.hosts.lookup_static_host(&Query::query(name.clone(), family));
        let records = found.iter().flat_map(|found| found.answers());
        // The file can change at any time.
        Found { ips: records.filter_map(|record| record.data.ip_addr()).collect(), ttl: SHORTEST }
    }

    async fn family(&self, name: &Name, family: RecordType) -> Result<Found, Error> {
        let mut found = Found { ips: HashSet::new(), ttl: Duration::MAX };
        if let Some(lookup) = self.ask(name, family).await? {
            for record in lookup.answers() {
                // The time to live of an alias limits the validity of the answer too.
                found.ttl = found.ttl.min(Duration::from_secs(record.ttl.into()));
                found.ips.extend(record.data.ip_addr());
            }
        }
        Ok(found)
    }

    async fn services(&self, name: &Name) -> Result<Services, Error> {
        let lookup = self.ask(name, RecordType::SRV).await?;
        let mut services = Services { targets: Vec::new(), addresses: HashMap::new(), ttl: Duration::MAX };
        for record in lookup.iter().flat_map(|lookup| lookup.answers()) {
            services.ttl = services.ttl.min(Duration::from_secs(record.ttl.into()));
            // Priority and weight are preferences, but all seeds are tried. A target of "." means "not
            // available".
            if let RData::SRV(service) = &record.data
                && !service.target.is_root()
            {
                services.targets.push((service.target.clone(), service.port));
            }
        }
        if services.targets.is_empty() {
            return Err(Error::NoServices { name: name.clone() });
        }
        for record in lookup.iter().flat_map(|lookup| lookup.additionals()) {
            let Some(ip) = record.data.ip_addr() else { continue };
            let addresses = services.addresses.entry(record.name.clone()).or_default();
            if ip.is_ipv4() { &mut addresses.v4 } else { &mut addresses.v6 }.insert(ip);
        }
        Ok(services)
    }

    /// Returns the answer; `None` if the name, or this type of record, does not exist.
    async fn ask(
        &self,
        name: &Name,
        record_type: RecordType,
    ) -> Result<Option<hickory_resolver::lookup::Lookup>, Error> {
        match timeout(QUERY_TIMEOUT, self.resolver.lookup(name.clone(), record_type)).await {
            Ok(Ok(found)) => Ok(Some(found)),
            Ok(Err(error)) if error.is_no_records_found() => Ok(None),
            Ok(Err(source)) => Err(Error::Failed { name: name.clone(), source: Box::new(source) }),
            Err(_) => Err(Error::TooSlow { name: name.clone() }),
        }
    }
}

fn builder_for(server: NameServerConfig) -> ResolverBuilder<TokioRuntimeProvider> {
    let config = ResolverConfig::from_name_servers(vec![server]);
    Resolver::builder_with_config(config, TokioRuntimeProvider::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> Name {
        Name::from_ascii("kas.example.").unwrap()
    }

    fn found(ips: &[&str]) -> Result<Found, Error> {
        let ips = ips.iter().map(|ip| ip.parse().unwrap()).collect();
        Ok(Found { ips, ttl: Duration::from_secs(30) })
    }

    fn failed() -> Result<Found, Error> {
        Err(Error::TooSlow { name: name() })
    }

    /// Merges answers into `10.0.0.1` and `fd00::1`, and returns the known addresses.
    fn merged(v4: Result<Found, Error>, v6: Result<Found, Error>) -> (bool, Vec<String>) {
        let mut known = HashMap::new();
        Answer { v4: found(&["10.0.0.1"]), v6: found(&["fd00::1"]) }.merge(&name(), &mut known).unwrap();
        let merged = Answer { v4, v6 }.merge(&name(), &mut known).is_ok();
        let known = &known[&name()];
        let mut ips: Vec<String> = known.v4.iter().chain(&known.v6).map(ToString::to_string).collect();
        ips.sort_unstable();
        (merged, ips)
    }

    #[test]
    fn a_family_that_fails_keeps_its_last_answer() {
        let both = ["10.0.0.1", "fd00::1"];
        for (v4, v6, works, expected) in [
            (found(&["10.0.0.2"]), found(&["fd00::2"]), true, &["10.0.0.2", "fd00::2"][..]),
            (found(&["10.0.0.2"]), found(&[]), true, &["10.0.0.2"]),
            (found(&["10.0.0.2"]), failed(), true, &["10.0.0.2", "fd00::1"]),
            (failed(), found(&["fd00::2"]), true, &["10.0.0.1", "fd00::2"]),
            (found(&[]), failed(), false, &both),
            (failed(), found(&[]), false, &both),
            (failed(), failed(), false, &both),
            (found(&[]), found(&[]), false, &both),
        ] {
            let case = format!("{v4:?} {v6:?}");
            assert_eq!(merged(v4, v6), (works, expected.iter().map(ToString::to_string).collect()), "{case}");
        }
    }
}
