//! `Kubernetes` with a real API server, as a ServiceAccount with exactly the documented Role.

use std::{collections::HashSet, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use discovery::{
    Discovery, FailureKind, KubeConfig, Kubernetes, PortSelector,
    contract::{self, Source},
};
use k8s_openapi::api::{core::v1::Pod, discovery::v1::EndpointSlice};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use testkit::kubernetes::{Access, Kubernetes as ApiServer};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::{Running, SOON, log, proxy::Proxy};

const NAMESPACE: &str = "shop";
const SERVICE: &str = "kas-gossip";

/// An API server, whose EndpointSlices the test writes, and a ServiceAccount.
struct World {
    api: ApiServer,
    slices: Api<EndpointSlice>,
    config: KubeConfig,
}

impl World {
    async fn start() -> Result<Self> {
        log::init();
        let api = ApiServer::start().await?;
        let token = api.service_account(NAMESPACE, "kas", Access::Nothing).await?;
        let config = config(&api.kubeconfig_with_token("kas", &token)?).await?;
        let admin = Client::try_from(config_of_admin(&api).await?)?;
        Ok(Self { slices: Api::namespaced(admin, NAMESPACE), api, config })
    }

    /// Gives the ServiceAccount the documented Role.
    async fn allow(&self, verbs: &[&str]) -> Result<()> {
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": { "name": "kas", "namespace": NAMESPACE },
            "rules": [{ "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs }],
        });
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": { "name": "kas", "namespace": NAMESPACE },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "kas" },
            "subjects": [{ "kind": "ServiceAccount", "namespace": NAMESPACE, "name": "kas" }],
        });
        for object in [role, binding] {
            self.api.apply(&object.to_string()).await?;
        }
        Ok(())
    }

    async fn allowed() -> Result<Self> {
        let world = Self::start().await?;
        world.allow(&["get", "list", "watch"]).await?;
        Ok(world)
    }

    /// Creates or replaces a slice. No controller runs here that would change it.
    async fn slice(
        &self,
        name: &str,
        service: &str,
        ready: bool,
        addresses: &[&str],
        ports: Value,
    ) -> Result<()> {
        let address_type = if addresses.iter().any(|ip| ip.contains(':')) { "IPv6" } else { "IPv4" };
        let endpoint = |ip: &&str| json!({ "addresses": [ip], "conditions": { "ready": ready } });
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": { "name": name, "labels": { "kubernetes.io/service-name": service } },
            "addressType": address_type,
            "endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>(),
            "ports": ports,
        });
        self.slices.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(slice)).await?;
        Ok(())
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.slices.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    fn discovery(&self, port: PortSelector) -> Kubernetes {
        Kubernetes::with_config(self.config.clone(), Some(NAMESPACE), SERVICE, port).unwrap()
    }

    /// A discovery whose connection to the API server can be interrupted.
    async fn behind_proxy(&self) -> Result<(Proxy, KubeConfig)> {
        let proxy = Proxy::start(self.api.server().trim_start_matches("https://").parse()?).await;
        let mut config = self.config.clone();
        config.cluster_url = format!("https://{}", proxy.address).parse()?;
        Ok((proxy, config))
    }
}

async fn config(kubeconfig: &std::path::Path) -> Result<KubeConfig> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    Ok(KubeConfig::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?)
}

async fn config_of_admin(api: &ApiServer) -> Result<KubeConfig> {
    config(&api.admin_kubeconfig()).await
}

fn port(name: &str, number: u16) -> Value {
    json!([{ "name": "api", "port": 8080, "protocol": "TCP" }, { "name": name, "port": number, "protocol": "UDP" }])
}

fn gossip() -> PortSelector {
    PortSelector::Name("gossip".to_owned())
}

fn is_forbidden<T>(result: kube::Result<T>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == 403)
}

