//! Tests of the configuration and its errors. The rest is tested against API servers.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use http::Request;
use secrecy::ExposeSecret as _;
use tempfile::TempDir;

use super::{
    access::certificates,
    credentials::{Credentials, TOKEN_AGE, TokenFile},
    *,
};
use crate::module::{Module as _, kubernetes_api::KubernetesApi};

fn environment(entries: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> + use<> {
    let entries: Vec<(String, OsString)> =
        entries.iter().map(|(name, value)| ((*name).to_owned(), value.as_os_str().to_owned())).collect();
    move |name| entries.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
}

async fn refused(access: &ClusterAccess, env: &dyn Fn(&str) -> Option<OsString>) -> String {
    let made = match access.config(env).await {
        Ok((config, source)) => ApiServer::new(&config, source).map(drop),
        Err(error) => Err(error),
    };
    format!("{:#}", made.expect_err("the configuration is invalid"))
}

fn write(dir: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

const KUBECONFIG: &str = r#"
apiVersion: v1
kind: Config
current-context: one
contexts:
- {name: one, context: {cluster: plain, user: token}}
- {name: two, context: {cluster: path, user: as}}
- {name: proxied, context: {cluster: proxied, user: token}}
clusters:
- {name: plain, cluster: {server: "http://10.0.0.1:6443"}}
- {name: path, cluster: {server: "http://rancher.example/k8s/clusters/c-1/"}}
- {name: proxied, cluster: {server: "http://10.0.0.1", proxy-url: "http://proxy:3128"}}
users:
- {name: token, user: {token: s3cret-token}}
- {name: as, user: {token: s3cret-token, as: jane, as-groups: [a, b], as-user-extra: {"x/y": [z]}}}
"#;

#[tokio::test]
async fn kubeconfig_flag_overrides_the_environment() {
    let dir = TempDir::new().unwrap();
    let file = write(&dir, "config", KUBECONFIG);
    let nothing = environment(&[("KUBECONFIG", &dir.path().join("missing"))]);
    let access = ClusterAccess { kubeconfig: Some(file.clone()), ..ClusterAccess::default() };
    let (config, source) = access.config(&nothing).await.unwrap();
    let api = ApiServer::new(&config, source).unwrap();
    assert_eq!(api.target().host(), "10.0.0.1:6443");
    assert_eq!(api.target().source(), format!("context one of {}", file.display()));
    assert!(!api.target().impersonates());

    let list = env::join_paths([dir.path().join("missing"), file]).unwrap();
    let env = environment(&[("KUBECONFIG", Path::new(&list))]);
    let access = ClusterAccess { context: Some("two".to_owned()), ..ClusterAccess::default() };
    let (config, source) = access.config(&env).await.unwrap();
    let api = ApiServer::new(&config, source).unwrap();
    assert_eq!(api.target().host(), "rancher.example");
    assert_eq!(api.inner.prefix, "/k8s/clusters/c-1");
    assert!(api.target().impersonates());
    let identity: Vec<_> =
        api.inner.identity.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(
        identity,
        [
            ("impersonate-user", "jane"),
            ("impersonate-group", "a"),
            ("impersonate-group", "b"),
            ("impersonate-extra-x%2fy", "z"),
        ]
    );
}

#[tokio::test]
async fn error_names_what_is_missing_and_the_flag() {
    let dir = TempDir::new().unwrap();
    let file = write(&dir, "config", KUBECONFIG);
    let none = environment(&[]);
    let default = ClusterAccess::default;

    let text = refused(&default(), &none).await;
    assert!(text.contains("KUBERNETES_SERVICE_HOST") && text.contains("--kubeconfig"), "{text}");
    assert!(text.contains("--kube-server"), "{text}");

    let text = refused(&ClusterAccess { context: Some("one".into()), ..default() }, &none).await;
    assert!(text.contains("--context needs a kubeconfig: give one with --kubeconfig"), "{text}");

    let missing = dir.path().join("missing");
    let text = refused(&ClusterAccess { kubeconfig: Some(missing.clone()), ..default() }, &none).await;
    assert!(
        text.starts_with(&format!("cannot read the kubeconfig {}: No such file", missing.display())),
        "{text}"
    );
    let text = refused(&default(), &environment(&[("KUBECONFIG", &missing)])).await;
    assert!(text.contains("cannot read the kubeconfig"), "{text}");

    let context = |name: &str| ClusterAccess {
        kubeconfig: Some(file.clone()),
        context: Some(name.to_owned()),
        ..default()
    };
    let text = refused(&context("three"), &none).await;
    assert!(text.contains("has no context \"three\" (it has one, proxied, two)"), "{text}");
    let text = refused(&context("proxied"), &none).await;
    assert!(text.contains("proxy-url"), "{text}");

    let current = write(&dir, "no-current", &KUBECONFIG.replace("current-context: one", ""));
    let text = refused(&ClusterAccess { kubeconfig: Some(current), ..default() }, &none).await;
    assert!(text.contains("has no current context: give one with --context NAME"), "{text}");

    let server = |url: &str| ClusterAccess { kube_server: Some(url.to_owned()), ..default() };
    for (url, expected) in [
        ("10.0.0.1:6443", "needs a scheme and a host"),
        ("ftp://10.0.0.1", "begins with ftp://"),
        ("http://user:s3cret@10.0.0.1", "has a user or password in it"),
        ("http://a b", "--kube-server is not a URL"),
    ] {
        let text = refused(&server(url), &none).await;
        assert!(text.contains(expected) && !text.contains("s3cret"), "{text}");
    }

    let empty = write(&dir, "empty", " \n");
    let text = refused(&ClusterAccess { kube_token_file: Some(empty), ..server("http://a") }, &none).await;
    assert!(text.contains("empty cannot be used: the bearer token is empty"), "{text}");
    let text = refused(&ClusterAccess { kube_token_file: Some(missing), ..server("http://a") }, &none).await;
    assert!(text.contains("cannot authenticate (--kube-server): cannot read"), "{text}");
    let text =
        refused(&ClusterAccess { kube_ca_file: Some(file.clone()), ..server("https://a") }, &none).await;
    assert!(text.contains("has no certificate in PEM"), "{text}");
}

#[tokio::test]
async fn broken_kubeconfig_does_not_show_its_secrets() {
    let dir = TempDir::new().unwrap();
    let broken = KUBECONFIG.replace("{token: s3cret-token}", "{token: s3cret-token, : [}");
    let file = write(&dir, "config", &broken);
    let text =
        refused(&ClusterAccess { kubeconfig: Some(file), ..ClusterAccess::default() }, &environment(&[]))
            .await;
    assert!(text.contains("is not a kubeconfig: line") && !text.contains("s3cret"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn token_file_is_read_again_after_10_seconds_or_a_rejection() {
    let dir = TempDir::new().unwrap();
    let path = write(&dir, "token", "one\n");
    let credentials = Credentials::File(TokenFile::open(path.clone()).unwrap());
    let header = async || credentials.header().await.unwrap().unwrap();
    assert_eq!(header().await, "Bearer one");
    assert!(header().await.is_sensitive());

    write(&dir, "token", "two");
    assert_eq!(header().await, "Bearer one");
    tokio::time::advance(TOKEN_AGE).await;
    assert_eq!(header().await, "Bearer two");

    write(&dir, "token", "three");
    credentials.invalidate();
    assert_eq!(header().await, "Bearer three");

    fs::remove_file(path).unwrap();
    credentials.invalidate();
    assert_eq!(header().await, "Bearer three");
}

#[cfg(unix)]
#[tokio::test]
async fn credential_plugin_provides_the_token_and_its_output_is_not_shown() {
    let dir = TempDir::new().unwrap();
    let plugin = |script: &str| {
        let script = script.replace('"', "\\\"");
        KUBECONFIG.replacen(
            "{token: s3cret-token}",
            &format!(
                "{{exec: {{apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: sh, args: \
                 [-c, \"{script}\"]}}}}"
            ),
            1,
        )
    };
    let api = async |text: &str| {
        let file = write(&dir, "config", text);
        let access = ClusterAccess { kubeconfig: Some(file), ..ClusterAccess::default() };
        let (config, source) = access.config(&environment(&[])).await?;
        ApiServer::new(&config, source)
    };
    let works = plugin(
        r#"echo '{"kind":"ExecCredential","apiVersion":"client.authentication.k8s.io/v1","status":{"token":"from-plugin","expirationTimestamp":"2999-01-01T00:00:00Z"}}'"#,
    );
    let api_server = api(&works).await.unwrap();
    let header = api_server.inner.credentials.header().await.unwrap().unwrap();
    assert_eq!(header, "Bearer from-plugin");

    for (script, expected) in
        [("echo s3cret-output; exit 3", "exit status: 3"), ("echo s3cret-output", "is invalid")]
    {
        let text = format!("{:#}", api(&plugin(script)).await.unwrap_err());
        assert!(text.contains(expected) && !text.contains("s3cret"), "{text}");
    }
}

/// Parses flags as on a command line.
fn flags(arguments: &[&str]) -> Result<ClusterAccess, clap::Error> {
    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        access: ClusterAccess,
    }
    let arguments = ["agentk"].iter().chain(arguments);
    <Program as clap::Parser>::try_parse_from(arguments).map(|program| program.access)
}

#[tokio::test]
async fn flags_of_kubectl_override_the_kubeconfig() {
    let dir = TempDir::new().unwrap();
    let file = write(&dir, "config", KUBECONFIG);
    let file = file.to_str().unwrap();
    let none = environment(&[]);
    let made = async |arguments: &[&str]| flags(arguments).unwrap().config(&none).await.unwrap();

    let (config, source) = made(&["--kubeconfig", file, "--cluster", "path", "--user", "as"]).await;
    assert_eq!(config.cluster_url.to_string(), "http://rancher.example/k8s/clusters/c-1/");
    assert_eq!(config.auth_info.impersonate.as_deref(), Some("jane"));
    assert!(source.starts_with("context one of"), "{source}");

    let arguments = ["--kubeconfig", file, "-s", "https://10.0.0.2", "--token", "other-s3cret", "-n", "here"];
    let more = ["--as", "joe", "--as-group", "x", "--as-group=y", "--tls-server-name", "kubernetes"];
    let inert = ["--insecure-skip-tls-verify", "--request-timeout=0", "--cache-dir", "/tmp/cache"];
    let arguments = [&arguments[..], &more, &inert].concat();
    assert!(!format!("{:?}", flags(&arguments).unwrap()).contains("s3cret"));
    let (config, _) = made(&arguments).await;
    assert_eq!(config.cluster_url.to_string(), "https://10.0.0.2/");
    assert_eq!(config.auth_info.token.as_ref().unwrap().expose_secret(), "other-s3cret");
    assert_eq!(config.auth_info.impersonate.as_deref(), Some("joe"));
    assert_eq!(config.auth_info.impersonate_groups, Some(vec!["x".to_owned(), "y".to_owned()]));
    assert_eq!(config.tls_server_name.as_deref(), Some("kubernetes"));
    assert_eq!(config.default_namespace, "here");
    assert!(config.accept_invalid_certs);
}

#[tokio::test]
async fn server_flag_of_kubectl_needs_no_kubeconfig() {
    let dir = TempDir::new().unwrap();
    let files = testkit::certificates::Certificates::new(dir.path(), &["a"]).unwrap();
    let path = |path: &PathBuf| path.to_str().unwrap().to_owned();
    let (ca, certificate, key) = (&path(&files.ca), &path(&files.certificate), &path(&files.key));
    let none = environment(&[]);
    let server = ["--server", "https://10.0.0.1:6443", "--certificate-authority", ca];
    for credential in
        [&["--token", "s3cret"][..], &["--client-certificate", certificate, "--client-key", key]]
    {
        let access = flags(&[&server[..], credential].concat()).unwrap();
        let (config, source) = access.config(&none).await.unwrap();
        assert_eq!(config.root_cert, Some(certificates(&files.ca).unwrap()));
        net::tls::install();
        let api = ApiServer::new(&config, source).unwrap();
        assert_eq!((api.target().host(), api.target().source()), ("10.0.0.1:6443", "--server"));
    }
    let text = refused(&flags(&["--server", "https://a", "--user", "b"]).unwrap(), &none).await;
    assert!(text.contains("--user needs a kubeconfig"), "{text}");
    let text = refused(&flags(&["--server=", "--token=s3cret"]).unwrap(), &none).await;
    assert!(text.contains("--server is not a URL") && !text.contains("s3cret"), "{text}");
    for wrong in [
        &["--server", "https://a", "--kube-server", "https://b"][..],
        &["--insecure-skip-tls-verify", "--certificate-authority", ca],
        &["--client-key", key],
        &["--as-group", "x"],
        &["--kube-server", "https://b", "--token", "s3cret"],
    ] {
        let error = flags(wrong).expect_err("the flags conflict").to_string();
        assert!(!error.contains("s3cret"), "{error}");
    }
}

/// Rare parts of a request, such as opening a connection, have futures of their own. Otherwise each request
/// moves and keeps what they need.
#[test]
fn the_future_of_a_request_is_small() {
    let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let api = ApiServer::new(&config, "a test".to_owned()).unwrap();
    let module = KubernetesApi::new(api, "v", "c");
    let answer = module.call(Request::new(grpc::full(Bytes::new())));
    let size = std::mem::size_of_val(&*answer);
    assert!(size <= 4 * 1024, "{size} bytes");
}
