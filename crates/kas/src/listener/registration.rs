//! `AgentRegistrar`: the service by which agents of 16.5 and later register.

use std::sync::Arc;

use grpc::Status;
use net::http::Body;
use proto::gitlab::agent::agent_registrar::rpc::{
    RegisterRequest, RegisterResponse, UnregisterRequest, UnregisterResponse,
};

use super::agent::{AgentCall, AgentService, ServiceAnswer, one};
use crate::registrar::{self, Registrar};

const REGISTER: &str = "/gitlab.agent.agent_registrar.rpc.AgentRegistrar/Register";
const UNREGISTER: &str = "/gitlab.agent.agent_registrar.rpc.AgentRegistrar/Unregister";

/// Serves `AgentRegistrar` over a [`Registrar`].
#[derive(Debug)]
pub struct Registration(pub Arc<Registrar>);

impl AgentService for Registration {
    fn paths(&self) -> &'static [&'static str] {
        &[REGISTER, UNREGISTER]
    }

    fn call(self: Arc<Self>, path: &str, call: AgentCall) -> ServiceAnswer {
        if path == REGISTER {
            Box::pin(async move { Ok(self.register(call).await?.into()) })
        } else {
            Box::pin(async move { Ok(self.unregister(call).await?.into()) })
        }
    }
}

impl Registration {
    async fn register(&self, call: AgentCall) -> Result<Body, Status> {
        let (call, RegisterRequest { agent_meta, pod_id }) = call.message().await?;
        let agent = call.authenticated.agent.id;
        let meta = agent_meta.unwrap_or_default();
        let meta = registrar::bounded(meta.version, meta.commit_id, meta.pod_namespace, meta.pod_name);
        let process = registrar::process(agent, pod_id);
        if self.0.register(&call.authenticated, process, meta) {
            call.charge();
            tracing::info!(
                agent.id = agent.get(),
                agent.name = &*call.authenticated.agent.name,
                connection.id = process.get(),
                "agent registered"
            );
        }
        if let Err(revoked) = call.recheck().await {
            self.0.unregister(agent, process);
            return Err(revoked);
        }
        call.registered(process);
        Ok(one(&RegisterResponse {}))
    }

    async fn unregister(&self, call: AgentCall) -> Result<Body, Status> {
        let (call, UnregisterRequest { pod_id, .. }) = call.message().await?;
        let agent = call.authenticated.agent.id;
        self.0.unregister(agent, registrar::process(agent, pod_id));
        Ok(one(&UnregisterResponse {}))
    }
}
