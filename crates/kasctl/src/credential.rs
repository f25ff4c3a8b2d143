//! `kasctl credential`: a credential plugin of kubectl.

use std::{env, ffi::OsString, time::Duration};

use serde::{Deserialize, Serialize};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    cli::CredentialArgs,
    failure::{Exit, Failure},
    kas_url,
    output::Output,
    table::printable,
    user_token::Token,
};

/// The version of the interface to kubectl.
pub(crate) const API_VERSION: &str = "client.authentication.k8s.io/v1";
/// The variable in which kubectl passes its request.
const EXEC_INFO: &str = "KUBERNETES_EXEC_INFO";
const KIND: &str = "ExecCredential";

/// The request of kubectl. Other fields are not needed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecInfo {
    api_version: String,
    kind: String,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Default, Deserialize)]
struct Spec {
    /// With `provideClusterInfo` only.
    cluster: Option<Cluster>,
}

#[derive(Debug, Deserialize)]
struct Cluster {
    server: String,
}

/// The answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredential<'a> {
    api_version: &'static str,
    kind: &'static str,
    status: Status<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status<'a> {
    token: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    expiration_timestamp: Option<String>,
}

/// Prints the credential.
///
/// # Errors
/// There is no token, it has expired, or it is not for this server.
pub(crate) async fn run(output: &mut Output, args: &CredentialArgs) -> Result<Exit, Failure> {
    let server = server(env::var_os(EXEC_INFO))?;
    let mut agent = args.agent;
    if let Some(server) = &server {
        if let Some(url) = &args.url
            && !url.serves(server)
        {
            return Err(Failure::OtherServer { server: printable(server), url: url.to_string() });
        }
        let named = kas_url::agent_of(server);
        if named.is_some() && args.agent.is_some() && args.agent != named {
            return Err(Failure::Usage("the server of the kubeconfig is not that of the agent of --agent"));
        }
        // A server may name the agent in its host instead. Then only the flag does.
        agent = named.or(args.agent);
    }
    let source = args.source.source(args.client_id.as_deref());
    let token = source.token(agent, process::clock::wall()).await?;
    output.json_line(&credential(&token)).await?;
    Ok(Exit::Ok)
}

/// Returns the server that kubectl connects to, if it names one.
fn server(info: Option<OsString>) -> Result<Option<String>, Failure> {
    let Some(info) = info.filter(|info| !info.is_empty()) else { return Ok(None) };
    let info: ExecInfo = serde_json::from_slice(info.as_encoded_bytes()).map_err(Failure::ExecInfo)?;
    if info.kind != KIND || info.api_version != API_VERSION {
        return Err(Failure::ExecVersion(printable(&info.api_version)));
    }
    Ok(info.spec.cluster.map(|cluster| cluster.server))
}

fn credential(token: &Token) -> ExecCredential<'_> {
    let expiration_timestamp = token.usable_until().and_then(timestamp);
    let status = Status { token: token.expose(), expiration_timestamp };
    ExecCredential { api_version: API_VERSION, kind: KIND, status }
}

/// Returns a time as RFC 3339 in UTC; `None`: it is after the year 9999, which is as good as never.
fn timestamp(since_1970: Duration) -> Option<String> {
    let seconds = i64::try_from(since_1970.as_secs()).ok()?;
    OffsetDateTime::from_unix_timestamp(seconds).ok()?.format(&Rfc3339).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_that_of_the_request() {
        let of = |text: &str| server(Some(text.into()));
        let info = |version: &str, spec: &str| {
            format!(
                "{{\"apiVersion\":\"client.authentication.k8s.io/{version}\",\"kind\":\"ExecCredential\"{spec}}}"
            )
        };
        let cluster =
            ",\"spec\":{\"interactive\":false,\"cluster\":{\"server\":\"https://k\",\"config\":null}}";
        assert_eq!(of(&info("v1", cluster)).unwrap().as_deref(), Some("https://k"));
        assert_eq!(of(&info("v1", ",\"spec\":{\"interactive\":true}")).unwrap(), None);
        assert_eq!(of("").unwrap(), None);
        assert_eq!(server(None).unwrap(), None);
        assert!(matches!(of(&info("v1beta1", cluster)), Err(Failure::ExecVersion(_))));
        assert!(matches!(of("{"), Err(Failure::ExecInfo(_))));
    }

    #[test]
    fn times_are_in_utc() {
        assert_eq!(timestamp(Duration::from_secs(1_700_000_060)).as_deref(), Some("2023-11-14T22:14:20Z"));
        assert_eq!(timestamp(Duration::MAX), None);
    }
}
