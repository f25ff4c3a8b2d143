//! What the audit log of kas says, and that of the API server.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{kas::eventually, kubernetes::Kubernetes};

use crate::setup::{AGENT, Setup};

/// The methods of the lines about a webhook.
pub(crate) const POST: &str = "/kas.hooks.v1.Hooks/Post";
pub(crate) const DEAD: &str = "/kas.hooks.v1.Hooks/Dead";
/// That of all lines about requests to an API server.
pub(crate) const MAKE_REQUEST: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

/// A webhook was accepted and delivered.
pub(crate) async fn delivered(it: &Setup, id: &str) -> Result<()> {
    it.pair(json!({
        "method": POST, "request_id": id, "actor": "hook", "subject": "push", "agent_id": AGENT,
        "decision": "allow", "rule": "credential", "status": "OK",
    }))
    .await?;
    let line = it
        .pair(json!({
            "method": MAKE_REQUEST, "actor": "kas", "subject": format!("hook:push/{id}"), "agent_id": AGENT,
            "source": "hooks", "verb": "create", "resource": "services/proxy", "http_status": 200,
        }))
        .await?;
    is_joined(&line)
}

/// A line about a request to an API server has an id that that adopts.
pub(crate) fn is_joined(line: &Value) -> Result<()> {
    let id = line["audit_id"].as_str().with_context(|| format!("no id: {line}"))?;
    let digits = id.strip_prefix("kas-").with_context(|| format!("not an id of kas: {line}"))?;
    ensure!(digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()), "{line}");
    Ok(())
}

/// Waits until each request of the agent that the API server has in its log is in that of kas. Returns the
/// lines of kas about those that the API server has.
pub(crate) async fn joined(it: &Setup, kubernetes: &Kubernetes) -> Result<Vec<Value>> {
    let user = format!("system:serviceaccount:{}:agentk", it.namespace);
    eventually("both logs have the same requests", async || {
        let log = std::fs::read_to_string(kubernetes.audit_log())?;
        let mut theirs = BTreeSet::new();
        for line in log.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let event: Value = serde_json::from_str(line)?;
            if event["user"]["username"] == *user {
                theirs.insert(event["auditID"].as_str().context("an id")?.to_owned());
            }
        }
        let ours = it.audited()?;
        let is_theirs = |line: &&Value| line["audit_id"].as_str().is_some_and(|id| theirs.contains(id));
        let known: Vec<Value> = ours.iter().filter(is_theirs).cloned().collect();
        let ids: BTreeSet<&str> = known.iter().filter_map(|line| line["audit_id"].as_str()).collect();
        let unknown = theirs.iter().filter(|id| !ids.contains(id.as_str())).count();
        Ok(if unknown == 0 && !theirs.is_empty() { Ok(known) } else { Err((unknown, theirs.len())) })
    })
    .await
}
