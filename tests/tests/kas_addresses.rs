//! How agentk reaches kas: proxies of the environment, headers and server names for proxies, several
//! addresses, and `agentk doctor`.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{net::SocketAddr, path::Path};

use anyhow::{Result, ensure};
use proto::kas::api::v1::{ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    bench::echo,
    certificates::Certificates,
    kas::{Kas, eventually, token},
    mesh::BY_ID,
    process::Process,
    proxy::{ConnectProxy, Passes, Proxy},
    raw_agent::{Kind, RawAgent},
};

/// A name that only a proxy resolves.
const NAME: &str = "kas.test";

async fn plain() -> Result<Kas> {
    Kas::start_with_config(json!({ "agent": { "listen": { "websocket": true } } })).await
}

async fn secure(files: &Certificates) -> Result<Kas> {
    let listen = json!({ "websocket": true, "certificate_file": files.certificate, "key_file": files.key });
    Kas::start_with_config(json!({ "agent": { "listen": listen } })).await
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Waits until agentk has logged `what`; no line contains the value of a secret.
async fn says(agentk: &Agentk, what: &str) -> Result<()> {
    eventually(&format!("agentk says {what:?}"), async || {
        let log = agentk.process.log();
        Ok(if log.contains(what) { Ok(()) } else { Err(log) })
    })
    .await?;
    ensure!(!agentk.process.log().contains("sesame"), "{}", agentk.process.log());
    Ok(())
}

#[tokio::test]
async fn every_scheme_uses_the_proxy_of_its_variable() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let files = Certificates::new(dir.path(), &[NAME])?;
    let (plain, secure) = (plain().await?, secure(&files).await?);
    for (kas, scheme, variable) in [
        (&plain, "grpc", "HTTPS_PROXY"),
        (&secure, "grpcs", "https_proxy"),
        (&plain, "ws", "http_proxy"),
        (&secure, "wss", "HTTPS_PROXY"),
    ] {
        let proxy = ConnectProxy::start(kas.agent, None).await?;
        let named = format!("http://user:open%20sesame@{}", proxy.address);
        let url = format!("{scheme}://{NAME}:8150");
        let arguments = ["--ca-cert-file", text(&files.ca)];
        let agentk = Agentk::start_with_url(&url, &token(1), &arguments, &[(variable, &named)]).await?;
        agentk.connected().await?;
        echo(&kas.caller().await?, 1, "x").await?;
        let asked = proxy.asked();
        ensure!(asked[0].starts_with("CONNECT kas.test:8150 HTTP/1.1\r\n"), "{scheme}: {asked:?}");
        // user:open sesame
        ensure!(asked[0].contains("roxy-authorization: Basic dXNlcjpvcGVuIHNlc2FtZQ=="), "{asked:?}");
        says(&agentk, "kas is reached through a proxy").await?;
        drop(agentk);
        kas.metric_is("kas_agent_transports", 0.0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn https_proxies_are_reached_over_tls() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let files = Certificates::new(dir.path(), &[NAME, "127.0.0.1"])?;
    let kas = secure(&files).await?;
    let proxy = ConnectProxy::start_tls(kas.agent, &files).await?;
    let named = format!("https://user:sesame@{}", proxy.address);
    let env = [("HTTPS_PROXY", &*named)];
    for scheme in ["grpcs", "wss"] {
        let url = format!("{scheme}://{NAME}");
        let ca = ["--ca-cert-file", text(&files.ca)];
        let agentk = Agentk::start_with_url(&url, &token(1), &ca, &env).await?;
        agentk.connected().await?;
        echo(&kas.caller().await?, 1, "x").await?;
        let asked = proxy.asked();
        ensure!(asked.last().unwrap().starts_with("CONNECT kas.test:443 HTTP/1.1\r\n"), "{asked:?}");
        says(&agentk, "kas is reached through a proxy").await?;
        // A proxy with an untrusted certificate gets no credentials.
        let before = proxy.asked().len();
        let stranger = Agentk::start_with_url(&url, &token(2), &[], &env).await?;
        says(&stranger, "cannot connect to the proxy https://127.0.0.1").await?;
        drop(stranger);
        ensure!(proxy.asked().len() == before, "{:?}", proxy.asked());
        drop(agentk);
        kas.metric_is("kas_agent_transports", 0.0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn hosts_in_no_proxy_are_dialled_directly() -> Result<()> {
    let kas = plain().await?;
    let closed = "http://user:sesame@127.0.0.1:1";
    // This host is reached without a proxy, whatever the variables are.
    let agentk =
        Agentk::start_with_url(&format!("grpc://{}", kas.agent), &token(1), &[], &[("HTTPS_PROXY", closed)])
            .await?;
    agentk.connected().await?;
    let env = [("HTTPS_PROXY", closed), ("no_proxy", "other.test, .kas.test")];
    let excepted = Agentk::start_with_url("grpc://below.kas.test:8150", &token(1), &[], &env).await?;
    says(&excepted, "cannot connect to grpc://below.kas.test:8150").await?;
    let other = Agentk::start_with_url("grpc://kas.test:8150", &token(1), &[], &env).await?;
    says(
        &other,
        "cannot connect to the proxy http://127.0.0.1:1 that HTTPS_PROXY names for grpc://kas.test:8150",
    )
    .await?;
    Ok(())
}

#[tokio::test]
async fn refusals_of_a_proxy_are_logged_with_the_reason() -> Result<()> {
    let nowhere: SocketAddr = "127.0.0.1:1".parse()?;
    for (refusal, words) in [
        ("HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n", "wants credentials"),
        (
            "HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n",
            "CONNECT kas.test:443 with HTTP 403 Forbidden",
        ),
    ] {
        let proxy = ConnectProxy::start(nowhere, Some(refusal)).await?;
        let named = format!("http://user:sesame@{}", proxy.address);
        let env = [("HTTPS_PROXY", &*named)];
        let agentk = Agentk::start_with_url("grpcs://kas.test", &token(1), &[], &env).await?;
        says(&agentk, words).await?;
    }
    Ok(())
}

#[tokio::test]
async fn extra_headers_reach_proxies_over_grpc_and_websocket() -> Result<()> {
    let kas = plain().await?;
    for (passes, scheme) in [(Passes::Grpc, "grpc"), (Passes::WebSocket, "ws")] {
        let proxy =
            Proxy::nginx(kas.agent, passes, r#"if ($http_x_proxy_key != "open sesame") { return 403; }"#)
                .await?;
        let url = format!("{scheme}://{}", proxy.address);
        let key = ["--kas-header", "X-Proxy-Key: open sesame", "--kas-header", "x-other: 1"];
        let agentk = Agentk::start_with_url(&url, &token(1), &key, &[]).await?;
        agentk.connected().await?;
        says(&agentk, "connected to kas").await?;
        drop(agentk);
        let without = Agentk::start_with_url(&url, &token(1), &[], &[]).await?;
        says(&without, "403").await?;
    }
    Ok(())
}

#[tokio::test]
async fn certificate_is_verified_against_the_configured_name() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let files = Certificates::new(dir.path(), &[NAME])?;
    let kas = secure(&files).await?;
    let ca = ["--kas-ca-cert-file", text(&files.ca)];
    for scheme in ["grpcs", "wss"] {
        let url = format!("{scheme}://{}", kas.agent);
        let named = [&ca[..], &["--kas-tls-server-name", NAME]].concat();
        Agentk::start_with_url(&url, &token(1), &named, &[]).await?.connected().await?;
        says(&Agentk::start_with_url(&url, &token(1), &ca, &[]).await?, "certificate not valid for name")
            .await?;
    }
    Ok(())
}

/// A proxy that terminates TLS and uses HTTP/1.1 to kas; with `http2`, it accepts HTTP/2 from agents.
async fn ingress(kas: &Kas, files: &Certificates, http2: bool) -> Result<Proxy> {
    let address = SocketAddr::from(([127, 0, 0, 2], kas.agent.port()));
    let server = format!(
        "listen {address} ssl{}; ssl_certificate {}; ssl_certificate_key {};
        location /agents/ {{
            proxy_pass http://{}; proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade;
        }}
        location /gitlab.agent. {{ proxy_pass http://{}; proxy_http_version 1.1; }}",
        if http2 { " http2" } else { "" },
        text(&files.certificate),
        text(&files.key),
        kas.agent,
        kas.agent,
    );
    Proxy::nginx_server(address, &server).await
}

#[tokio::test]
async fn one_address_falls_back_to_websocket_behind_proxies_without_grpc() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let files = Certificates::new(dir.path(), &["127.0.0.2"])?;
    let ca = ["--ca-cert-file", text(&files.ca)];
    for http2 in [false, true] {
        let kas = plain().await?;
        let proxy = ingress(&kas, &files, http2).await?;
        let url = format!("https://{}/agents/", proxy.address);
        let agentk = Agentk::start_with_url(&url, &token(1), &ca, &[]).await?;
        agentk.connected().await?;
        echo(&kas.caller().await?, 1, "x").await?;
        let log = agentk.process.log();
        ensure!(log.matches("trying the next").count() == 1, "{log}");
        ensure!(log.contains(&format!("\"next\":\"wss://{}/agents/\"", proxy.address)), "{log}");
        // It is remembered: a lost connection is re-established there.
        let transports = kas.metric("kas_agent_transports").await?;
        assert_eq!(transports, 1.0);
        drop(proxy);
        let since = agentk.process.log_len();
        let _proxy = ingress(&kas, &files, http2).await?;
        agentk
            .process
            .logged_since(since, "that it is connected again", |line| {
                let address = line["address"].as_str()?.to_owned();
                (line["message"] == "connected to kas").then_some(address)
            })
            .await
            .map(|address| assert!(address.starts_with("wss://"), "{address}"))?;
        echo(&kas.caller().await?, 1, "x").await?;
    }
    Ok(())
}

#[tokio::test]
async fn first_working_address_is_kept_and_a_refused_token_causes_no_fallback() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let files = Certificates::new(dir.path(), &["127.0.0.1"])?;
    let ca = ["--ca-cert-file", text(&files.ca)];
    let kas = secure(&files).await?;
    let url = format!("https://{}", kas.agent);
    let good = Agentk::start_with_url(&url, &token(1), &ca, &[]).await?;
    good.connected().await?;
    let log = good.process.log();
    ensure!(log.contains("\"address\":\"grpcs://") && !log.contains("trying the next"), "{log}");
    let bad = Agentk::start_with_url(&url, "wrong", &ca, &[]).await?;
    says(&bad, "kas rejects this agent").await?;
    // An untrusted certificate causes no fallback either.
    let stranger = Agentk::start_with_url(&url, &token(2), &[], &[]).await?;
    eventually("it tries again", async || {
        let tries = stranger.process.log().matches("TLS with grpcs://").count();
        Ok(if tries >= 3 { Ok(()) } else { Err(tries) })
    })
    .await?;
    for agentk in [&bad, &stranger] {
        ensure!(!agentk.process.log().contains("trying the next"), "{}", agentk.process.log());
    }
    Ok(())
}

#[tokio::test]
async fn invalid_settings_fail_the_start_without_showing_secrets() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let token_file = dir.path().join("token");
    std::fs::write(&token_file, "token")?;
    let program = tokio::task::spawn_blocking(|| testkit::process::program("agentk")).await??;
    for (arguments, env, code, words) in [
        (vec!["--kas-header", "x sesame: 1"], None, 1, "the name of a header"),
        (vec!["--kas-header", "x-key: sesame\u{e9}"], None, 1, "the value of header x-key"),
        (
            vec!["--kas-header", "authorization: sesame"],
            None,
            1,
            "carries the agent token on grpcs://kas.test",
        ),
        (
            vec!["--otlp-endpoint", "http://user:sesame@collector"],
            None,
            2,
            "'--otlp-endpoint <URL>' (not shown",
        ),
        (vec!["--kas-tls-server-name", "kas.test:443"], None, 1, "not a name that TLS can verify"),
        (
            vec![],
            Some(("HTTPS_PROXY", "socks5://user:sesame@proxy")),
            1,
            "HTTPS_PROXY names a proxy with socks5://",
        ),
        (
            vec![],
            Some(("https_proxy", "http://user:ses@ame@proxy")),
            1,
            "HTTPS_PROXY is not the URL of a proxy",
        ),
    ] {
        let mut command = std::process::Command::new(&program);
        command.args(["--kas-address", "grpcs://kas.test", "--kube-server", "http://127.0.0.1:1"]);
        command.args(["--observability-address", "127.0.0.1:0", "--token-file", text(&token_file)]);
        command.args(&arguments).envs(env);
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code) && said.contains(words), "{arguments:?}: {said}");
        ensure!(!said.contains("sesame"), "{said}");
    }
    Ok(())
}

/// Runs the doctor and returns its exit code and its JSON output.
async fn doctor(url: &str, token: &str, further: &[&str], env: &[(&str, &str)]) -> Result<(i32, Value)> {
    let dir = tempfile::tempdir()?;
    let token_file = dir.path().join("token");
    std::fs::write(&token_file, token)?;
    let program = tokio::task::spawn_blocking(|| testkit::process::program("agentk")).await??;
    let mut command = std::process::Command::new(program);
    command.args(["doctor", "-o", "json", "--kas-address", url, "--token-file", text(&token_file)]);
    command.args(further).envs(env.iter().copied()).env_remove("KUBECONFIG");
    if !further.contains(&"--kube-server") {
        command.args(["--kube-server", "http://127.0.0.1:1"]);
    }
    if !further.contains(&"--silence") {
        command.args(["--silence", "0s"]);
    }
    if !further.contains(&"--observability-address") {
        command.args(["--observability-address", "127.0.0.1:0"]);
    }
    let output = tokio::task::spawn_blocking(move || command.output()).await??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let report: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| anyhow::anyhow!("{error}: {said}{}", String::from_utf8_lossy(&output.stdout)))?;
    let code = output.status.code().unwrap_or(-1);
    ensure!(report["exit_code"] == code, "{code}: {report:#}");
    Ok((code, report))
}

/// Returns the last finding at the first address, with its advice.
fn last(report: &Value) -> (String, String) {
    let finding = report["addresses"][0]["findings"].as_array().and_then(|all| all.last()).unwrap();
    let advice = finding.get("advice").cloned().unwrap_or_default();
    (
        finding["check"].as_str().unwrap().to_owned(),
        format!("{} {advice}", finding["message"].as_str().unwrap()),
    )
}

#[tokio::test]
async fn doctor_reports_each_problem() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let [good, old] = ["good", "old"].map(|name| dir.path().join(name));
    for dir in [&good, &old] {
        std::fs::create_dir(dir)?;
    }
    let (files, expired) = (Certificates::new(&good, &[NAME])?, Certificates::expired(&old, &["127.0.0.1"])?);
    let (plain_kas, secure_kas) = (plain().await?, secure(&files).await?);
    let aged = secure(&expired).await?;
    let (no_websocket, grpc_port) = (Kas::start().await?, plain_kas.agent);
    let ca = ["--ca-cert-file", text(&files.ca)];
    let old_ca = ["--ca-cert-file", text(&expired.ca)];
    let refusing = |answer| ConnectProxy::start(grpc_port, Some(answer));
    let jealous = refusing("HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n").await?;
    let strict = refusing("HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await?;
    let [jealous, strict] = [&jealous, &strict].map(|proxy| format!("http://user:sesame@{}", proxy.address));
    let good_token = &*token(1);
    let http = plain_kas.observability;
    for (url, token, further, proxy, code, check, words) in [
        (
            "grpc://127.0.0.1:1".to_owned(),
            good_token,
            &[][..],
            "",
            3,
            "tcp",
            &["nothing listens on port 1"][..],
        ),
        (
            "grpc://kas.invalid:1".to_owned(),
            good_token,
            &[],
            "",
            3,
            "name",
            &["kas.invalid does not resolve"],
        ),
        (
            format!("grpc://{grpc_port}"),
            "wrong",
            &[],
            "",
            4,
            "grpc",
            &["does not know the token", "--token-file"],
        ),
        (format!("ws://{grpc_port}"), "wrong", &[], "", 4, "grpc", &["does not know the token"]),
        (
            format!("grpc://{http}"),
            good_token,
            &[],
            "",
            3,
            "grpc",
            &["speaks HTTP/1.1", "port of kas for agents"],
        ),
        // A valid token proves nothing there, because it is not looked up.
        (
            format!("grpc://{}", plain_kas.api),
            good_token,
            &[],
            "",
            3,
            "grpc",
            &["not for agents", "--kas-address", "8150"],
        ),
        (format!("ws://{http}"), good_token, &[], "", 3, "web_socket", &["HTTP 404", "check the path"]),
        (
            format!("ws://{}", no_websocket.agent),
            good_token,
            &[],
            "",
            3,
            "web_socket",
            &["agent.listen.websocket: true"],
        ),
        (format!("grpcs://{grpc_port}"), good_token, &ca, "", 3, "tls", &["grpc://"]),
        (
            format!("grpcs://{}", secure_kas.agent),
            good_token,
            &[],
            "",
            3,
            "tls",
            &["not issued by a CA that this machine trusts", "CA of a test", "--ca-cert-file"],
        ),
        (
            format!("grpcs://{}", secure_kas.agent),
            good_token,
            &ca,
            "",
            3,
            "tls",
            &["not for 127.0.0.1", "certificate for kas.test", "--kas-tls-server-name"],
        ),
        (format!("wss://{}", aged.agent), good_token, &old_ca, "", 3, "tls", &["expired", "2002"]),
        (
            "grpcs://kas.test".to_owned(),
            good_token,
            &[],
            &jealous,
            3,
            "connect",
            &["wants credentials", "HTTPS_PROXY"],
        ),
        (
            "grpcs://kas.test".to_owned(),
            good_token,
            &[],
            &strict,
            3,
            "connect",
            &["HTTP 403", "must allow CONNECT"],
        ),
        (
            "grpcs://kas.test".to_owned(),
            good_token,
            &[],
            "socks5://user:sesame@proxy",
            3,
            "proxy",
            &["HTTPS_PROXY names a proxy with socks5://"],
        ),
        // Only the API server cannot be reached.
        (format!("grpc://{grpc_port}"), good_token, &[], "", 6, "grpc", &["of kas answers, 1 running"]),
    ] {
        let (got, report) = doctor(&url, token, further, &[("HTTPS_PROXY", proxy)]).await?;
        let (last, said) = last(&report);
        ensure!(got == code && last == check, "{url}: {got}: {report:#}");
        ensure!(words.iter().all(|word| said.contains(word)), "{url}: {said}");
        ensure!(!report.to_string().contains("sesame"), "{report:#}");
    }
    Ok(())
}

#[tokio::test]
async fn doctor_finds_the_working_address_and_explains_the_failing_one() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let files = Certificates::new(dir.path(), &["127.0.0.2"])?;
    let ca = ["--ca-cert-file", text(&files.ca)];
    for (http2, check, words) in [
        (false, "http2", "chose http/1.1 where HTTP/2 was offered"),
        (true, "grpc", "does not reach kas over HTTP/2: nginx needs"),
    ] {
        let kas = plain().await?;
        let proxy = ingress(&kas, &files, http2).await?;
        let (code, report) =
            doctor(&format!("https://{}/agents/", proxy.address), &token(1), &ca, &[]).await?;
        let (last, said) = last(&report);
        ensure!(code == 6 && last == check && said.contains(words), "{report:#}");
        assert_eq!(
            (&report["addresses"][0]["passes"], &report["addresses"][1]["passes"]),
            (&json!(false), &json!(true))
        );
    }
    Ok(())
}

