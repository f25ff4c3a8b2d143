//! Diffs for callers of the Kubernetes API endpoint, as JSON.

use async_trait::async_trait;
use bytes::Bytes;
use grpc::{Code, Status};
use kubernetes_api::{DiffQuestion, Diffs};
use proto::kas::api::v1::{
    DiffChange, DiffRequest, DiffResponse,
    diff_request::{File, Files, Of},
};
use serde_json::json;

use super::SyncService;

#[async_trait]
impl Diffs for SyncService {
    async fn diff(&self, question: DiffQuestion) -> Result<Bytes, Status> {
        let DiffQuestion { agent, project, files, run_as } = question;
        let files = files.into_iter().map(|(path, content)| File { path, content });
        let of = Some(Of::Files(Files { files: files.collect() }));
        let request = DiffRequest { agent_id: agent.get(), project, of };
        let made = match run_as {
            Some(identity) => self.diff_for(request, identity).await,
            None => Self::diff(self, request).await,
        };
        let code = |status: &tonic::Status| Code::from_number(i64::from(status.code() as i32));
        let made = made.map_err(|status| Status::new(code(&status), status.message()))?;
        Ok(to_json(&made))
    }
}

/// The same fields as those of `kasctl diff -o json`.
fn to_json(made: &DiffResponse) -> Bytes {
    let change = |change: &DiffChange| {
        let DiffChange { action, group, kind, namespace, name, file, diff, error } = change;
        let file = Some(file).filter(|file| !file.is_empty());
        json!({
            "action": action,
            "object": { "group": group, "kind": kind, "namespace": namespace, "name": name },
            "file": file,
            "diff": diff,
            "error": error,
        })
    };
    let changes: Vec<_> = made.changes.iter().map(change).collect();
    let mut json =
        json!({ "changes": changes, "unchanged": made.unchanged, "warnings": made.warnings }).to_string();
    json.push('\n');
    json.into()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_diff_is_one_document() {
        let change = DiffChange {
            action: "prune".to_owned(),
            kind: "ConfigMap".to_owned(),
            name: "a".to_owned(),
            ..DiffChange::default()
        };
        let made = DiffResponse { changes: vec![change], unchanged: 3, warnings: vec!["w".to_owned()] };
        let parsed: Value = serde_json::from_slice(&to_json(&made)).unwrap();
        assert_eq!(parsed["changes"][0]["file"], Value::Null);
        assert_eq!(parsed["changes"][0]["object"]["name"], "a");
        assert_eq!((&parsed["unchanged"], &parsed["warnings"][0]), (&json!(3), &json!("w")));
    }
}
