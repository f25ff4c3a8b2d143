//! Section `discovery`.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use settings::{
    HostPort, host_port,
    show::shown,
    walk::{Rule, Section},
};

use super::{minutes, seconds};

/// Section `discovery`: where to look for other replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discovery {
    /// Not configured: other replicas may contact this one, which contacts none by itself.
    None,
    /// At these addresses, each a valid [`HostPort`]; at least one.
    Static(Vec<String>),
    /// Behind a DNS name.
    Dns {
        /// The name; a valid DNS name.
        name: String,
        /// Which records of the name count.
        records: DnsRecords,
        /// How often the name is looked up, at least.
        refresh: Duration,
        /// The name server to ask; `None`: those of the system.
        nameserver: Option<SocketAddr>,
    },
    /// Behind a headless Service.
    Kubernetes {
        /// The name of the Service.
        service: String,
        /// Its namespace; `None`: that of this pod's service account.
        namespace: Option<String>,
        /// The port of its endpoints.
        port: ServicePort,
    },
}

/// Which records of a DNS name count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsRecords {
    /// A and AAAA, each with this port.
    Addresses {
        /// From 1 to 65535.
        port: u16,
    },
    /// SRV, which contain the port.
    Srv,
}

/// The port of a Service's endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServicePort {
    /// A port number, from 1 to 65535.
    Number(u16),
    /// The name of a port in the Service.
    Name(String),
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>, own_port: u16, not_gossip: Option<&'static str>) -> Discovery {
    root.optional(not_gossip, |s| {
        let doc = "Where to look for other replicas; addresses of other programs do no harm. Exactly one of static, \
                   dns and kubernetes. Without this section the replica contacts no others, but others may contact it.";
        s.section("discovery", doc, |s| discovery(s, own_port))
    })
}

fn discovery(s: &mut Section<'_, '_>, own_port: u16) -> Discovery {
    const WAYS: [&str; 3] = ["static", "dns", "kubernetes"];
    let mut given = WAYS.into_iter().filter(|way| s.has(way));
    let first = given.next();
    for other in given.collect::<Vec<_>>() {
        let first = first.unwrap_or_default();
        s.refuse(
            other,
            format!("nothing, because discovery.{first} is given: exactly one of static, dns and kubernetes"),
        );
    }
    if s.is_present() && first.is_none() {
        s.refuse("static", "exactly one of static, dns and kubernetes");
    }
    let addresses = s.section("static", "A list of addresses.", |s| {
        let addresses = s.required_texts(
            "addresses",
            &["10.0.0.1:8155", "kas-2.example.com:8155"],
            "at least one host:port",
            "Host and port of replicas, possibly including this one. Names are looked up repeatedly.",
        );
        // An entry that is not a text already has its problem, and shifts the indices of those after it.
        if !s.is_refused("addresses") {
            for (i, address) in addresses.iter().enumerate() {
                if address.parse::<HostPort>().is_err() {
                    let found = shown("", &serde_json::Value::from(address.as_str()));
                    s.refuse_as(&format!("addresses[{i}]"), found, host_port::EXPECTED);
                }
            }
        }
        addresses
    });
    let dns = s.section("dns", "Alternatively, the addresses of a DNS name.", |s| dns(s, own_port));
    let kubernetes = s.section("kubernetes", "Alternatively, the endpoints of a headless Service.", |s| {
        kubernetes(s, own_port)
    });
    match first {
        Some("static") => Discovery::Static(addresses),
        Some("dns") => dns,
        Some(_) => kubernetes,
        None => Discovery::None,
    }
}

