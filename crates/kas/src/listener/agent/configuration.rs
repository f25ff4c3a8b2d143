//! `AgentConfiguration/GetConfiguration`: the stream that makes an agent connected, and delivers its
//! configuration.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use agent_config::{ConfigBody, Shown};
use cluster::{Connection, Lease};
use grpc::Status;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use ids::{AgentId, ConnectionId};
use net::http::Body;
use planner::applier::AgentkVersion;
use proto::gitlab::agent::agent_configuration::rpc::ConfigurationRequest;
use tokio::time::Instant;

use super::{
    service::{FIRST_MESSAGE, decoded, encoding, read_one},
    transport::{HeldConfig, Transport, instance, revoked},
};
use crate::{listener::failed, registrar};

/// If an idle stream is cut before this age, then by a proxy.
const PROXY_CUT: Duration = Duration::from_secs(75);

impl Transport {
    pub(super) async fn get_configuration(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let correlation = routing::metadata::correlation(&HeaderMap::new());
        match self.open_configuration(request).await {
            Ok(body) => self.accepted(&correlation, body),
            Err(status) => failed(&status, &correlation),
        }
    }

    async fn open_configuration(self: &Arc<Self>, request: Request<Incoming>) -> Result<Body, Status> {
        let (head, body) = request.into_parts();
        let gzip = encoding(&head.headers);
        // Read while the token is looked up, so that data does not pile up. Dropped after its one message.
        let reading = read_one(body, *gzip.as_ref().unwrap_or(&false));
        let mut reading = std::pin::pin!(tokio::time::timeout(FIRST_MESSAGE, reading));
        let mut message = None;
        let authenticated = {
            let mut authenticate = std::pin::pin!(self.authenticate(&head.headers));
            tokio::select! {
                biased;
                authenticated = &mut authenticate => authenticated?,
                read = &mut reading => {
                    message = Some(read);
                    authenticate.await?
                }
            }
        };
        gzip?;
        self.look_for_proxy(&head.headers);
        let message = match message {
            Some(read) => read,
            None => reading.await,
        };
        let request: ConfigurationRequest = decoded(message).map_err(|status| self.malformed(status))?;
        let listener = &self.listener;
        self.check_rate(&authenticated)?;
        let agent = &authenticated.agent;
        let ours = instance(&head.headers, agent.id);
        let meta = request.agent_meta.unwrap_or_default();
        let meta = registrar::bounded(meta.version, meta.commit_id, meta.pod_namespace, meta.pod_name);
        let registers = request.skip_register && ours.is_none();
        let stand_in = if registers { registrar::stand_in(agent.id, &meta) } else { None };
        let id = ours.or(stand_in).unwrap_or_else(ConnectionId::random);
        let is_forbidden = listener.applier.forbids(AgentkVersion::of(&meta.version));
        // What kas applies must not be applied by the agent as well.
        let shown = if is_forbidden { Shown::WithoutGitops } else { Shown::All };
        let stream = listener.configs.subscribe(agent, &request.commit_id, shown);
        // If it registers, it is listed as a stand-in, which needs the name of its pod. `agentk doctor` sends
        // `skip_register` too but registers nowhere, so it is not listed.
        let lease = (!request.skip_register || stand_in.is_some()).then(|| {
            listener.tracker.connection(Connection {
                agent: agent.id,
                name: Arc::clone(&agent.name),
                project_id: agent.project_id,
                id,
                meta,
                connected_at: process::clock::wall(),
            })
        });
        listener.metrics.agent_connections.inc();
        if listener.stream_opened(agent.id, id) {
            tracing::info!(
                agent.id = agent.id.get(),
                agent.name = &*agent.name,
                connection.id = id.get(),
                "agent connected"
            );
        } else {
            // An agent that looks for another replica gets here every few seconds if there is only one.
            tracing::debug!(
                agent.id = agent.id.get(),
                connection.id = id.get(),
                "a connected agent opened one more configuration stream"
            );
        }
        let serial = listener.serial.fetch_add(1, Ordering::Relaxed);
        let aged = {
            let mut state = self.state();
            state.configs.push(HeldConfig {
                serial,
                stream: Arc::downgrade(&stream),
                authenticated: authenticated.clone(),
                id,
                ours: ours.is_some(),
                registers,
                since: Instant::now(),
            });
            state.aged
        };
        self.bind_connection(agent.id);
        let guard = ConfigGuard { transport: Arc::clone(self), agent: agent.id, id, serial, lease };
        if !listener.identity.still_valid(&authenticated).await {
            stream.end(Some(revoked()));
        } else if aged || listener.left.load(Ordering::Relaxed) {
            stream.end(None);
        }
        Ok(grpc::boxed(ConfigBody::new(stream, guard)))
    }
}

/// Removes a configuration stream when it ends.
struct ConfigGuard {
    transport: Arc<Transport>,
    agent: AgentId,
    id: ConnectionId,
    serial: u64,
    lease: Option<Lease>,
}

impl Drop for ConfigGuard {
    fn drop(&mut self) {
        let transport = &self.transport;
        drop(self.lease.take());
        transport.listener.metrics.agent_connections.dec();
        let mut state = transport.state();
        let mut cut = false;
        if let Some(at) = state.configs.iter().position(|held| held.serial == self.serial) {
            let held = state.configs.swap_remove(at);
            // The transport lives but its idle stream was cut early, so a proxy has cut it.
            let age = held.since.elapsed();
            cut = !state.aged && !held.ours && age > Duration::from_secs(20) && age < PROXY_CUT;
        }
        drop(state);
        if cut && !transport.is_proxied(self.agent) {
            transport.listener.remember_proxied(self.agent);
        }
        transport.bind_connection(self.agent);
        if transport.listener.stream_closed(self.agent, self.id) {
            tracing::info!(agent.id = self.agent.get(), connection.id = self.id.get(), "agent disconnected");
        }
    }
}
