//! `kasctl kubeconfig` and `kasctl credential`.

use std::{os::unix::fs::PermissionsExt as _, path::PathBuf, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hyper::Response;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::{
    fake::{Run, Server, https},
    json_of,
};

/// An endpoint for kubectl that knows the token `kasu_jane`.
struct Endpoint {
    url: String,
    ca: String,
    /// Path and token of each request.
    seen: Arc<Mutex<Vec<(String, String)>>>,
    server: Server,
}

impl Endpoint {
    async fn start() -> Self {
        let server = Server::start().await;
        let ca = server.dir.path().join("ca.pem");
        let seen = Arc::<Mutex<Vec<(String, String)>>>::default();
        let all = Arc::clone(&seen);
        let address = https::serve(&ca, move |request| {
            let token = request.headers().get("authorization").map(|value| value.to_str().unwrap());
            let token = token.unwrap_or_default().to_owned();
            let answer = answer(&token);
            all.lock().push((request.uri().path().to_owned(), token));
            std::future::ready(answer)
        });
        let url = format!("https://{}/k8s/", address.await);
        std::fs::write(server.dir.path().join("token"), "kasu_jane\n").unwrap();
        Self { url, ca: ca.to_str().unwrap().to_owned(), seen, server }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.server.dir.path().join(name)
    }

    /// Runs `kasctl kubeconfig` for the file `config`.
    async fn run(&self, arguments: &[&str]) -> Run {
        let (config, token) = (self.at("config"), self.at("token"));
        let fixed = ["kubeconfig", "--url", &self.url, "--kubeconfig", config.to_str().unwrap()];
        let credential = ["--token-file", token.to_str().unwrap()];
        let has_other = arguments.iter().any(|flag| ["--ci", "--pat-file"].contains(flag));
        let credential = if has_other { &[][..] } else { &credential };
        self.server
            .run(&[&fixed[..], &["--certificate-authority", &self.ca], credential, arguments].concat())
            .await
    }

    fn config(&self) -> String {
        std::fs::read_to_string(self.at("config")).unwrap()
    }
}

fn answer(token: &str) -> https::Answer {
    let (status, body): (u16, &'static [u8]) = match token {
        "Bearer kasu_jane" | "Bearer ci:1:job" => (
            200,
            br#"{"agents":[{"id":7,"name":"prod","project_id":3,"connected":true},
                {"id":8,"name":"prod","project_id":4,"connected":false},
                {"id":9,"name":"dev","project_id":3,"connected":true},
                {"id":10,"name":null,"project_id":null,"connected":false}]}"#,
        ),
        _ => (401, br#"{"kind":"Status","message":"kas: unknown token (request 1)","code":401}"#),
    };
    Response::builder().status(status).body(body.into()).unwrap()
}

