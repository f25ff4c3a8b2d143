//! The replicas that kas lists, for the probe.

use std::collections::BTreeMap;

use proto::kas::api::v1::{KasAddress, KasInstanceInfo, ListReplicasRequest};

use crate::{
    agents,
    api::{Client, UNARY_TIMEOUT},
    explain::CallKind,
    failure::Failure,
    table::printable,
};

/// Maximum number of replicas of a list.
const MAX_REPLICAS: usize = 1_000;

/// A replica, as one or several replicas see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    /// Its name.
    pub(super) name: String,
    /// Its host, without a port; `None`: it is not known.
    pub(super) host: Option<String>,
    /// The address of its private API, which other replicas use.
    pub(super) address: String,
    /// Whether requests may enter there.
    pub(super) is_serving: bool,
    /// Whether it is shutting down, or gone.
    pub(super) is_leaving: bool,
}

/// Asks a replica for its list. The first entry is that replica.
///
/// # Errors
/// It does not answer, or cannot list replicas.
pub(super) async fn ask(client: &Client) -> Result<Vec<Listed>, Failure> {
    let call = client.call(CallKind::Kas, Some(UNARY_TIMEOUT));
    let request = client.request(&call, ListReplicasRequest {})?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().list_replicas(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    Ok(answer.replicas.iter().take(MAX_REPLICAS).map(listed).collect())
}

fn listed(replica: &KasInstanceInfo) -> Listed {
    let standing = replica.standing.as_str();
    let is_leaving = ["draining", "left"].contains(&replica.state.as_str())
        || ["draining", "unreachable", "gone"].contains(&standing);
    Listed {
        name: printable(&replica.name),
        host: replica.address.as_ref().and_then(host),
        address: printable(&agents::address(replica.address.as_ref())),
        is_serving: replica.state == "ready" && ["self", "live"].contains(&standing),
        is_leaving,
    }
}

/// Returns the host of an address. kas does not split a name and its port.
fn host(address: &KasAddress) -> Option<String> {
    let text = if address.port == 0 {
        address.ip.parse::<http::uri::Authority>().ok()?.host().to_owned()
    } else {
        address.ip.clone()
    };
    let host = text.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| host.to_owned())
}

/// Merges the lists of several replicas. A replica is leaving only if it says so itself, or if all the others
/// that know it do: after a partition, each side believes that the other one is gone.
pub(super) fn merge(lists: Vec<Vec<Listed>>) -> Vec<Listed> {
    let mut merged: BTreeMap<String, (Listed, bool)> = BTreeMap::new();
    for list in lists {
        for (index, replica) in list.into_iter().enumerate() {
            // Its own word is final.
            let is_own = index == 0;
            match merged.get_mut(&replica.name) {
                None => {
                    merged.insert(replica.name.clone(), (replica, is_own));
                }
                Some((_, true)) => {}
                Some(known) if is_own => *known = (replica, true),
                Some((known, false)) => {
                    known.is_serving |= replica.is_serving;
                    known.is_leaving &= replica.is_leaving;
                }
            }
        }
    }
    merged.into_values().map(|(replica, _)| replica).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str, state: &str, standing: &str) -> KasInstanceInfo {
        KasInstanceInfo {
            name: name.to_owned(),
            state: state.to_owned(),
            standing: standing.to_owned(),
            address: Some(KasAddress { ip: "10.0.0.1".to_owned(), port: 8155 }),
            ..Default::default()
        }
    }

    #[test]
    fn requests_enter_at_ready_replicas_and_leave_those_that_shut_down() {
        let of = |state, standing| {
            let replica = listed(&info("a", state, standing));
            (replica.is_serving, replica.is_leaving)
        };
        assert_eq!(of("ready", "self"), (true, false));
        assert_eq!(of("ready", "live"), (true, false));
        assert_eq!(of("starting", "live"), (false, false));
        assert_eq!(of("ready", "suspect"), (false, false), "it stays if it was there");
        assert_eq!(of("draining", "self"), (false, true));
        assert_eq!(of("ready", "unreachable"), (false, true));
        assert_eq!(of("left", "gone"), (false, true));
    }

    #[test]
    fn hosts_are_without_ports() {
        let of = |ip: &str, port| host(&KasAddress { ip: ip.to_owned(), port });
        assert_eq!(of("10.0.0.1", 8155).as_deref(), Some("10.0.0.1"));
        assert_eq!(of("fd00::1", 8155).as_deref(), Some("fd00::1"));
        assert_eq!(of("kas-0.kas:8155", 0).as_deref(), Some("kas-0.kas"));
        assert_eq!(of("[fd00::1]:8155", 0).as_deref(), Some("fd00::1"));
        assert_eq!(of("", 0), None);
        assert_eq!(of("a b", 0), None);
    }

    #[test]
    fn a_replica_leaves_only_if_it_says_so_or_all_others_do() {
        let list = |rows: &[(&str, &str, &str)]| -> Vec<Listed> {
            rows.iter().map(|(name, state, standing)| listed(&info(name, state, standing))).collect()
        };
        let leaving = |lists| -> Vec<String> {
            merge(lists)
                .into_iter()
                .filter(|replica| replica.is_leaving)
                .map(|replica| replica.name)
                .collect()
        };
        // Split brain: both answer.
        let a = list(&[("a", "ready", "self"), ("b", "ready", "gone")]);
        let b = list(&[("b", "ready", "self"), ("a", "ready", "gone")]);
        assert_eq!(leaving(vec![a.clone(), b.clone()]), [""; 0]);
        assert_eq!(leaving(vec![b, a.clone()]), [""; 0]);
        // It does not answer, and one of two others still sees it.
        let c = list(&[("c", "ready", "self"), ("b", "ready", "live")]);
        assert_eq!(leaving(vec![a.clone(), c]), [""; 0]);
        let c = list(&[("c", "ready", "self"), ("b", "ready", "unreachable")]);
        assert_eq!(leaving(vec![a, c]), ["b"]);
        // It drains, which the others have not heard yet.
        let drains = list(&[("a", "draining", "self"), ("b", "ready", "live")]);
        let b = list(&[("b", "ready", "self"), ("a", "ready", "live")]);
        assert_eq!(leaving(vec![b, drains]), ["a"]);
    }
}