#[tokio::test]
async fn agentk_serves_requests_while_another_process_uses_its_port_for_metrics() -> Result<()> {
    let kas = plain().await?;
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = other.local_addr()?;
    let (url, address) = (format!("grpc://{}", kas.agent), port.to_string());
    let dir = tempfile::tempdir()?;
    let token_file = dir.path().join("token");
    std::fs::write(&token_file, token(1))?;
    let program = tokio::task::spawn_blocking(|| testkit::process::program("agentk")).await??;
    let arguments = ["--kas-address", &url, "--token-file", text(&token_file), "--log-format", "json"];
    let further =
        ["--observability-address", &address, "--kube-server", "http://127.0.0.1:1", "--bench-module"];
    let agentk = Process::start("agentk", &program, &[&arguments[..], &further[..]].concat(), &[]).await?;
    let is_told = |line: &Value| {
        let told = line["message"].as_str()?.starts_with("no metrics and probes: the port cannot be used; ")
            && line["address"] == *address;
        told.then_some(())
    };
    agentk.logged("that its port is taken", is_told).await?;
    echo(&kas.caller().await?, 1, "x").await?;
    let doctor = async || -> Result<(Value, String)> {
        let (code, report) = doctor(&url, &token(1), &["--observability-address", &address], &[]).await?;
        // The API server of this test cannot be reached.
        ensure!(code == 6 && report["metrics"]["check"] == "metrics", "{report:#}");
        Ok((report["metrics"]["outcome"].clone(), report["metrics"].to_string()))
    };
    let (outcome, said) = doctor().await?;
    ensure!(outcome == "warning" && said.contains("another program uses 127.0.0.1:"), "{said}");
    // An address that this host does not have ends no other check.
    let foreign = ["--observability-address", "192.0.2.1:8080"];
    let (code, report) = self::doctor(&url, &token(1), &foreign, &[]).await?;
    ensure!(code == 6 && report["metrics"]["outcome"] == "failed", "{report:#}");
    ensure!(report["addresses"][0]["passes"] == true, "{report:#}");
    drop(other);
    let served = |line: &Value| (line["message"] == "metrics and probes").then_some(());
    agentk.logged("that its port is served", served).await?;
    let (status, _) = testkit::kas::get(port, "/readiness").await?;
    assert_eq!(status, http::StatusCode::OK);
    let (outcome, said) = doctor().await?;
    ensure!(outcome == "ok" && said.contains("an agentk serves them on 127.0.0.1:"), "{said}");
    Ok(())
}