#[tokio::test]
async fn the_documented_role_is_enough_to_read_slices() -> Result<()> {
    let world = World::allowed().await?;
    let client = Client::try_from(world.config.clone())?;

    // Two slices for IPv4 of one Service, with different ports as during a rollout, one for IPv6, and a slice
    // of another Service. No endpoint is ready.
    world.slice("a", SERVICE, false, &["10.0.0.1", "10.0.0.2"], port("gossip", 8150)).await?;
    world.slice("b", SERVICE, true, &["10.0.0.3"], port("gossip", 9150)).await?;
    world.slice("c", SERVICE, false, &["fd00::1"], port("gossip", 8150)).await?;
    world.slice("d", "other", true, &["10.9.9.9"], port("gossip", 8150)).await?;

    let mut by_name = Running::start(world.discovery(gossip()));
    by_name.publishes(&["10.0.0.1:8150", "10.0.0.2:8150", "10.0.0.3:9150", "[fd00::1]:8150"]).await;
    by_name.works().await;
    let mut by_number = Running::start(world.discovery(PortSelector::Number(7)));
    by_number.publishes(&["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7", "[fd00::1]:7"]).await;

    world.slice("b", SERVICE, true, &["10.0.0.3", "10.0.0.4"], port("gossip", 9150)).await?;
    by_name
        .publishes(&["10.0.0.1:8150", "10.0.0.2:8150", "10.0.0.3:9150", "10.0.0.4:9150", "[fd00::1]:8150"])
        .await;
    world.delete("a").await?;
    by_name.publishes(&["10.0.0.3:9150", "10.0.0.4:9150", "[fd00::1]:8150"]).await;
    // An address that moves between slices is one seed.
    world.slice("e", SERVICE, true, &["10.0.0.4"], port("gossip", 9150)).await?;
    world.slice("b", SERVICE, true, &["10.0.0.4"], port("gossip", 9150)).await?;
    by_name.publishes(&["10.0.0.4:9150", "[fd00::1]:8150"]).await;
    for name in ["b", "c", "e"] {
        world.delete(name).await?;
    }
    by_name.publishes(&[]).await;
    by_name.works().await;

    // The Role is sufficient, and the ServiceAccount has no other.
    let elsewhere: Api<EndpointSlice> = Api::namespaced(client.clone(), "default");
    assert!(is_forbidden(elsewhere.list(&ListParams::default()).await));
    let everywhere: Api<EndpointSlice> = Api::all(client.clone());
    assert!(is_forbidden(everywhere.list(&ListParams::default()).await));
    let here: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    assert!(here.get("d").await.is_ok());
    assert!(is_forbidden(here.delete("d", &DeleteParams::default()).await));
    let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
    assert!(is_forbidden(pods.list(&ListParams::default()).await));
    let mut denied =
        Running::start(Kubernetes::with_config(world.config.clone(), Some("default"), SERVICE, gossip())?);
    denied.fails_with("a Role in namespace default").await;
    Ok(())
}

#[tokio::test]
async fn a_restart_of_the_api_server_loses_nothing() -> Result<()> {
    let world = World::allowed().await?;
    world.slice("a", SERVICE, true, &["10.0.0.1", "10.0.0.2"], port("gossip", 8150)).await?;
    world.slice("b", SERVICE, true, &["10.0.0.3"], port("gossip", 8150)).await?;
    let mut running = Running::start(world.discovery(gossip()));
    running.publishes(&["10.0.0.1:8150", "10.0.0.2:8150", "10.0.0.3:8150"]).await;
    running.works().await;

    world.api.stop_api_server().await?;
    running.fails_with("could not watch EndpointSlices").await;
    running.stays().await;

    world.api.start_api_server().await?;
    world.delete("b").await?;
    running.publishes(&["10.0.0.1:8150", "10.0.0.2:8150"]).await;
    running.works().await;
    world.slice("c", SERVICE, true, &["10.0.0.4"], port("gossip", 8150)).await?;
    running.publishes(&["10.0.0.1:8150", "10.0.0.2:8150", "10.0.0.4:8150"]).await;
    Ok(())
}

#[tokio::test]
async fn missing_rules_are_logged_once_and_may_be_added_later() -> Result<()> {
    let log = log::collect();
    let world = World::start().await?;
    world.slice("a", SERVICE, true, &["10.0.0.1"], port("gossip", 8150)).await?;
    let (proxy, config) = world.behind_proxy().await?;
    let mut running = Running::start(Kubernetes::with_config(config, Some(NAMESPACE), SERVICE, gossip())?);
    running.fails_with("system:serviceaccount:shop:kas").await;
    assert_eq!(running.health.borrow().failure.as_ref().unwrap().kind, FailureKind::Denied);

    // Permission to list alone gives seeds, but no updates.
    world.allow(&["get", "list"]).await?;
    running.publishes(&["10.0.0.1:8150"]).await;
    running.fails_with("cannot watch resource").await;
    assert!(running.health.borrow().last_success.is_some());
    let denials = log.lines("lookup failed");
    assert_eq!(denials.len(), 1, "{denials:?}");
    for part in ["cannot list resource", "verbs [get, list, watch]", "namespace shop"] {
        assert!(denials[0].contains(part), "{denials:?}");
    }

    world.allow(&["get", "list", "watch"]).await?;
    running.works().await;
    world.slice("a", SERVICE, true, &["10.0.0.2"], port("gossip", 8150)).await?;
    running.publishes(&["10.0.0.2:8150"]).await;
    assert_eq!(log.lines("lookup failed").len(), 1);
    assert_eq!(log.lines("lookups work again").len(), 1);
    drop(proxy);
    Ok(())
}

