//! Section `private_api`.

use std::{ffi::OsStr, net::IpAddr, path::PathBuf, time::Duration};

use net::tls::{NotRole, Role};
use settings::{HostPort, host_port, show::shown, walk::Section};

use super::listen::{Listen, Network, bind_address, max_connection_age, secret_files, tls};
use crate::{
    Environment,
    flaw::{Flaw, flawed},
};

const NOT_ASKED: &str = "without client_ca_file replicas do not verify each other's certificates";

/// Section `private_api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrivateApi {
    /// Address for TCP and for gossip's UDP; never a Unix socket.
    pub listen: Listen,
    /// The age at which a connection is asked to end.
    pub max_connection_age: Duration,
    /// How certificates of replicas are verified; `None`: replicas present none. Only with TLS.
    pub others: Option<OtherReplicas>,
    /// The settings for the address at which other replicas reach this one.
    pub advertise: Advertise,
    /// The files of the secrets that replicas share, at least one: the first signs, any verifies.
    pub secrets: Vec<PathBuf>,
    /// Whether the first of them is in `authentication_secret_files` too: for its name in problems.
    pub all_secrets_listed: bool,
}

/// The settings for the address at which other replicas reach this one, all of them valid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Advertise {
    /// Key `private_api.advertise`.
    pub configured: Option<HostPort>,
    /// The host and port of `OWN_PRIVATE_API_URL`.
    pub own_url: Option<HostPort>,
    /// `POD_IP`; never the unspecified address.
    pub pod_ip: Option<IpAddr>,
}

/// How certificates of other replicas are verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherReplicas {
    /// The file of the authority that signs them.
    pub ca: PathBuf,
    /// The role that they must have.
    pub role: Role,
}

/// Declares the section and returns it, except what the environment contains about the address. `several`:
/// whether there are other replicas. `idle`: why the section has no effect.
pub(super) fn read(root: &mut Section<'_, '_>, several: bool, idle: Option<&'static str>) -> PrivateApi {
    root.optional(idle, |s| {
        s.section("private_api", "For other replicas, which must have the same settings.", |s| {
            private_api(s, several)
        })
    })
}

fn private_api(s: &mut Section<'_, '_>, several: bool) -> PrivateApi {
    let mut listener = s.section("listen", "The listener of replicas, for TCP and for gossip's UDP.", |s| {
        let (network, address) = bind_address(s, "0.0.0.0:8155");
        if several && network == Network::Unix && !s.is_refused("address") {
            s.refuse("network", "tcp, tcp4 or tcp6, because replicas dial each other");
        }
        let one = s.optional_text(
            "authentication_secret_file",
            "/etc/kas/private-api-secret",
            "Base64 of at least 32 bytes that only replicas share; not the secret of the API.",
        );
        let files = secret_files(
            s,
            one.map(PathBuf::from),
            "Further secret files, for rotation: the first secret signs and encrypts, any of them verifies. Add the \
             new one last everywhere, then put it first everywhere, then remove the old one.",
        );
        if files.paths.is_empty()
            && s.is_present()
            && !s.is_refused("authentication_secret_file")
            && !s.is_refused("authentication_secret_files")
        {
            s.refuse("authentication_secret_file", "the path of a file");
        }
        let tls = tls(s);
        let client_ca = s.path(
            "client_ca_file",
            "PEM of the authority that signs the certificates of replicas: both ends then present a certificate, \
             accept no other authority (mTLS) and require the role. Needs certificate_file and key_file.",
        );
        if client_ca.is_some()
            && tls.is_none()
            && !s.is_refused("certificate_file")
            && !s.is_refused("key_file")
        {
            s.refuse("client_ca_file", "certificate_file and key_file too: without them there is no TLS");
        }
        let role = role(s);
        // If the whole section has no effect, there is a warning already.
        if several && client_ca.is_none() && !s.is_refused("client_ca_file") && s.has("role") {
            s.warn("role", format!("has no effect: {NOT_ASKED}"));
        }
        let others = client_ca.zip(role).map(|(ca, role)| OtherReplicas { ca, role });
        PrivateApi {
            listen: Listen { network, address, tls },
            max_connection_age: max_connection_age(s),
            others,
            advertise: Advertise::default(),
            secrets: files.paths,
            all_secrets_listed: files.all_listed,
        }
    });
    let text = s.text(
        if flawed(Flaw::KeyRenamed) { "advertised_address" } else { "advertise" },
        "",
        "Host and port at which other replicas reach this one. Empty: those of $OWN_PRIVATE_API_URL \
         (grpc://host:port), else $POD_IP and the port of listen, else the address of listen if it is a specific one, \
         else the address of the interface that leads to the first replica found.",
    );
    if !text.is_empty() {
        listener.advertise.configured = text.parse().ok();
        if listener.advertise.configured.is_none() {
            s.refuse("advertise", host_port::EXPECTED);
        }
    }
    listener
}

/// Declares `role`; `None`: it has a problem.
fn role(s: &mut Section<'_, '_>) -> Option<Role> {
    let text = s.text(
        "role",
        "kas://replica",
        "A URI that the certificate of each replica has among its subject alternative names, and no other certificate \
         of that authority has: the signature alone is not enough. Only with client_ca_file.",
    );
    match text.parse() {
        Ok(role) => Some(role),
        Err(NotRole::Wildcard) => {
            s.refuse("role", "one complete URI: a wildcard would accept every certificate of the authority");
            None
        }
        Err(NotRole::NotUri) => {
            s.refuse("role", "a URI, such as kas://replica or spiffe://example.org/ns/kas/sa/kas");
            None
        }
    }
}

/// Completes `private_api.advertise` from the environment.
pub(super) fn advertised(
    root: &mut Section<'_, '_>,
    env: &Environment,
    mut known: Advertise,
    tls: bool,
) -> Advertise {
    const URL: &str = "OWN_PRIVATE_API_URL";
    const POD_IP: &str = "POD_IP";
    const EXPECTED: &str = "grpc://host:port, or grpcs://host:port with TLS";
    let set = |value: &Option<std::ffi::OsString>| value.clone().filter(|value| !value.is_empty());
    if let Some(value) = set(&env.own_private_api_url) {
        let url = value.to_str().and_then(|text| {
            let (scheme, rest) = text.split_once("://")?;
            let address: HostPort = rest.strip_suffix('/').unwrap_or(rest).parse().ok()?;
            ["grpc", "grpcs"].contains(&scheme).then_some((scheme == "grpcs", address))
        });
        match url {
            None => root.refuse_as(URL, shown_variable(&value), EXPECTED),
            Some((secure, address)) => {
                // Replicas dial an address; whether they use TLS depends on their configuration.
                if secure != tls {
                    let (scheme, others) = if secure { ("grpcs", "without") } else { ("grpc", "with") };
                    root.warn(
                        URL,
                        format!("has the scheme {scheme}, but with private_api.listen replicas dial {others} TLS: \
                                 only host and port are used"),
                    );
                }
                known.own_url = Some(address);
            }
        }
    }
    if let Some(value) = set(&env.pod_ip) {
        known.pod_ip =
            value.to_str().and_then(|text| text.parse().ok()).filter(|ip: &IpAddr| !ip.is_unspecified());
        if known.pod_ip.is_none() {
            root.refuse_as(
                POD_IP,
                shown_variable(&value),
                "an IP address, from the field status.podIP of the pod",
            );
        }
    }
    known
}

fn shown_variable(value: &OsStr) -> String {
    value.to_str().map_or_else(
        || "bytes that are not UTF-8".to_owned(),
        |text| shown("", &serde_json::Value::from(text)),
    )
}