#[tokio::test]
async fn doctor_is_not_listed_as_a_connection_of_its_agent() -> Result<()> {
    let kas = plain().await?;
    let caller = kas.caller().await?;
    let listed = async || -> Result<usize> {
        let request = ConnectedAgentsByIdRequest { agent_id: 1 };
        let listed: ConnectedAgentsByIdResponse = caller.unary(BY_ID, &request).await?;
        Ok(listed.agents.len())
    };
    let dir = tempfile::tempdir()?;
    let token_file = dir.path().join("token");
    std::fs::write(&token_file, token(1))?;
    let url = format!("grpc://{}", kas.agent);
    let program = tokio::task::spawn_blocking(|| testkit::process::program("agentk")).await??;
    let arguments = ["doctor", "--kas-address", &url, "--token-file", text(&token_file)];
    let further = ["--kube-server", "http://127.0.0.1:1", "--silence", "10m"];
    let _doctor = Process::start("doctor", &program, &[&arguments[..], &further[..]].concat(), &[]).await?;
    // Both of its streams are open.
    kas.metric_is("kas_connected_agents", 1.0).await?;
    kas.metric_is("kas_tunnels_open", 1.0).await?;
    ensure!(listed().await? == 0);
    let agent = RawAgent::connect(kas.agent, &token(1), Kind::Ours).await?;
    let _stream = agent.configuration("").await?;
    ensure!(listed().await? == 1, "who serves is listed as ever");
    Ok(())
}

