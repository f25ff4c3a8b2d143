//! `POST /fleet/diff?agent=…&project=…`: what files of manifests would change in a cluster.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use callers::Authorized;
use grpc::Status;
use http::{HeaderMap, Response, StatusCode};
use http_body::Body as HttpBody;
use ids::{AgentId, Impersonation};
use kube_request::{Kind, Target};
use net::http::{Body, Trust};
use serde_json::Value;

use super::{
    About,
    fleet::{Asked, read, routes::FILES},
    of_kas,
};
use crate::{KubernetesApi, ended_by::EndedBy, failure::Failure, record::Ending, selection};

/// The most files of a diff.
const MOST_FILES: usize = 10_000;
/// The content of all files together, in bytes.
const MOST_CONTENT: usize = 20 << 20;
/// Diffs whose files are held in memory at once, of all callers.
pub(crate) const DIFFS: usize = 4;
/// The longest name of a project, in bytes.
const LONGEST_PROJECT: usize = 1_024;

/// Makes diffs of manifests.
#[async_trait]
pub trait Diffs: Send + Sync {
    /// Returns what these files would change in the cluster of an agent, as JSON. Nothing is written.
    ///
    /// # Errors
    /// A status for people.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn diff(&self, question: DiffQuestion) -> Result<Bytes, Status>;
}

/// What [`Diffs`] is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffQuestion {
    /// The agent.
    pub agent: AgentId,
    /// The name of a manifest project of its configuration.
    pub project: String,
    /// Paths and contents.
    pub files: Vec<(String, Bytes)>,
    /// As whom the cluster is asked; `None`: with agentk's own rights, which the caller has.
    pub run_as: Option<Impersonation>,
}

/// Agent and project of the query.
fn named(path_and_query: &str) -> Result<(Option<AgentId>, String), Failure> {
    let target =
        Target::parse(path_and_query.to_owned()).map_err(|error| Failure::malformed(error.to_string()))?;
    let (mut agent, mut project) = (None, None);
    for (key, values) in target.query_values() {
        let [value] = values.as_slice() else {
            return Err(Failure::malformed(format!("the query names {key} more than once")));
        };
        match key.as_str() {
            "agent" => {
                let id: AgentId = value.parse().map_err(|_| {
                    Failure::malformed("the query must have agent=, and the number of an agent")
                })?;
                agent = Some(id);
            }
            "project" if !value.is_empty() && value.len() <= LONGEST_PROJECT => project = Some(value.clone()),
            "project" => {}
            _ => {
                let text = format!("the query has {key}, and only agent and project are known");
                return Err(Failure::malformed(text));
            }
        }
    }
    let project = project.ok_or_else(|| {
        Failure::malformed("the query must have project=, and the name of a manifest project of the agent")
    })?;
    Ok((agent, project))
}

/// Reads the body: `{"files": [{"path": "…", "content": "…"}]}`.
fn files(body: &[u8]) -> Result<Vec<(String, Bytes)>, String> {
    const EXPECTED: &str = r#"expected {"files": [{"path": "a.yaml", "content": "…"}]}"#;
    let parsed: Value = serde_json::from_slice(body).map_err(|error| format!("{error}; {EXPECTED}"))?;
    let Value::Object(mut parsed) = parsed else { return Err(EXPECTED.to_owned()) };
    let Some(Value::Array(listed)) = parsed.remove("files") else { return Err(EXPECTED.to_owned()) };
    if let Some(key) = parsed.keys().next() {
        return Err(format!("unknown key {key:?}; {EXPECTED}"));
    }
    if listed.len() > MOST_FILES {
        return Err(format!("there are {} files; at most {MOST_FILES}", listed.len()));
    }
    let mut size = 0;
    let mut files = Vec::with_capacity(listed.len());
    for (n, file) in listed.into_iter().enumerate() {
        let wrong = || format!("files[{n}]: {EXPECTED}");
        let Value::Object(mut file) = file else { return Err(wrong()) };
        let (Some(Value::String(path)), Some(Value::String(content)), true) =
            (file.remove("path"), file.remove("content"), file.is_empty())
        else {
            return Err(wrong());
        };
        if path.is_empty() {
            return Err(wrong());
        }
        size += content.len();
        files.push((path, Bytes::from(content)));
    }
    if size > MOST_CONTENT {
        return Err(format!("the files have {size} bytes; at most {MOST_CONTENT}"));
    }
    Ok(files)
}