#[tokio::test]
async fn listed_agents_get_contexts_and_the_rest_of_the_file_stays() {
    let endpoint = Endpoint::start().await;
    let old = "# mine\nclusters:\n- name: own # keep\n  cluster: {server: 'https://own'}\nusers: []\n";
    std::fs::write(endpoint.at("config"), old).unwrap();
    std::fs::set_permissions(endpoint.at("config"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let run = endpoint.run(&["-o", "json"]).await.expect_exit(0);
    let report = json_of(&run);
    let names: Vec<&Value> = report["contexts"].as_array().unwrap().iter().map(|c| &c["name"]).collect();
    assert_eq!(names, ["prod-7", "prod-8", "dev", "agent-10"]);
    assert_eq!(report["contexts"][0]["server"], format!("{}agents/7", endpoint.url));
    assert_eq!(*endpoint.seen.lock(), [("/k8s/agents".to_owned(), "Bearer kasu_jane".to_owned())]);

    let text = endpoint.config();
    assert!(text.starts_with(&old[..old.find("users").unwrap()]), "{text}");
    let authority = STANDARD.encode(std::fs::read(&endpoint.ca).unwrap());
    assert_eq!(text.matches(&format!("certificate-authority-data: {authority}\n")).count(), 4, "{text}");
    assert!(text.contains("interactiveMode: Never\n      provideClusterInfo: true\n"), "{text}");
    assert!(!text.contains("kasu_jane"), "the token is not stored");
    let mode = std::fs::metadata(endpoint.at("config")).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    assert!(!endpoint.at("config.lock").exists());

    // The same again changes nothing, and a selector leaves the others.
    endpoint.run(&[]).await.expect_exit(0);
    assert_eq!(endpoint.config(), text);
    endpoint.run(&["name=dev", "--use"]).await.expect_exit(0);
    assert_eq!(endpoint.config(), format!("{text}current-context: dev\n"));
    endpoint.run(&["--use"]).await.expect_exit(2);
}

#[tokio::test]
async fn a_refused_credential_or_an_unknown_file_changes_nothing() {
    let endpoint = Endpoint::start().await;
    std::fs::write(endpoint.at("token"), "kasu_other").unwrap();
    let run = endpoint.run(&[]).await.expect_exit(4);
    assert!(run.stderr.contains("kas: unknown token (request 1)") && !run.stderr.contains("kasu"), "{run:?}");
    assert!(!endpoint.at("config").exists());
    std::fs::write(endpoint.at("token"), "kasu_jane").unwrap();
    endpoint.run(&["id=1000"]).await.expect_exit(1);
    let line = [
        "kubeconfig",
        "--url",
        &endpoint.url,
        "--token-file",
        "/nonexistent",
        "--kubeconfig",
        "/nonexistent",
    ];
    endpoint.server.run(&line).await.expect_exit(4);
    let json = "{\"kind\": \"Config\", \"clusters\": [{\"name\": \"a\"}]}";
    std::fs::write(endpoint.at("config"), json).unwrap();
    let run = endpoint.run(&[]).await.expect_exit(1);
    assert!(run.stderr.contains("block style"), "{run:?}");
    assert_eq!(endpoint.config(), json);
    assert!(!endpoint.at("config.lock").exists());
}

#[tokio::test]
async fn an_authority_that_kubectl_cannot_pass_to_the_plugin_is_refused() {
    let endpoint = Endpoint::start().await;
    let pem = std::fs::read_to_string(&endpoint.ca).unwrap();
    std::fs::write(&endpoint.ca, pem.repeat(64 * 1024 / pem.len() + 1)).unwrap();
    let run = endpoint.run(&["--agent", "7"]).await.expect_exit(1);
    assert!(run.stderr.contains("too large") && run.stderr.contains("64 KiB"), "{run:?}");
    assert!(!endpoint.at("config").exists());
    endpoint.run(&["--agent", "7", "--no-plugin"]).await.expect_exit(0);
}

#[tokio::test]
async fn a_held_lock_is_respected() {
    let endpoint = Endpoint::start().await;
    std::fs::write(endpoint.at("config.lock"), "").unwrap();
    let run = endpoint.run(&["--agent", "7"]).await.expect_exit(1);
    assert!(run.stderr.contains("config.lock") && run.stderr.contains("remove it"), "{run:?}");
    assert!(!endpoint.at("config").exists() && endpoint.at("config.lock").exists());
}

#[tokio::test]
async fn agents_of_the_command_line_need_no_list() {
    let endpoint = Endpoint::start().await;
    endpoint.run(&["--agent", "7", "--agent", "7", "--use", "--no-plugin"]).await.expect_exit(0);
    assert!(endpoint.seen.lock().is_empty());
    let text = endpoint.config();
    assert!(text.contains(&format!("    tokenFile: {}\n", endpoint.at("token").display())), "{text}");
    assert!(text.contains("current-context: agent-7\n") && !text.contains("exec:"), "{text}");
    // Other credentials replace it.
    endpoint.run(&["--agent", "7", "--pat-file", "pat"]).await.expect_exit(0);
    let text = endpoint.config();
    assert!(text.contains("exec:") && !text.contains("tokenFile"), "{text}");
    assert!(text.contains("      - --pat-file\n") || text.contains("- \"--pat-file\"\n"), "{text}");
}

/// Runs `kasctl credential` with a request of kubectl for this server.
async fn credential(server: &Server, at: Option<&str>, arguments: &[&str]) -> Run {
    let cluster = at.map(|at| json!({ "server": at }));
    let info = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "spec": { "interactive": false, "cluster": cluster },
    });
    let line = [&["credential"][..], arguments].concat();
    let run = server.run_with(&line, |command| {
        command.env("KUBERNETES_EXEC_INFO", info.to_string()).env("CI_JOB_TOKEN", "job");
    });
    run.await
}

#[tokio::test]
async fn credentials_are_exec_credentials() {
    let server = Server::start().await;
    let file = |name: &str, text: &str| {
        let path = server.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (token, pat) = (file("token", "kasu_jane\n"), file("pat", "glpat-x"));
    let status = |run: Run| {
        let json = json_of(&run.expect_exit(0));
        assert_eq!(
            (&json["kind"], &json["apiVersion"]),
            (&json!("ExecCredential"), &json!("client.authentication.k8s.io/v1"))
        );
        json["status"].clone()
    };
    let seven = Some("https://kas.test/k8s/agents/7");
    let run = credential(&server, None, &["--token-file", &token]).await;
    assert_eq!(status(run), json!({ "token": "kasu_jane" }));
    let run = credential(&server, seven, &["--pat-file", &pat]).await;
    assert_eq!(status(run), json!({ "token": "pat:7:glpat-x" }));
    let run = credential(&server, seven, &["--ci", "--url", "https://kas.test/k8s"]).await;
    assert_eq!(status(run), json!({ "token": "ci:7:job" }));
    // The server of the second names the agent in another way, and nothing in it contradicts the flag.
    for at in [None, Some("https://agent-9.k8s.kas.test")] {
        let run = credential(&server, at, &["--ci", "--agent", "9"]).await;
        assert_eq!(status(run), json!({ "token": "ci:9:job" }));
    }
    let claims = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode("{\"exp\":4102444830}");
    let id = file("id", &format!("e30.{claims}.c2ln"));
    let run = credential(&server, None, &["--token-file", &id]).await;
    assert_eq!(status(run)["expirationTimestamp"], "2100-01-01T00:00:00Z");

    for (at, arguments, code) in [
        (None, &["--pat-file", &pat][..], 4),
        (Some("https://kas.test/other"), &["--ci"][..], 4),
        (Some("https://evil.test/k8s/agents/7"), &["--ci", "--url", "https://kas.test/k8s"][..], 1),
        (seven, &["--ci", "--agent", "8"][..], 2),
        (None, &["--ci", "--client-id", "x", "--agent", "8"][..], 2),
        (None, &["--oidc"][..], 4),
        (None, &["--token-file", "/nonexistent"][..], 4),
    ] {
        let run = credential(&server, at, arguments).await.expect_exit(code);
        assert_eq!(run.stdout, "", "{run:?}");
        assert!(!run.stderr.contains("glpat") && !run.stderr.contains("kasu"), "{run:?}");
    }
}