fn dns(s: &mut Section<'_, '_>, own_port: u16) -> Discovery {
    #[derive(Clone, Copy, Default, PartialEq)]
    enum Kind {
        #[default]
        Address,
        Srv,
    }
    let expected = "a DNS name, such as kas.example.com";
    let name = s.required("name", "kas.example.com", expected, "The DNS name.");
    if !name.is_empty() && !host_port::is_name(&name) {
        s.refuse("name", expected);
    }
    let kind = s.one_of(
        "kind",
        &[("address", Kind::Address), ("srv", Kind::Srv)],
        "Which records are used: A and AAAA, or SRV, which contain the port.",
    );
    let doc = "The port of all replicas; not with srv. Absent: the port of private_api.listen.";
    let port = u16::try_from(s.number("port", own_port.into(), doc)).unwrap_or(0);
    if kind == Kind::Srv {
        if s.given("port") {
            s.refuse("port", "nothing, because kind is srv: its records contain the port");
        }
    } else if port == 0 && s.is_present() && !s.is_refused("port") {
        s.refuse("port", PORT);
    }
    let refresh = s.duration(
        "refresh",
        seconds(5),
        Rule::Within(seconds(1), minutes(60)),
        "How often the name is looked up, at least; sooner if the records have a shorter time to live.",
    );
    let text = s.text(
        "nameserver",
        "",
        "IP address of the name server, optionally with a port. Empty: the name servers of the system.",
    );
    let nameserver = (!text.is_empty())
        .then(|| text.parse().or_else(|_| text.parse().map(|ip: IpAddr| SocketAddr::new(ip, 53))).ok())
        .flatten()
        .filter(|address| !address.ip().is_unspecified() && address.port() > 0);
    if !text.is_empty() && nameserver.is_none() {
        s.refuse("nameserver", "an IP address, optionally with a port, such as 10.96.0.10 or 10.96.0.10:53");
    }
    let records = match kind {
        Kind::Address => DnsRecords::Addresses { port },
        Kind::Srv => DnsRecords::Srv,
    };
    Discovery::Dns { name, records, refresh, nameserver }
}

fn kubernetes(s: &mut Section<'_, '_>, own_port: u16) -> Discovery {
    let expected = "the name of a Service: at most 63 lower case letters, digits and `-`, first a letter";
    let service = s.required(
        "service",
        "kas-private",
        expected,
        "The Service. It needs `clusterIP: None` and `publishNotReadyAddresses: true`, otherwise replicas that start \
         together do not find each other. The service account needs get, list and watch of endpointslices.",
    );
    let is_service = is_label(&service) && service.starts_with(|c: char| c.is_ascii_lowercase());
    if !service.is_empty() && !is_service {
        s.refuse("service", expected);
    }
    let namespace =
        s.text("namespace", "", "The namespace of the Service. Empty: that of the service account.");
    if !namespace.is_empty() && !is_label(&namespace) {
        s.refuse("namespace", "the name of a namespace: at most 63 lower case letters, digits and `-`");
    }
    let text = s.text_or_number(
        "port",
        "8155",
        "The number of the port, or its name in the Service. Absent: the port number of private_api.listen.",
    );
    // The rules of Kubernetes for port names.
    let is_port_name = |text: &str| {
        text.len() <= 15
            && is_label(text)
            && !text.contains("--")
            && text.contains(|c: char| c.is_ascii_lowercase())
    };
    let port = match text {
        None if own_port > 0 || !s.is_present() || s.is_refused("port") => ServicePort::Number(own_port),
        None => {
            s.refuse("port", PORT);
            ServicePort::Number(own_port)
        }
        Some(text) => match text.parse() {
            Ok(number) if number > 0 && !text.starts_with('+') => ServicePort::Number(number),
            _ => {
                if !is_port_name(&text) {
                    s.refuse("port", "a port from 1 to 65535, or the name of a port of the Service");
                }
                ServicePort::Name(text)
            }
        },
    };
    Discovery::Kubernetes { service, namespace: (!namespace.is_empty()).then_some(namespace), port }
}

const PORT: &str = "a port from 1 to 65535; it may be absent when private_api.listen.address has one";

/// Whether a text is a label of RFC 1123, as most names in Kubernetes are.
fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}