impl KubernetesApi {
    /// Answers with a diff of the files in the body.
    pub(super) async fn diff<B>(
        self: &Arc<Self>,
        about: &mut About,
        trust: &Trust,
        asked: Asked<'_, B>,
    ) -> Result<Response<Body>, Failure>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Send,
    {
        let Asked { parts, path, body, credential, by_host, stream } = asked;
        let prefix = &self.settings.prefix;
        let (by_query, project) = named(path)?;
        let by_credential = credential.as_ref().ok().and_then(|credential| credential.as_ref()?.agent());
        let agent = selection::agreed([by_query, by_host, by_credential], prefix)?;
        about.record.target(agent, None);
        about.agent = Some(agent);
        about.kind = Some(Kind::Short);
        about.record.endpoint(|fields| fields.kind = Some(Kind::Short.as_str()));
        let credential = self.credential(credential, trust)?;
        let authorized = self.authorize(about, trust, &credential, agent).await?;
        drop(credential);
        let Authorized { caller, run_as, .. } = &authorized;
        let open = self.open.open(Kind::Short, caller, agent, stream.reset)?;
        let permit = self.diffs_open.try_acquire();
        let _permit = permit
            .map_err(|_| Failure::too_many(format!("{DIFFS} diffs of files are being made by this kas")))?;
        about.record.allowed_at_endpoint(parts.method.as_str(), &HeaderMap::new());
        about.is_allowed = true;
        let mut ending = Ending::new(about.record.clone(), Arc::clone(&self.metrics), Kind::Short);

        let making = async {
            let body = read(body, FILES, self.open.limits().silent_upload).await?;
            let files = tokio::task::spawn_blocking(move || files(&body)).await;
            let files = files.unwrap_or_else(|error| Err(format!("the files could not be read: {error}")));
            let files = files.map_err(|text| Failure::malformed(format!("the body: {text}")))?;
            let run_as = run_as.impersonation().cloned();
            let question = DiffQuestion { agent, project, files, run_as };
            self.diffs.diff(question).await.map_err(|status| Failure::of_diff(&status))
        };
        let shared = Arc::clone(open.shared());
        let made = tokio::select! {
            biased;
            verdict = shared.ended() => Err(self.ended_early(verdict, agent, &about.method, Kind::Short)),
            made = making => made,
        };
        match made {
            Ok(json) => {
                ending.status(StatusCode::OK);
                ending.ended_by(EndedBy::Upstream);
                ending.passed(json.len());
                Ok(of_kas(&about.method, "application/json", json))
            }
            Err(failure) => {
                ending.status(failure.status.code());
                ending.ended_by(failure.ended_by);
                Err(failure)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_and_project_are_in_the_query() {
        let (agent, project) = named("/fleet/diff?agent=7&project=group%2Fmanifests").unwrap();
        assert_eq!((agent, project.as_str()), (AgentId::new(7).ok(), "group/manifests"));
        assert_eq!(named("/fleet/diff?project=a").unwrap(), (None, "a".to_owned()));
        for wrong in
            ["", "?agent=7", "?project=", "?project=a&agent=x", "?project=a&project=b", "?project=a&x=1"]
        {
            assert!(named(&format!("/fleet/diff{wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_read_and_wrong_ones_named() {
        let good = br#"{"files": [{"path": "a.yaml", "content": "x: 1\n"}]}"#;
        assert_eq!(files(good).unwrap(), [("a.yaml".to_owned(), Bytes::from("x: 1\n"))]);
        assert_eq!(files(br#"{"files": []}"#).unwrap(), []);
        for (wrong, place) in [
            ("", "expected"),
            ("[]", "expected"),
            (r#"{"files": [], "more": 1}"#, "more"),
            (r#"{"files": [{"path": "a", "content": "b"}, {"path": "", "content": ""}]}"#, "files[1]"),
            (r#"{"files": [{"path": "a"}]}"#, "files[0]"),
            (r#"{"files": [{"path": "a", "content": "b", "mode": 1}]}"#, "files[0]"),
        ] {
            let error = files(wrong.as_bytes()).unwrap_err();
            assert!(error.contains(place), "{wrong}: {error}");
        }
        let large = serde_json::json!({"files": [{"path": "a", "content": "x".repeat(MOST_CONTENT + 1)}]});
        assert!(files(large.to_string().as_bytes()).unwrap_err().contains("at most"));
    }
}
