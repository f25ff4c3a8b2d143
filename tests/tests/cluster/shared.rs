//! Several replicas that share their state in a real Redis.

use std::{net::SocketAddr, os::unix::fs::PermissionsExt as _, time::Duration};

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Outcome};
use http::StatusCode;
use ids::TokenHash;
use proto::kas::api::v1::{TrackerStatusRequest, TrackerStatusResponse};
use serde_json::{Value, json};
use testkit::{
    endpoint::write_users,
    handler::path,
    kas::within,
    mesh::{Mesh, Options},
    process::SOON,
    prometheus::{Ask, ask},
    raw_agent::{Kind, RawAgent},
    redis::Redis,
};
use tokio::time::Instant;

use crate::ledger::echo;

/// TTL of a replica's liveness key, in seconds.
const TTL: u64 = 2;

async fn start(redis: &Redis, replicas: usize) -> Result<Mesh> {
    start_with(json!({ "server": { "address": redis.address().to_string() } }), replicas).await
}

/// Starts replicas with this section `redis`.
async fn start_with(redis: Value, replicas: usize) -> Result<Mesh> {
    let config = json!({
        "tracker": "redis",
        "redis": redis,
        "table": { "ttl": format!("{TTL}s") },
        "agent": { "redis_conn_info_ttl": "100s", "redis_conn_info_refresh": "50s" },
    });
    let discovery = Some(Value::Null);
    Mesh::start_with(Options { replicas, config, discovery, ..Options::default() }).await
}

/// Returns the keys in Redis, as an operator sees them.
async fn keys(redis: &Redis) -> Result<String> {
    cli(redis, &["--scan"]).await
}

async fn cli(redis: &Redis, arguments: &[&str]) -> Result<String> {
    let program = testkit::redis::program("redis-cli")?;
    let socket = redis.socket();
    let output = tokio::process::Command::new(program).arg("-s").arg(socket).args(arguments).output().await?;
    ensure!(output.status.success(), "redis-cli: {output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A CA and its certificates, as files: certificate and key of a server and of a client.
struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut parameters = rcgen::CertificateParams::new(Vec::<String>::new())?;
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca = rcgen::CertifiedIssuer::self_signed(parameters, rcgen::KeyPair::generate()?)?;
        std::fs::write(folder.path().join("ca.pem"), ca.pem())?;
        for name in ["server", "client"] {
            let key = rcgen::KeyPair::generate()?;
            let mut parameters = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
            // The name of the CA would make it look self-signed.
            parameters.distinguished_name = rcgen::DistinguishedName::new();
            parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
            std::fs::write(
                folder.path().join(format!("{name}.pem")),
                parameters.signed_by(&key, &ca)?.pem(),
            )?;
            std::fs::write(folder.path().join(format!("{name}.key")), key.serialize_pem())?;
        }
        Ok(Self { folder })
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }
}

#[tokio::test]
async fn any_replica_answers_for_any_agent() -> Result<()> {
    let redis = Redis::run().await?;
    let mut mesh = start(&redis, 3).await?;
    let _agents = [mesh.agent(0, 1, Kind::Ours, 2).await?, mesh.agent(1, 2, Kind::Old, 2).await?];
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    for replica in 0..3 {
        for agent in [1, 2] {
            echo(&mesh, replica, agent).await?;
        }
        mesh.kas(replica).metric_is("kas_redis_up", 1.0).await?;
        mesh.kas(replica).metric_is("kas_replicas_live", 3.0).await?;
        let listed = mesh.connections(replica, 1).await?;
        ensure!(listed.unanswered.is_empty(), "{listed:?}");
    }
    // A replica that shuts down removes its entries and is forgotten at once.
    let name = format!("kas:replica:{}", mesh.private(2));
    ensure!(keys(&redis).await?.contains(&name));
    mesh.leave(2, SOON).await?;
    ensure!(!keys(&redis).await?.contains(&name));
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    mesh.restart(2).await?;
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    echo(&mesh, 2, 1).await
}