#[tokio::test]
async fn doctor_measures_the_timer_of_a_proxy_and_names_the_setting() -> Result<()> {
    let kas = plain().await?;
    let api = testkit::demo_api::DemoApi::start("127.0.0.1:0".parse()?).await?;
    let server = api.url();
    let silence = ["--silence", "9s", "--kube-server", &server];
    let short = "grpc_read_timeout 4s; grpc_send_timeout 4s; client_body_timeout 4s;";
    let nginx = Proxy::nginx(kas.agent, Passes::Grpc, short).await?;
    let haproxy = Proxy::haproxy(
        kas.agent,
        Passes::Grpc,
        "  timeout connect 5s\n  timeout client 4s\n  timeout server 4s\n",
    );
    let haproxy = haproxy.await?;
    let envoy =
        Proxy::envoy(kas.agent, Passes::Grpc, json!({ "stream_idle_timeout": "4s" }), json!({})).await?;
    for (proxy, line) in [
        (&nginx, "nginx: grpc_read_timeout"),
        (&haproxy, "HAProxy: timeout client"),
        (&envoy, "Envoy: stream_idle_timeout"),
    ] {
        let (code, report) = doctor(&format!("grpc://{}", proxy.address), &token(1), &silence, &[]).await?;
        let (last, said) = last(&report);
        ensure!(code == 5 && last == "silence" && said.contains(line), "{report:#}");
        // Later if the machine stalls; the whole test takes 9 s.
        ensure!((3..=8).any(|n| said.contains(&format!("after it was idle for {n} s"))), "{said}");
    }
    drop(envoy);
    // Another timer of Envoy.
    let envoy = Proxy::envoy(kas.agent, Passes::Grpc, json!({}), json!({ "timeout": "4s" })).await?;
    let (code, report) = doctor(&format!("grpc://{}", envoy.address), &token(1), &silence, &[]).await?;
    let (_, said) = last(&report);
    ensure!(code == 5 && said.contains("configuration stream was cut after"), "{report:#}");
    ensure!(said.contains("Envoy: timeout: 0s in the route"), "{said}");
    // Without a proxy, nothing is cut.
    let (code, report) = doctor(&format!("grpc://{}", kas.agent), &token(1), &silence, &[]).await?;
    ensure!(code == 0 && report["verdict"] == "healthy", "{report:#}");
    let (last, said) = last(&report);
    ensure!(last == "silence" && said.contains("nothing cut it"), "{said}");
    ensure!(report["kubernetes"]["message"].as_str().unwrap().contains("Kubernetes"), "{report:#}");
    // No connection is left.
    kas.metric_is("kas_connected_agents", 0.0).await?;
    kas.metric_is("kas_tunnels_open", 0.0).await?;
    Ok(())
}
