//! Clients and repositories for the tests.

#![allow(dead_code)] // not every test needs all of it

use std::{path::Path, sync::Arc, time::Duration};

use gitaly::{Client, Features, GitalyMetrics, GitalyRepository, Limits, Location, Server, Settings};
use http::HeaderValue;
use prometheus_client::registry::Registry;

/// The secret of the servers of tests.
pub const TOKEN: &str = "the secret of gitaly";

/// Returns a client with the usual limits and short pauses.
pub fn client() -> Arc<Client> {
    client_with(Limits::default(), None, &mut Registry::default())
}

/// Returns a client that trusts the authority in `ca`.
pub fn client_with(limits: Limits, ca: Option<&Path>, registry: &mut Registry) -> Arc<Client> {
    net::tls::install();
    let settings = Settings {
        user_agent: HeaderValue::from_static("gitlab-kas/test/0"),
        client_name: HeaderValue::from_static("gitlab-kas"),
        tls: net::tls::client(ca).expect("the authority can be read").into(),
        limits,
    };
    let (first, longest) = (Duration::from_millis(20), Duration::from_millis(200));
    Client::with_pauses(settings, Arc::new(GitalyMetrics::new(registry)), first, longest)
}

/// Returns how a server is called.
pub fn server(address: &str, token: &str) -> Server {
    Server {
        address: address.parse().expect("the address is valid"),
        token: token.to_owned().into(),
        features: Features::new([("gitaly-feature-x", "true"), ("authorization", "Bearer forged")]),
    }
}

/// Returns the repository at a relative path.
pub fn repository(
    client: &Arc<Client>,
    address: &str,
    token: &str,
    path: &str,
    default_branch: Option<&str>,
) -> GitalyRepository {
    let location = Location {
        storage_name: testkit::gitaly::STORAGE.to_owned(),
        relative_path: path.to_owned(),
        gl_repository: "project-1".to_owned(),
        gl_project_path: "group/project".to_owned(),
        default_branch: default_branch.map(str::to_owned),
        ..Location::default()
    };
    client.repository(Arc::new(server(address, token)), location)
}
