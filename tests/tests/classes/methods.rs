//! The gRPC methods.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use grpc::{Code, Status};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use serde_json::json;
use testkit::{
    caller::{Caller, Jwt, frame},
    gitlab::GitLab,
    kas::{merge, token},
    mesh::{Mesh, Options},
    process::soon,
};

/// Who may call a method, and so at which listener it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Clients with a JWT of the API secret: the API listener.
    Caller,
    /// The same, for a method of an agent: the listener passes it on.
    CallerOfAgent,
    /// Everybody: the API listener.
    Everybody,
    /// An agent with its token: the agent listener.
    Agent,
    /// Another replica, with a JWT of the private secret: the private listener.
    Replica,
}

/// Every method of kas and agentk. A new one must be added here, with who may call it.
const METHODS: &[(Class, &str, &[&str])] = &[
    (
        Class::Caller,
        "kas.api.v1.KasApi",
        &[
            "ConnectedAgentsForProject",
            "ConnectedAgentsById",
            "GetPods",
            "WatchConnectedAgents",
            "ListReplicas",
            "ExplainAgent",
            "TrackerStatus",
            "GetSync",
            "WatchSync",
            "ControlSync",
            "Diff",
            "ListEnvironments",
            "ListHooks",
            "ReplayHooks",
            "WatchView",
            "QueryView",
            "ListComponents",
            "ListApplications",
        ],
    ),
    (
        Class::Caller,
        "gitlab.agent.agent_tracker.rpc.AgentTracker",
        &["GetConnectedAgents", "GetConnectedAgentsByAgentIDs", "GetConnectedAgentksByAgentIDs"],
    ),
    (Class::Caller, "gitlab.agent.configuration_project.rpc.ConfigurationProject", &["ListAgentConfigFiles"]),
    (Class::Caller, "gitlab.agent.notifications.rpc.Notifications", &["GitPushEvent"]),
    (Class::Caller, "gitlab.agent.server_info.rpc.ServerInfo", &["GetServerInfo"]),
    (Class::CallerOfAgent, "gitlab.agent.kubernetes_api.rpc.KubernetesApi", &["MakeRequest"]),
    (Class::CallerOfAgent, "kas.bench.v1.Bench", &["Echo", "Download", "Upload", "Hold"]),
    (Class::Agent, "gitlab.agent.reverse_tunnel.rpc.ReverseTunnel", &["Connect"]),
    (Class::Agent, "gitlab.agent.agent_configuration.rpc.AgentConfiguration", &["GetConfiguration"]),
    (Class::Agent, "gitlab.agent.agent_registrar.rpc.AgentRegistrar", &["Register", "Unregister"]),
    (Class::Agent, "gitlab.agent.gitops.rpc.Gitops", &["GetObjectsToSynchronize"]),
    (Class::Agent, "gitlab.agent.flux.rpc.GitLabFlux", &["ReconcileProjects"]),
    (Class::Agent, "gitlab.agent.gitlab_access.rpc.GitlabAccess", &["MakeRequest"]),
    (Class::Replica, "kas.internal.v1.TableSync", &["Watch"]),
    (Class::Replica, "kas.internal.v1.Tunnels", &["Borrow"]),
    (Class::Replica, "kas.internal.v1.Replica", &["Connections", "Explain"]),
    (Class::Replica, "kas.internal.v1.GitEvents", &["Pushed"]),
    (Class::Replica, "kas.internal.v1.Sync", &["Get", "Control", "Diff", "DiffFor", "Environments"]),
    (Class::Replica, "kas.internal.v1.Fleet", &["KasYaml"]),
    (Class::Replica, "kas.internal.v1.Mailbox", &["Accept", "Exchange", "Define", "List", "Replay"]),
];

/// Methods of libraries.
const OTHERS: &[(Class, &str, &[&str])] = &[
    (Class::Everybody, "grpc.health.v1.Health", &["Check", "Watch"]),
    (Class::Caller, "grpc.reflection.v1.ServerReflection", &["ServerReflectionInfo"]),
    (Class::Caller, "grpc.reflection.v1alpha.ServerReflection", &["ServerReflectionInfo"]),
];

fn methods(table: &[(Class, &str, &[&str])]) -> Vec<(Class, String)> {
    let of = |(class, service, methods): &(Class, &str, &[&str])| -> Vec<(Class, String)> {
        methods.iter().map(|method| (*class, format!("/{service}/{method}"))).collect()
    };
    table.iter().flat_map(of).collect()
}