#[tokio::test]
async fn entries_of_a_killed_replica_go_with_its_liveness_key() -> Result<()> {
    let redis = Redis::run().await?;
    let mut mesh = start(&redis, 3).await?;
    let agent = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    echo(&mesh, 1, 1).await?;
    mesh.kill(0).await?;
    let killed = Instant::now();
    mesh.converged(&[]).await?;
    let took = killed.elapsed();
    println!("forgotten {took:?} after the kill, with a life of {TTL} s");
    // The agent's own hash lives for 100 s.
    assert!(took < Duration::from_secs(TTL + 15), "{took:?}");
    // The hash of the agent still exists, but is no longer valid.
    ensure!(keys(&redis).await?.contains("tunnel_tracker:conn_by_agent_id:"));
    drop(agent);
    // The agent connects to another replica, and the replica restarts without it.
    let _agent = mesh.agent(1, 1, Kind::Ours, 2).await?;
    mesh.restart(0).await?;
    mesh.converged(&[(1, 1)]).await?;
    echo(&mesh, 0, 1).await?;
    echo(&mesh, 2, 1).await
}

#[tokio::test]
async fn without_redis_local_and_cached_agents_are_served_and_others_get_the_reason() -> Result<()> {
    let redis = Redis::run().await?;
    let mesh = start(&redis, 2).await?;
    let _agents = [mesh.agent(0, 1, Kind::Ours, 2).await?, mesh.agent(1, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    echo(&mesh, 0, 2).await?;
    redis.stop().await;
    mesh.kas(0).metric_is("kas_redis_up", 0.0).await?;
    mesh.kas(1).metric_is("kas_redis_up", 0.0).await?;
    echo(&mesh, 0, 1).await?;
    echo(&mesh, 0, 2).await?;
    let caller = mesh.caller(0).await?;
    let request = caller.to_agent(3, &path("Echo")).header("grpc-timeout", "500m");
    let got = caller.call(request, &[b"x"]).await?;
    assert_eq!(
        (got.status.code(), got.status.outcome()),
        (Code::DeadlineExceeded, Some(Outcome::NotStarted))
    );
    assert!(got.status.message().contains("Redis cannot be reached"), "{}", got.status);
    let told: TrackerStatusResponse =
        caller.unary("/kas.api.v1.KasApi/TrackerStatus", &TrackerStatusRequest {}).await?;
    assert_eq!((told.backend.as_str(), told.agents), ("redis", 1));
    assert!(told.latency_micros.is_some() && !told.last_error.is_empty(), "{told:?}");
    let alarms = mesh.list(0).await?.alarms;
    assert!(alarms.iter().any(|alarm| alarm.contains("Redis cannot be reached")), "{alarms:?}");
    // The replica is not ready once the others have forgotten it.
    within(SOON, "it is not ready", async || {
        let (status, why) = mesh.kas(0).get("/readiness").await?;
        let told = status != StatusCode::OK && why.contains("Redis cannot be reached");
        Ok(if told { Ok(()) } else { Err((status, why)) })
    })
    .await?;
    // It still serves all requests.
    echo(&mesh, 0, 2).await?;
    let _late = mesh.agent(1, 3, Kind::Ours, 1).await?;
    let waiting = tokio::spawn(async move {
        let request = caller.to_agent(3, &path("Echo"));
        caller.call(request, &[b"waited"]).await
    });
    redis.start().await?;
    let got = waiting.await?.context("an answer")?;
    assert_eq!(got.status.code(), Code::Ok, "{}", got.status);
    mesh.ready(0).await?;
    mesh.converged(&[(1, 0), (2, 1), (3, 1)]).await?;
    Ok(())
}

#[tokio::test]
async fn the_rate_of_a_token_is_shared_by_all_replicas() -> Result<()> {
    const BURST: u64 = 10;
    let redis = Redis::run().await?;
    let config = json!({
        "tracker": "redis",
        "redis": { "server": { "address": redis.address().to_string() } },
        "limits": { "token_burst": BURST },
        "agent": { "listen": { "connections_per_token_per_minute": 1 } },
    });
    let options = Options { replicas: 2, config, discovery: Some(Value::Null), ..Options::default() };
    let mesh = Mesh::start_with(options).await?;
    let limited = "kas_refusals_total{listener=\"Agent\",reason=\"RateLimit\"}";
    let attempt = async |replica: usize| -> Result<()> {
        // A new connection: one with failures is soon closed.
        let wrong = RawAgent::connect(mesh.kas(replica).agent, "wrong", Kind::Old).await?;
        let error = wrong.tunnel().await.err().context("a wrong token opens no tunnel")?;
        ensure!(error.downcast::<grpc::Status>()?.code() == Code::Unauthenticated);
        Ok(())
    };
    let told = async |least: u64| {
        within(SOON, "the others are told", async || {
            let key = "return redis.call('GET', redis.call('KEYS', 'gitlab-kas:kas:count:failures:*')[1] or '') or 0";
            let count: u64 = cli(&redis, &["EVAL", key, "0"]).await?.trim().parse()?;
            Ok(if count >= least { Ok(()) } else { Err(count) })
        })
        .await
    };
    for _ in 0..BURST + 2 {
        attempt(0).await?;
    }
    mesh.kas(0).metric_is(limited, 2.0).await?;
    told(BURST).await?;
    // This replica has not seen the token: the first attempt is looked up and counted, and returns the counts
    // of the others.
    attempt(1).await?;
    told(BURST + 1).await?;
    let mut attempts = 1;
    while mesh.kas(1).metric(limited).await? < 1.0 {
        attempt(1).await?;
        attempts += 1;
    }
    ensure!(
        attempts < BURST / 2,
        "{attempts} attempts at the second replica, of {BURST} that one alone allows"
    );
    Ok(())
}

/// A user of the endpoint for kubectl, whose requests of all kinds are counted in Redis.
struct Counted<'a> {
    mesh: &'a Mesh,
    redis: &'a Redis,
    name: &'a str,
    token: &'a str,
}

impl Counted<'_> {
    /// Where a replica serves it.
    const DOOR: u16 = 8154;

    /// Begins a request, and returns whether that is allowed: questions by PromQL at the first replica, and
    /// lists at the others.
    async fn may_begin(&self, replica: usize) -> Result<bool> {
        let (path, form): (_, &[_]) = match replica {
            0 => ("/fleet/prometheus/select/all/api/v1/query", &[("query", "up")]),
            _ => ("/agents", &[]),
        };
        let address = SocketAddr::new(self.mesh.private(replica).ip(), Self::DOOR);
        let request = Ask { path, form, token: Some(self.token), is_get: replica > 0, ..Ask::default() };
        match ask(address, &request).await? {
            // No agent is connected, so nobody answers the question.
            (200, _) => Ok(true),
            (503, told) if told["errorType"] == "unavailable" => Ok(true),
            (429, told) => {
                ensure!(
                    told["message"].as_str().is_some_and(|text| text.contains("limits.per_caller")),
                    "{told}"
                );
                Ok(false)
            }
            other => anyhow::bail!("{other:?}"),
        }
    }

    /// Waits until Redis has counted as many. Returns in how many windows.
    async fn counted(&self, count: u64) -> Result<u64> {
        let hash = TokenHash::of(format!("kas:{}", self.name).as_bytes()).to_hex();
        let script = format!(
            "local keys, sum = redis.call('KEYS', 'gitlab-kas:kas:count:callers:*:{hash}'), 0
             for _, key in ipairs(keys) do sum = sum + redis.call('GET', key) end
             return {{#keys, sum}}"
        );
        within(SOON, "the requests are counted", async || {
            let told = cli(self.redis, &["EVAL", &script, "0"]).await?;
            let numbers: Vec<u64> = told.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
            let [windows, sum] = numbers[..] else { anyhow::bail!("{told}") };
            Ok(if sum == count { Ok(windows) } else { Err(sum) })
        })
        .await
    }
}

#[tokio::test]
async fn the_rate_of_a_caller_is_shared_by_all_replicas() -> Result<()> {
    const BURST: u64 = 100;
    const USERS: [(&str, &str); 2] = [
        ("first", "kasu_firstfirstfirstfirstfirstfirstfirstfirstfir"),
        ("other", "kasu_otherotherotherotherotherotherotherotheroth"),
    ];
    let (redis, files) = (Redis::run().await?, tempfile::tempdir()?);
    let users = files.path().join("users.yaml");
    write_users(&users, &USERS)?;
    let config = json!({
        "tracker": "redis",
        "redis": { "server": { "address": redis.address().to_string() } },
        "agent": { "kubernetes_api": {
            "users": { "file": users },
            "access": [{ "agents": "all", "users": ["kas:first", "kas:other"], "as": "agent" }],
            "limits": { "per_caller": { "requests_per_second": 1, "burst": BURST } },
        } },
    });
    let discovery = Some(Value::Null);
    let options = Options { replicas: 2, config, discovery, start: false, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    for n in 0..2 {
        let door = SocketAddr::new(mesh.private(n).ip(), Counted::DOOR);
        mesh.add_config_of(n, json!({ "agent": { "kubernetes_api": { "listen": { "address": door } } } }));
    }
    mesh.start_replicas(&[0, 1]).await?;
    for (name, token) in USERS {
        let user = Counted { mesh: &mesh, redis: &redis, name, token };
        // Both replicas know the user.
        for n in 0..2 {
            ensure!(user.may_begin(n).await?);
        }
        user.counted(2).await?;
        let mut begun = 2;
        while user.may_begin(0).await? {
            begun += 1;
        }
        ensure!(begun >= BURST - 1, "{begun}");
        user.counted(begun).await?;
        // The other one has not refused anything yet, and learns of the others with the next request.
        let mut more = 0;
        while user.may_begin(1).await? {
            more += 1;
            if user.counted(begun + more).await? > 1 {
                break;
            }
        }
        // Counts are those of 100 s. If the next ones have begun meanwhile, the burst may be used again.
        if user.counted(begun + more).await? > 1 {
            continue;
        }
        ensure!(more < BURST / 4, "{more} at the second replica, of {BURST} that one alone allows");
        return Ok(());
    }
    anyhow::bail!("twice, another window of 100 s began meanwhile")
}

#[tokio::test]
async fn every_option_of_a_server_reaches_it() -> Result<()> {
    let files = Certificates::new()?;
    let port = testkit::redis::free_port().await?;
    let redis = Redis::run_with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &files.path("server.pem"),
        "--tls-key-file",
        &files.path("server.key"),
        "--tls-ca-cert-file",
        &files.path("ca.pem"),
    ])
    .await?;
    let user = ["ACL", "SETUSER", "kas", "on", ">hunter2", "~team:*", "&team:*", "+@all"];
    cli(&redis, &user).await?;
    std::fs::write(files.path("password"), "hunter2\n")?;
    // kas refuses secrets that everyone may read.
    for secret in ["password", "client.key"] {
        std::fs::set_permissions(files.path(secret), std::fs::Permissions::from_mode(0o600))?;
    }
    let section = json!({
        "server": { "address": format!("rediss://127.0.0.1:{port}/3") },
        "username": "kas",
        "password_file": files.path("password"),
        "key_prefix": "team",
        "pool_size": 2,
        "tls": {
            "ca_certificate_file": files.path("ca.pem"),
            "certificate_file": files.path("client.pem"),
            "key_file": files.path("client.key"),
        },
    });
    let mesh = start_with(section, 2).await?;
    let _agent = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    echo(&mesh, 1, 1).await?;
    ensure!(keys(&redis).await?.is_empty(), "nothing is in database 0");
    let found = cli(&redis, &["-n", "3", "--scan"]).await?;
    ensure!(!found.is_empty() && found.lines().all(|key| key.starts_with("team:")), "{found}");
    // Each hash lives for the configured time, or up to four times as long.
    let key =
        "return redis.call('PTTL', 'team:tunnel_tracker:conn_by_agent_id:' .. string.char(1,0,0,0,0,0,0,0))";
    let left: u64 = cli(&redis, &["-n", "3", "EVAL", key, "0"]).await?.trim().parse()?;
    ensure!((40_000..=400_000).contains(&left), "{left}");
    // Two connections and a subscription for each replica.
    let clients = cli(&redis, &["CLIENT", "LIST"]).await?;
    let ours = clients.lines().filter(|line| line.contains("user=kas")).count();
    ensure!((4..=6).contains(&ours), "{clients}");
    for n in 0..2 {
        let log = mesh.kas(n).process.log();
        ensure!(!log.contains("hunter2"), "a log shows the password");
    }
    Ok(())
}

#[tokio::test]
async fn rotated_passwords_and_certificates_are_used_without_a_restart() -> Result<()> {
    let files = Certificates::new()?;
    let port = testkit::redis::free_port().await?;
    let redis = Redis::run_with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &files.path("server.pem"),
        "--tls-key-file",
        &files.path("server.key"),
        "--tls-ca-cert-file",
        &files.path("ca.pem"),
    ])
    .await?;
    let user = async |password: &str| {
        let password = format!(">{password}");
        let words = ["ACL", "SETUSER", "kas", "resetpass", "on", &password, "~*", "&*", "+@all"];
        cli(&redis, &words).await
    };
    let write = |name: &str, content: &[u8]| -> Result<()> {
        // Atomically.
        std::fs::write(files.path("next"), content)?;
        std::fs::set_permissions(files.path("next"), std::fs::Permissions::from_mode(0o600))?;
        Ok(std::fs::rename(files.path("next"), files.path(name))?)
    };
    user("hunter2").await?;
    write("password", b"hunter2\n")?;
    for key in ["client.key", "server.key"] {
        write(key, &std::fs::read(files.path(key))?)?;
    }
    let section = json!({
        "server": { "address": format!("rediss://127.0.0.1:{port}") },
        "username": "kas",
        "password_file": files.path("password"),
        "tls": {
            "ca_certificate_file": files.path("ca.pem"),
            "certificate_file": files.path("client.pem"),
            "key_file": files.path("client.key"),
        },
    });
    let mesh = start_with(section, 2).await?;
    let _agent = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    let alarm = async |is_there: bool| {
        within(SOON, "what Redis refuses is an alarm", async || {
            let alarms = mesh.list(0).await?.alarms;
            let told = alarms.iter().any(|alarm| alarm.contains("Redis refuses the current password"));
            Ok(if told == is_there { Ok(()) } else { Err(alarms) })
        })
        .await
    };
    let logged = async |text: &str| {
        within(SOON, "it is in the log", async || {
            let log = mesh.kas(0).process.log();
            Ok(if log.contains(text) { Ok(()) } else { Err(log) })
        })
        .await
    };
    let dialled_again = async || -> Result<()> {
        cli(&redis, &["CLIENT", "KILL", "USER", "kas"]).await?;
        for n in 0..2 {
            mesh.kas(n).metric_is("kas_redis_up", 1.0).await?;
            mesh.kas(n).metric_is("kas_redis_listening", 1.0).await?;
        }
        echo(&mesh, 1, 1).await
    };
    // The file changes first: the previous content is used until Redis accepts the new one.
    write("password", b"hunter3\n")?;
    logged("the previous ones are tried too").await?;
    alarm(true).await?;
    dialled_again().await?;
    user("hunter3").await?;
    logged("Redis accepts the current password and certificates").await?;
    alarm(false).await?;
    dialled_again().await?;
    // Invalid content is not used and is reported: an empty password, a key of another certificate.
    write("password", b"\n")?;
    logged("redis.password_file: found an empty file").await?;
    write("password", b"hunter3\n")?;
    let key = std::fs::read(files.path("client.key"))?;
    write("client.key", &std::fs::read(files.path("server.key"))?)?;
    logged("redis.tls").await?;
    dialled_again().await?;
    write("client.key", &key)?;
    logged("the files match the content in use again").await?;
    // Another certificate of the same CA.
    for (from, to) in [("server.pem", "client.pem"), ("server.key", "client.key")] {
        write(to, &std::fs::read(files.path(from))?)?;
    }
    logged("reloaded: new connections to Redis use the new files").await?;
    dialled_again().await?;
    for n in 0..2 {
        let log = mesh.kas(n).process.log();
        ensure!(!log.contains("hunter") && !log.contains("PRIVATE KEY"), "a log shows a secret");
    }
    let file = files.path("client.pem");
    let ends = format!(
        "kas_certificate_not_after_timestamp_seconds{{section=\"redis\",part=\"Leaf\",file=\"{file}\"}}"
    );
    ensure!(mesh.kas(0).metric(&ends).await? > 0.0);
    Ok(())
}