#[tokio::test]
async fn an_unreachable_api_server_is_asked_with_backoff() -> Result<()> {
    let world = World::allowed().await?;
    let (proxy, config) = world.behind_proxy().await?;
    world.slice("a", SERVICE, true, &["10.0.0.1"], port("gossip", 8150)).await?;
    let mut running = Running::start(Kubernetes::with_config(config, Some(NAMESPACE), SERVICE, gossip())?);
    running.publishes(&["10.0.0.1:8150"]).await;

    proxy.cut(true);
    running.fails_with("could not watch EndpointSlices").await;
    let mut accepted = proxy.accepted();
    let before = *accepted.borrow_and_update();
    let began = Instant::now();
    timeout(SOON, accepted.wait_for(|accepted| *accepted >= before + 3)).await.context("asked again")??;
    // There are at least 0.8 s, 1.6 s and 3.2 s between the attempts; one may have been in progress.
    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    proxy.cut(false);
    running.works().await;
    Ok(())
}

#[tokio::test]
async fn a_port_that_no_endpoint_has_keeps_the_last_seeds() -> Result<()> {
    let world = World::allowed().await?;
    world.slice("a", SERVICE, true, &["10.0.0.1"], port("gossip", 8150)).await?;
    let mut running = Running::start(world.discovery(gossip()));
    running.publishes(&["10.0.0.1:8150"]).await;

    world.slice("a", SERVICE, true, &["10.0.0.1"], port("chatter", 8150)).await?;
    running.fails_with(r#"no port named "gossip"; its ports are {"api", "chatter"}"#).await;
    assert_eq!(running.health.borrow().failure.as_ref().unwrap().kind, FailureKind::Empty);
    running.stays().await;
    world.slice("a", SERVICE, true, &["10.0.0.2"], port("gossip", 8150)).await?;
    running.publishes(&["10.0.0.2:8150"]).await;
    running.works().await;
    Ok(())
}

/// A source for the contract: its slices change while the connection to the API server is interrupted.
struct Cuttable {
    world: World,
    proxy: Arc<Proxy>,
    config: KubeConfig,
}

#[async_trait]
impl Source for Cuttable {
    async fn discovery(&self) -> Box<dyn Discovery> {
        let port = PortSelector::Name("gossip".to_owned());
        Box::new(Kubernetes::with_config(self.config.clone(), Some(NAMESPACE), SERVICE, port).unwrap())
    }

    async fn know(&self, seeds: &HashSet<SocketAddr>) {
        let family = |v4: bool| -> Vec<String> {
            seeds.iter().filter(|seed| seed.is_ipv4() == v4).map(|seed| seed.ip().to_string()).collect()
        };
        for (name, ips) in [("v4", family(true)), ("v6", family(false))] {
            let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
            if ips.is_empty() {
                let _ = self.world.slices.delete(name, &DeleteParams::default()).await;
            } else {
                self.world.slice(name, SERVICE, true, &ips, port("gossip", 8150)).await.unwrap();
            }
        }
    }

    async fn fail(&self) {
        self.proxy.cut(true);
    }

    async fn recover(&self) {
        self.proxy.cut(false);
    }

    fn asked(&self) -> watch::Receiver<u64> {
        self.proxy.accepted()
    }

    fn connections(&self) -> watch::Receiver<usize> {
        self.proxy.open()
    }
}

#[tokio::test]
async fn keeps_the_contract() -> Result<()> {
    let world = World::allowed().await?;
    let (proxy, config) = world.behind_proxy().await?;
    contract::check(&Cuttable { world, proxy: Arc::new(proxy), config }).await;
    Ok(())
}