#[test]
fn every_method_of_the_descriptors_has_a_class() {
    let files = FileDescriptorSet::decode(proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut described = BTreeSet::new();
    for file in &files.file {
        for service in &file.service {
            for method in &service.method {
                described.insert(format!("/{}.{}/{}", file.package(), service.name(), method.name()));
            }
        }
    }
    let listed = methods(METHODS);
    let paths: BTreeSet<String> = listed.iter().map(|(_, path)| path.clone()).collect();
    assert_eq!(paths.len(), listed.len(), "one is listed twice");
    let without: Vec<_> = described.difference(&paths).collect();
    assert!(without.is_empty(), "without a class: {without:?}");
    let gone: Vec<_> = paths.difference(&described).collect();
    assert!(gone.is_empty(), "no such methods: {gone:?}");
}

/// A replica that serves everything, and what it accepts.
struct Lab {
    mesh: Mesh,
    _gitlab: GitLab,
    _files: tempfile::TempDir,
}

impl Lab {
    async fn start() -> Result<Self> {
        let gitlab = GitLab::start().await?;
        gitlab.know(&token(1), 1, "agent-1", 7);
        let files = tempfile::tempdir()?;
        let mut config = gitlab.config();
        let hooks = json!({ "listen": { "address": "127.0.0.1:0" }, "secrets_dir": files.path() });
        merge(&mut config, json!({ "hooks": hooks }));
        let mesh = Mesh::start_with(Options { replicas: 1, config, ..Options::default() }).await?;
        Ok(Self { mesh, _gitlab: gitlab, _files: files })
    }

    /// Returns the credentials of each class, with a name.
    fn credentials(&self) -> Vec<(Option<Class>, &'static str, Option<String>)> {
        let replica = |secret: &[u8]| Jwt::new(secret).claim("iss", json!("gitlab-kas")).encode();
        vec![
            (Some(Class::Caller), "of a caller", Some(Jwt::new(self.mesh.api_secret()).encode())),
            (Some(Class::Replica), "of a replica", Some(replica(self.mesh.private_secret()))),
            (Some(Class::Agent), "of an agent", Some(token(1))),
            (None, "none", None),
            (None, "unknown", Some("unknown".to_owned())),
            (None, "of another installation", Some(Jwt::new(&[7; 32]).encode())),
            (None, "of a replica of another installation", Some(replica(&[7; 32]))),
            (None, "of a caller for replicas", Some(Jwt::new(self.mesh.private_secret()).encode())),
            (None, "unsigned", Some(Jwt::new(b"").algorithm(None).encode())),
        ]
    }

    /// Calls a method of a class with a credential; returns the status, or that it is served: `Ok`.
    async fn call(&self, class: Class, path: &str, credential: Option<String>) -> Result<Status> {
        let address = match class {
            Class::Caller | Class::CallerOfAgent | Class::Everybody => self.mesh.api(0),
            Class::Agent => self.mesh.agents(0),
            Class::Replica => self.mesh.private(0),
        };
        let caller = Caller::connect(address, credential).await?;
        let mut request = caller.request(path);
        if class == Class::CallerOfAgent {
            request = request.header("kas-agent-id", 1);
        }
        if matches!(class, Class::Caller | Class::CallerOfAgent) {
            request = request.header("grpc-timeout", "300m");
        }
        let mut stream = caller.open(request).await?;
        // A refusal may come before this is taken.
        if stream.send(frame(b"")).await.is_ok() {
            let _ = stream.half_close();
        }
        let (_, headers) =
            stream.head().await.map_err(|reason| anyhow::anyhow!("{path}: {reason:?}"))?.clone();
        Ok(Status::from_headers(&headers).unwrap_or(Status::new(Code::Ok, "it is served")))
    }
}

#[tokio::test]
async fn every_method_is_refused_without_the_credential_of_its_class() -> Result<()> {
    let lab = Lab::start().await?;
    let all: Vec<(Class, String)> = [methods(METHODS), methods(OTHERS)].concat();
    let credentials = lab.credentials();
    let calls = all.iter().flat_map(|(class, path)| {
        credentials.iter().map(move |(of, name, credential)| (*class, path, *of, *name, credential.clone()))
    });
    let lab = &lab;
    let answers: Vec<()> = stream::iter(calls)
        .map(|(class, path, of, name, credential)| async move {
            let status = soon(path, lab.call(class, path, credential)).await?;
            let is_right = match class {
                Class::Everybody => true,
                Class::CallerOfAgent => of == Some(Class::Caller),
                class => of == Some(class),
            };
            let (code, what) = (status.code(), format!("{class:?} {path}, {name}: {status}"));
            if is_right {
                let refusals = [Code::Unauthenticated, Code::PermissionDenied, Code::Unimplemented];
                // A wrong credential is told apart from a request that is not right.
                ensure!(!refusals.contains(&code), "{what}");
            } else {
                ensure!(code == Code::Unauthenticated, "{what}");
            }
            anyhow::Ok(())
        })
        .buffer_unordered(8)
        .try_collect()
        .await?;
    ensure!(answers.len() == all.len() * credentials.len());
    Ok(())
}

#[tokio::test]
async fn no_listener_serves_methods_of_another_class() -> Result<()> {
    let lab = Lab::start().await?;
    let credential = |wanted: Class| {
        let found = lab.credentials().into_iter().find(|(of, ..)| *of == Some(wanted));
        found.and_then(|(_, _, credential)| credential).context("a credential")
    };
    let all = methods(METHODS);
    for at in [Class::Caller, Class::Agent, Class::Replica] {
        let credential = credential(at)?;
        for (class, path) in all.iter().filter(|(class, _)| *class != at) {
            let status = lab.call(at, path, Some(credential.clone())).await?;
            ensure!(status.code() == Code::Unimplemented, "{class:?} {path} at that of {at:?}: {status}");
        }
    }
    Ok(())
}
